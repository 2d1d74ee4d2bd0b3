"""EAGLE-3: several steps on the head's own outputs, as when it drafts (training-time test; Li et al. 2503.01840).

Row i holds the target's states at token i and token i + 1. Step s predicts token i + 2 + s: it reads token i + 1 + s and,
from the second step on, the output of the step before at the same row. The loss is the cross-entropy between the
target's law, cut to the draft vocabulary, and the head's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from speclocal.core.eagle_layout import tensors_of
from speclocal.core.head_spec import EagleSpec
from speclocal.core.interfaces import Array
from speclocal.train.eagle_body import EagleBody, Kept, causal
from speclocal.train.initial import eagle_tensors
from speclocal.train.material import Material, Outcome, Params, Rows
from speclocal.train.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Settings:
    """steps: unrolled. grow: share of the training in which their number grows from 1. decay: weight of each step
    relative to the one before. divergence, count: as trainers differ; `kl` subtracts the law's entropy, `all` divides
    by all rows and `counted` by those that count."""

    steps: int = 5
    grow: float = 0.5
    decay: float = 0.8
    draft_vocab: int = 8192
    divergence: Literal["cross_entropy", "kl"] = "cross_entropy"
    count: Literal["counted", "all"] = "counted"
    skip_outside: bool = True
    """Rows whose likeliest token is not in the draft vocabulary do not count."""


class Objective:
    """See `material.Objective`."""

    def __init__(self, settings: Settings, spec: EagleSpec, material: Material, vocabulary: DraftVocabulary):
        self.settings, self.spec, self._material, self._vocabulary = settings, spec, material, vocabulary
        self._body = EagleBody(spec, material.ops)
        self._output = material.output_rows(vocabulary.ids)
        self._scales = material.array(np.concatenate(material.scales[:-1]).astype(np.float32))

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """See Objective."""
        return eagle_tensors(self.spec, self._material, self._vocabulary, seed)

    def steps(self, progress: float) -> int:
        """How many are unrolled now."""
        settings = self.settings
        grown = 1.0 if progress >= settings.grow else progress / settings.grow
        return 1 + int((settings.steps - 1) * grown + 1e-9)

    def loss(self, params: Params, rows: Rows, progress: float) -> Outcome:
        """See Objective."""
        law = Law.of(rows, self._material, self._vocabulary, self._output, self.settings.skip_outside)
        states = rows.states[..., :-1, :].reshape(*rows.states.shape[:2], -1)
        states = self._material.array(states.astype(np.float32)) / self._scales
        seen = np.tril(np.ones((rows.tokens.shape[1],) * 2, bool))[None]
        return self.unrolled(params, rows.tokens, states, law, seen, self.steps(progress))

    def unrolled(
        self,
        params: Params,
        tokens: np.ndarray,
        states: Array,
        law: Law,
        seen: np.ndarray,
        steps: int,
        positions: np.ndarray | None = None,
    ) -> Outcome:
        """The loss of so many steps. states: [B, S, A * H]. seen: [1 or B, S, S]. positions: [1 or B, S], from 0."""
        ops, body, settings = self._material.ops, self._body, self.settings
        hidden = body.fuse(params, states)
        size = hidden.shape[-1]
        kept = [Kept() for _ in range(self.spec.layers)]
        bias = ops.array(causal(seen))
        positions = np.arange(tokens.shape[1])[None] if positions is None else positions
        total: Array = 0.0
        losses, hits, at = [], [], []
        for s in range(steps):
            ids = self._material.array(np.maximum(_ahead(tokens, s, 0), 0))
            emb = self._material.embed(ids)
            x = body.step(params, emb, hidden, body.rope(positions + s), kept, bias)
            y, hidden = body.out(params, x)
            row, place = law.rows_of(s)
            index, table = self._material.array(row), self._material.array(place)
            z = y.reshape(-1, size)[index] @ params["lm_head.weight"].T
            step, hit = law.compare(z, table, settings.divergence)
            count = tokens.size if settings.count == "all" else max(float(law.weight[place].sum()), 1.0)
            step = step / count
            total = total + settings.decay**s * step
            losses.append(step)
            hits.append(hit)
            at.append(row)
        return Outcome(total, losses, hits, at)

    def files(self, params: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """See Objective."""
        from speclocal.train.published import eagle3

        return eagle3(self.fold(params), self.spec, self._vocabulary, self._material)

    def fold(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors for states as they are: training divides every number of them by its usual size."""
        out = {name: np.asarray(value, np.float32) for name, value in params.items()}
        assert set(out) == set(tensors_of(self.spec)) - {"d2t", "t2d"}
        out["fc.weight"] = out["fc.weight"] / np.concatenate(self._material.scales[:-1])[None]
        return out


class Law:
    """The target's law at the rows that count, [M, Vd].

    place: [B, S] number of each row among them, -1 for others. weight: [M] 0 where the likeliest token is outside.
    """

    def __init__(self, p: Array, place: np.ndarray, weight: np.ndarray, best: np.ndarray, material: Material):
        self.p, self.place, self.weight = p, place, weight
        self._material = material
        self._best, self._weight = material.array(best), material.array(weight)

    @classmethod
    def of(
        cls, rows: Rows, material: Material, vocabulary: DraftVocabulary, output: Array, skip_outside: bool = True
    ) -> Law:
        """Row i stands for the law after token i + 1: what the first step at row i is to predict."""
        counts = _ahead(rows.own, 1, False)
        place = np.where(counts, np.cumsum(counts).reshape(counts.shape) - 1, -1)
        feature = _ahead(rows.states[..., -1, :], 1, 0)[counts].astype(np.float32)
        best = vocabulary.place[_ahead(rows.best, 1, -1)[counts]]
        xp = material.ops.xp
        p = xp.softmax(material.array(feature) @ output.T, -1)
        weight = (best >= 0).astype(np.float32) if skip_outside else np.ones(len(best), np.float32)
        return cls(p, place, weight, best.astype(np.int32), material)

    def rows_of(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        """Flat rows at which step s predicts something that counts, and where in `p` that stands."""
        place = _ahead(self.place, s, -1).reshape(-1)
        row = np.flatnonzero(place >= 0)
        return row.astype(np.int32), place[row].astype(np.int32)

    def compare(self, z: Array, place: Array, divergence: str) -> tuple[Array, Array]:
        """Summed loss of logits [m, Vd], and whether each one's likeliest token is the target's."""
        xp = self._material.ops.xp
        p = self.p[place] if len(place) != len(self.p) else self.p
        loss = xp.logsumexp(z, -1) - (p * z).sum(-1)
        if divergence == "kl":
            loss = loss + (p * xp.log(xp.where(p > 0, p, 1.0))).sum(-1)
        return (loss * self._weight[place]).sum(), xp.argmax(z, -1) == self._best[place]


def _ahead(values: np.ndarray, s: int, fill: Any) -> np.ndarray:
    """[B, S, ...] row i gets what stands at row i + s, `fill` behind the end."""
    if s == 0:
        return values
    out = np.full_like(values, fill)
    out[:, : values.shape[1] - s] = values[:, s:]
    return out
