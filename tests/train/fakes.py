"""A scripted target in numpy: its law depends on all tokens so far, its states say which text and row they are of."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from speclocal.core.interfaces import Ops, Scores
from speclocal.train.jobs import Turns
from speclocal.train.store import Store

VOCAB, HIDDEN = 24, 3
TAPS = (1, -1)
USER, ASSISTANT, END, LINE = 0, 1, 2, 3
TURNS = Turns(before=(USER,), after=(END, ASSISTANT, LINE), ends=frozenset({END}))
ABOUT = {"target": "fake", "seed": 0}


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    p = np.exp(x - x.max(axis, keepdims=True))
    return p / p.sum(axis, keepdims=True)


def _top(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-x, -1, kind="stable")[:, :k]
    return np.take_along_axis(x, order, -1), order


OPS = Ops(
    xp=SimpleNamespace(argmax=np.argmax, softmax=_softmax, where=np.where, cumsum=np.cumsum),
    array=np.asarray,
    arange=np.arange,
    noise=lambda *_: None,
    top=_top,
    to_host=lambda *arrays: [array.tolist() for array in arrays],
)


def digest(ids: Sequence[int]) -> int:
    """A number for a beginning of a text."""
    return zlib.crc32(np.asarray(ids, np.int64).tobytes())


def law(ids: Sequence[int]) -> np.ndarray:
    """[V] logits after these tokens: ends now and then, template tokens never."""
    logits = np.random.default_rng(digest(ids)).normal(0, 2, VOCAB)
    logits[[USER, ASSISTANT, LINE]] = -30.0
    logits[END] = 1.0
    return logits


def state(ids: Sequence[int]) -> np.ndarray:
    """[E, D] of the last of these tokens; exact in float16."""
    return np.array([[digest(ids) % 2000, ids[-1], e] for e in range(len(TAPS))], np.float64)


def states_of(ids: Sequence[int]) -> np.ndarray:
    """[len(ids) - 1, E, D]: what a text should be stored with."""
    return np.stack([state(ids[: n + 1]) for n in range(len(ids) - 1)]).astype(np.float16)


class Batch:
    """Implements `core.interfaces.Batch`. widths: slots of every pass, to see what was computed."""

    def __init__(self, slots: int, law: Callable[[Sequence[int]], np.ndarray] = law):
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        self.widths: list[int] = []
        self._law = law

    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Scores:
        for slot, prompt in zip(slots, prompts, strict=True):
            assert not self.texts[slot], "the slot holds a text"
            self.texts[slot] = list(prompt)
        taps = np.full((len(prompts), max(map(len, prompts)), len(TAPS), HIDDEN), 1e9)
        for b, prompt in enumerate(prompts):
            taps[b, : len(prompt)] = [state(prompt[: n + 1]) for n in range(len(prompt))]
        return Scores(np.stack([self._law(prompt) for prompt in prompts]), taps)

    def step(self, tokens: np.ndarray) -> Scores:
        self.widths.append(len(tokens))
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            if text:
                text.append(token)
        rows = [text or [LINE] for text in self.texts]
        return Scores(np.stack([self._law(row) for row in rows]), np.stack([state(row)[None] for row in rows]))

    def keep(self, slots: Sequence[int]) -> None:
        self.texts = [self.texts[slot] for slot in slots]

    def clear(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.texts[slot] = []


def open_store(folder: Path, **changes: Any) -> Store:
    """A store of the fake target's texts."""
    about = {**ABOUT, **changes.pop("about", {})}
    return Store(folder, about, changes.pop("taps", TAPS), changes.pop("hidden", HIDDEN), **changes)


def add(store: Store, job: int, ids: Sequence[int], own: int = 1) -> None:
    """Store a text with the states it should have."""
    store.add(job, ids, own, states_of(ids), np.arange(len(ids) - 1) + 100 * job)
