"""Texts side by side: each scores as it does alone, whatever its neighbours are and whichever slot it is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
import pytest

from speclocal.core.head_spec import FEATURE
from speclocal.core.tree import DraftTree
from tests.backends.play import TOLERANCE, host, ids

KINDS = ("llama", "gemma3_text", "mistral", "gpt_oss", "gemma2", "cohere2", "qwen3_moe")
"""With sliding windows, sinks, capped scores, scaled logits, experts."""
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}
POINTS = (0, 1, FEATURE)
SLOTS = 14
"""More than the texts whose attention is one product."""


class Side:
    """A batch and, for each of its slots, the text it should hold."""

    def __init__(self, lab: Any, kind: str, slots: int = SLOTS):
        changes = CHANGES.get(kind, {})
        self.kind, self.target = kind, lab.new(kind, POINTS, **changes)
        self.single = lab.new(kind, **changes)
        backend = import_module(f"speclocal.backends.{lab.__name__.rpartition('_')[2]}")
        _, make = backend.load_training(self.target)
        self.batch, self.texts = make(slots), [None] * slots
        self._draw = np.random.default_rng(0)

    def read(self, slots: list[int], lengths: list[int]) -> None:
        prompts = [ids(length, seed=100 * length + slot) for slot, length in zip(slots, lengths, strict=True)]
        scores = self.batch.read(slots, prompts)
        logits, taps = host(self.target, scores.logits), host(self.target, scores.taps)
        assert len(logits) == len(slots)
        assert taps.shape[2] == len(POINTS)
        for row, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
            self.texts[slot] = prompt
            self._same(prompt, logits[row], taps[row, : len(prompt)], len(prompt))

    def step(self, look: int = 4) -> None:
        """One token in every slot; so many of the slots are compared."""
        tokens = self._draw.integers(0, 96, len(self.texts)).tolist()
        scores = self.batch.step(self.target.ops.array(tokens))
        logits, taps = host(self.target, scores.logits), host(self.target, scores.taps)
        assert taps.shape[:3] == (len(tokens), 1, len(POINTS))
        held = [slot for slot, text in enumerate(self.texts) if text is not None]
        for slot in held:
            self.texts[slot] = [*self.texts[slot], tokens[slot]]
        for slot in {held[0], held[-1], *self._draw.choice(held, min(look, len(held)), replace=False).tolist()}:
            self._same(self.texts[slot], logits[slot], taps[slot], 1)

    def keep(self, slots: list[int]) -> None:
        self.batch.keep(slots)
        self.texts = [self.texts[slot] for slot in slots]

    def clear(self, slots: list[int]) -> None:
        self.batch.clear(slots)
        for slot in slots:
            self.texts[slot] = None

    def _same(self, text: list[int], logits: np.ndarray, taps: np.ndarray, rows: int) -> None:
        """Logits after the text, and the states of its last rows, are those of the text alone."""
        self.single.tap(POINTS)
        self.single.prefill([])
        scores = self.single.score(DraftTree.chain(text[0], text[1:]))
        expected, states = host(self.single, scores.logits)[-1], host(self.single, scores.taps)[-rows:]
        assert np.abs(logits - expected).max() <= TOLERANCE, f"{self.kind}: logits after {len(text)} tokens"
        assert np.abs(taps - states).max() <= TOLERANCE * max(1.0, np.abs(states).max()), f"{self.kind}: states"
        self.single.tap(())


def play(lab: Any, kind: str) -> None:
    """Texts begin at different times and lengths, change places, and end."""
    side = Side(lab, kind)
    side.read([0, 3, 1, 13], [5, 23, 1, 40])
    side.step()
    side.read([2, 5, 4, *range(6, 13)], [9, 2, 31, *range(3, 10)])
    for _ in range(3):
        side.step()
    side.clear([3, 7])
    side.step()
    order = sorted(range(SLOTS), key=lambda slot: len(side.texts[slot] or ()))
    side.keep(order)
    side.step()
    side.read([0, 1], [3, 50])
    side.step()
    side.keep([13, 1, 0, 5])
    for _ in range(2):
        side.step()
    side.clear([0])
    side.keep([2, 3])
    side.step()
    side.read([1], [18])
    side.step()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_score_as_they_do_alone(lab, kind):
    play(lab, kind)


def test_scaled_logits(lab):
    """What a class does to its logits after the output layer is done for prompts too."""
    Side(lab, "granite", 2).read([0, 1], [4, 7])


def test_many_steps(lab):
    """Over the end of a buffer, and of every window."""
    side = Side(lab, "mistral", 3)
    side.read([0, 1, 2], [250, 3, 17])
    for _ in range(12):
        side.step(1)


def test_one_slot(lab):
    side = Side(lab, "gemma3_text", 1)
    side.read([0], [20])
    side.step()
    side.read([0], [3])
    side.step()


def test_the_targets_own_text_is_left_alone(lab):
    """A generation that is interrupted by a batch goes on as if nothing had been."""
    side = Side(lab, "llama", 2)
    target, prompt = side.target, ids(12, 5)
    target.prefill(prompt)
    expected = host(target, target.score(DraftTree.chain(3)).logits)
    target.prefill([])
    target.prefill(prompt)
    side.read([0, 1], [30, 4])
    side.step()
    assert list(target.cached) == prompt
    assert np.abs(host(target, target.score(DraftTree.chain(3)).logits) - expected).max() <= TOLERANCE


def _torch_slot_off(original: Any) -> Any:
    return lambda self, lengths, end: original(self, lengths + 1, end + 1)


def _mlx_slot_off(original: Any) -> Any:
    def write(self: Any, array: Any, rows: Any) -> None:
        held, self.lengths = self.lengths, [n + 1 for n in self.lengths]
        original(self, array, rows)
        self.lengths = held

    return write


def _torch_places_stay(original: Any) -> Any:
    return lambda self, slots, used: original(self, slots.sort().values, used)


def _mlx_places_stay(original: Any) -> Any:
    def select(self: Any, slots: list[int]) -> None:
        lengths = [self.lengths[slot] for slot in slots]
        original(self, sorted(slots))
        self.lengths = lengths

    return select


def _torch_padding_counts(original: Any) -> Any:
    return lambda self, ids, positions, view, last: original(
        self, ids, positions, view, None if last is None else last * 0 + last.max()
    )


def _mlx_padding_counts(original: Any) -> Any:
    return lambda norm, rows: original(norm, rows * 0 + rows.max())


MISTAKES: dict[str, dict[str, tuple[str, Any]]] = {
    "keys are written a slot off": {"torch": ("_Rows.step", _torch_slot_off), "mlx": ("_Slots.write", _mlx_slot_off)},
    "lengths change places and keys do not": {
        "torch": ("_Rows.keep", _torch_places_stay),
        "mlx": ("_Slots.select", _mlx_places_stay),
    },
    "padding is scored as the last token": {
        "torch": ("Batch._run", _torch_padding_counts),
        "mlx": ("only_rows", _mlx_padding_counts),
    },
}


@contextmanager
def mistaken(backend: str, name: str) -> Iterator[None]:
    """A backend's batch with one mistake in it."""
    owner: Any = import_module(f"speclocal.backends.{backend}.batch")
    path, make = MISTAKES[name][backend]
    *outer, attribute = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    with mock.patch.object(owner, attribute, make(getattr(owner, attribute))):
        yield


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_caught(lab, name):
    with mistaken(lab.__name__.rpartition("_")[2], name), pytest.raises(AssertionError):
        play(lab, "llama")
