"""Texts written side by side are those a target writes alone, and their states those of a fresh pass over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speclocal.core.head_spec import FEATURE
from speclocal.core.interfaces import Batch, Scores
from speclocal.train.jobs import Job, Turns
from speclocal.train.store import Store
from speclocal.train.writing import Limits, Writer
from tests.backends.kinds import VOCAB
from tests.backends.play import TOLERANCE, ids

KINDS = ("llama", "gemma3_text", "mistral")
"""Without sliding windows, with some, with nothing else."""
POINTS = (0, 1, FEATURE)
TURNS = Turns(before=(90,), after=(91, 92), ends=frozenset({93}))
LIMITS = Limits(answer=26, question=12, shortest=1, slots=14)
JOBS = 34
HALF = 2**-10
"""Relative rounding of float16."""


def jobs() -> list[Job]:
    """Questions of the target's own, and prompts of many lengths."""
    own = [Job(n, (*TURNS.before, *ids(n % 5, seed=n)), asks=True, given=n % 5) for n in range(0, JOBS, 2)]
    given = [Job(n, tuple(ids(1 + 3 * n % 37, seed=n)), asks=False) for n in range(1, JOBS, 2)]
    return sorted([*own, *given], key=lambda job: job.number)


class Written:
    """What a target wrote, and what the untouched framework says to it."""

    def __init__(
        self, lab: Any, kind: str, folder: Path, slots: int, wrap: Callable[[Batch], Any] = lambda batch: batch
    ):
        self.lab, self.kind = lab, kind
        target = lab.new(kind, POINTS)
        backend = import_module(f"speclocal.backends.{lab.__name__.rpartition('_')[2]}")
        gradients, make = backend.load_training(target)
        self.store = Store(folder, {}, POINTS, target.facts.hidden)
        batch = wrap(make(slots))
        writer = Writer(target.ops, batch, gradients.numpy, TURNS, LIMITS, self.store, lambda tokens: None, slots)
        writer.run(iter(jobs()), lambda: False)
        lines = map(json.loads, (folder / "texts.jsonl").read_text().splitlines())
        self.numbers = [line["job"] for line in lines if "ids" in line]

    def answers_are_plain(self) -> None:
        """At temperature 0 an answer is what the target says alone."""
        seen = 0
        for number, text in zip(self.numbers, self.store.texts, strict=True):
            if LIMITS.answer_temperatures[number % 2] or text.own < 2:
                continue
            question = TURNS.asked(text.ids) if number % 2 == 0 else ()
            begun = 1 + len(question) + 2 if number % 2 == 0 else text.own
            prompt, answer = list(text.ids[:begun]), list(text.ids[begun:])
            assert answer == self.lab.plain(self.kind, prompt, len(answer)), number
            seen += len(answer)
        assert seen > 100

    def states_are_fresh(self) -> None:
        """Those of one pass over the text, and of what the target would have said."""
        states, best = self.store.states(), self.store.best()
        for text in self.store.texts:
            rows = slice(text.row, text.row + len(text.ids) - 1)
            wanted = self.lab.hidden(self.kind, text.ids, POINTS)[:-1]
            assert states[rows].shape == wanted.shape
            off = np.abs(states[rows].astype(np.float64) - wanted) - HALF * np.abs(wanted)
            assert off.max() <= TOLERANCE
            likeliest = self.lab.logits(self.kind, text.ids).argmax(-1)[:-1]
            first = text.own - 1
            assert best[rows].tolist() == [-1] * first + likeliest[first:].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_side_by_side_is_alone(lab, tmp_path, kind):
    made = Written(lab, kind, tmp_path, LIMITS.slots)
    assert len(made.store.texts) + sum(made.store.dropped.values()) == JOBS
    assert len(made.store.texts) > 20
    made.answers_are_plain()
    made.states_are_fresh()


def test_the_number_of_slots_is_no_matter(lab, tmp_path):
    found = []
    for slots in (5, 14, JOBS):
        made = Written(lab, "llama", tmp_path / f"{slots}", slots)
        found.append(dict(zip(made.numbers, (text.ids for text in made.store.texts), strict=True)))
    assert found[0] == found[1] == found[2]


class _Wrapped:
    def __init__(self, batch: Batch):
        self.batch = batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batch, name)


class KeepsOrder(_Wrapped):
    """Slots are left where they are, though the writer sorted its texts."""

    def keep(self, slots: Sequence[int]) -> None:
        self.batch.keep(sorted(slots))


class Late(_Wrapped):
    """States come one pass too late."""

    held: Any = None

    def step(self, tokens: Any) -> Scores:
        scores = self.batch.step(tokens)
        late, self.held = self.held, scores.taps
        same = late is not None and late.shape == scores.taps.shape
        return Scores(scores.logits, late if same else scores.taps)


class OtherRows(_Wrapped):
    """Prompts are read in the other order."""

    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Scores:
        return self.batch.read(list(reversed(slots)), prompts)


@pytest.mark.parametrize("wrap", [KeepsOrder, Late, OtherRows])
def test_a_batch_that_mixes_texts_is_caught(lab, tmp_path, wrap):
    made = Written(lab, "llama", tmp_path, LIMITS.slots, wrap)
    with pytest.raises(AssertionError):
        made.states_are_fresh()


def test_ends_are_stored(lab, tmp_path):
    """A text ends with its end token or at its longest, never behind either."""
    made = Written(lab, "llama", tmp_path, LIMITS.slots)
    assert all(id < VOCAB for text in made.store.texts for id in text.ids)
    for text in made.store.texts:
        assert not set(text.ids[text.own : -1]) & TURNS.ends
