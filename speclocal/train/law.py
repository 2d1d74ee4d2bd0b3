"""What a target would have said at the rows that count, cut to the draft vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

from speclocal.core.interfaces import Array
from speclocal.train.material import Material, Rows
from speclocal.train.vocabulary import DraftVocabulary


class Law:
    """The target's law at the rows that count, [M, Vd].

    output: [Vd, H] the target's output rows of the draft vocabulary. place: [B, S] number of each row among those that
    count, -1 for others. weight: [M] 0 where the likeliest token is outside.
    """

    def __init__(
        self,
        p: Array,
        output: Array,
        place: np.ndarray,
        weight: np.ndarray,
        best: np.ndarray,
        material: Material,
    ):
        self.p, self.output, self.place, self.weight = p, output, place, weight
        self._material = material
        self._best, self._weight = material.array(best), material.array(weight)

    @classmethod
    def of(
        cls, rows: Rows, material: Material, vocabulary: DraftVocabulary, output: Array, skip_outside: bool = True
    ) -> Law:
        """Row i stands for the law after token i + 1: what the first step at row i is to predict."""
        counts = ahead(rows.own, 1, False)
        place = np.where(counts, np.cumsum(counts).reshape(counts.shape) - 1, -1)
        feature = ahead(rows.states[..., -1, :], 1, 0)[counts].astype(np.float32)
        best = vocabulary.place[ahead(rows.best, 1, -1)[counts]]
        xp = material.ops.xp
        p = xp.softmax(material.array(feature) @ output.T, -1)
        weight = (best >= 0).astype(np.float32) if skip_outside else np.ones(len(best), np.float32)
        return cls(p, output, place, weight, best.astype(np.int32), material)

    def rows_of(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        """Flat rows at which step s predicts something that counts, and where in `p` that stands."""
        place = ahead(self.place, s, -1).reshape(-1)
        row = np.flatnonzero(place >= 0)
        return row.astype(np.int32), place[row].astype(np.int32)

    def first(self, steps: int) -> int:
        """The first row of a text that predicts something that counts in any of so many steps."""
        columns = np.flatnonzero((self.place >= 0).any(0))
        return max(0, int(columns[0]) - (steps - 1)) if len(columns) else 0

    def compare(self, z: Array, place: Array, divergence: str) -> tuple[Array, Array]:
        """Summed loss of logits [m, Vd], and whether each one's likeliest token is the target's."""
        xp = self._material.ops.xp
        if not len(place):  # not every backend takes the largest of nothing
            return z.sum(), z.sum(-1) > 0
        p = self.p[place] if len(place) != len(self.p) else self.p
        loss = xp.logsumexp(z, -1) - (p * z).sum(-1)
        if divergence == "kl":
            loss = loss + (p * xp.log(xp.where(p > 0, p, 1.0))).sum(-1)
        return (loss * self._weight[place]).sum(), xp.argmax(z, -1) == self._best[place]


def ahead(values: np.ndarray, s: int, fill: Any) -> np.ndarray:
    """[B, S, ...] row i gets what stands at row i + s, `fill` behind the end."""
    if s == 0:
        return values
    out = np.full_like(values, fill)
    kept = max(values.shape[1] - s, 0)
    out[:, :kept] = values[:, s : s + kept]
    return out
