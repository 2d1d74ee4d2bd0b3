"""Texts of a store in batches of about equal cost, in an order that seed and epoch decide."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from speclocal.train.material import Rows
from speclocal.train.states import States
from speclocal.train.store import Store, Written

SORTED = 32
"""Texts of so many batches are sorted by length before they are cut into batches: little padding, still mixed."""


def split(count: int, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the texts to train on, and of those held out; at least one of each if there are two."""
    order = list(range(count))
    Random(f"split {seed}").shuffle(order)
    kept = min(max(1, round(count * held_out)), max(count - 1, 0)) if held_out else 0
    return sorted(order[kept:]), sorted(order[:kept])


def plan(lengths: Sequence[int], numbers: Sequence[int], rows: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of one epoch: numbers of texts whose padded size is at most `rows`, or a single text."""
    rank = Random(f"epoch {seed} {epoch}")
    order = list(numbers)
    rank.shuffle(order)
    batches: list[list[int]] = []
    mean = sum(lengths[i] for i in order) / max(len(order), 1)
    pool = max(1, int(SORTED * rows / max(mean, 1)))
    for first in range(0, len(order), pool):
        group: list[int] = []
        for i in sorted(order[first : first + pool], key=lambda i: lengths[i]):
            if group and (len(group) + 1) * lengths[i] > rows:
                batches.append(group)
                group = []
            group.append(i)
        batches.append(group)
    rank.shuffle(batches)
    return batches


class Reader:
    """Rows of batches. longest: rows of a text beyond it are left out."""

    def __init__(self, store: Store, states: States, longest: int):
        self._texts, self._states, self._best, self._longest = store.texts, states, store.best(), longest

    def length(self, text: Written) -> int:
        """Rows of a text that are used."""
        return min(len(text.ids) - 1, self._longest)

    def rows(self, numbers: Sequence[int]) -> Rows:
        """The batch of these texts."""
        texts = [self._texts[i] for i in numbers]
        lengths = [self.length(text) for text in texts]
        size, found = max(lengths), self._states.of(numbers, lengths)
        shape = (len(texts), size)
        tokens, best = np.full(shape, -1, np.int32), np.full(shape, -1, np.int32)
        own = np.zeros(shape, bool)
        states = np.zeros((*shape, *found[0].shape[1:]), np.float16)
        for b, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            tokens[b, :n] = text.ids[1 : n + 1]
            states[b, :n] = found[b]
            best[b, :n] = self._best[text.row : text.row + n]
            own[b, max(text.own - 1, 0) : n] = True
        first = np.array([text.ids[0] for text in texts], np.int32)
        return Rows(tokens, states, best, own, first)
