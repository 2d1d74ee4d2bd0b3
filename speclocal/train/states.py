"""Where the target's states come from when a batch is made: the disk, or the target once more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from speclocal.core.interfaces import Batch, Gradients
from speclocal.train.store import Store, as_stored


class States(Protocol):
    """Gives the states of whole texts."""

    def of(self, numbers: Sequence[int], rows: Sequence[int]) -> list[np.ndarray]:
        """For each of these texts its first so many rows, [rows, E, D] float16."""


class Stored:
    """From the files of a store."""

    def __init__(self, store: Store):
        self._texts, self._states = store.texts, store.states()

    def of(self, numbers: Sequence[int], rows: Sequence[int]) -> list[np.ndarray]:
        """See States."""
        at = [self._texts[i].row for i in numbers]
        return [self._states[first : first + n] for first, n in zip(at, rows, strict=True)]


class Recomputed:
    """From the target, which reads the texts again: slower, and nothing is kept on disk."""

    def __init__(self, store: Store, batch: Callable[[int], Batch], gradients: Gradients):
        self._texts, self._batch, self._gradients = store.texts, batch, gradients

    def of(self, numbers: Sequence[int], rows: Sequence[int]) -> list[np.ndarray]:
        """See States."""
        prompts = [self._texts[i].ids[:n] for i, n in zip(numbers, rows, strict=True)]
        taps = self._gradients.numpy(self._batch(len(prompts)).read(range(len(prompts)), prompts).taps)
        return [as_stored(taps[b, :n]) for b, n in enumerate(rows)]
