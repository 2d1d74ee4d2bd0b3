"""The draft vocabulary: the tokens a target writes most, so that a head's output matrix is small."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: [Vd] target ids, ascending but for those added by `wider`. size: V."""

    ids: np.ndarray
    size: int

    @classmethod
    def of(cls, counts: np.ndarray, size: int) -> DraftVocabulary:
        """The `size` most frequent ids of `counts` [V]; of equally frequent ones the smaller."""
        order = np.argsort(-counts, kind="stable")[: min(size, len(counts))]
        return cls(np.sort(order).astype(np.int64), len(counts))

    def wider(self, tokens: np.ndarray) -> DraftVocabulary:
        """With the tokens of a text too, in new columns behind the others; ids below 0 are none."""
        found = np.unique(tokens[tokens >= 0])
        return DraftVocabulary(np.concatenate([self.ids, found[self.place[found] < 0]]), self.size)

    @cached_property
    def place(self) -> np.ndarray:
        """[V + 1] draft id of every target id, -1 for those outside, and (last) for id -1."""
        out = np.full(self.size + 1, -1, np.int64)
        out[self.ids] = np.arange(len(self.ids))
        return out

    @property
    def d2t(self) -> np.ndarray:
        """[Vd] target id minus draft id, as heads store it."""
        return self.ids - np.arange(len(self.ids))

    @property
    def t2d(self) -> np.ndarray:
        """[V] whether an id is in the draft vocabulary."""
        out = np.zeros(self.size, bool)
        out[self.ids] = True
        return out
