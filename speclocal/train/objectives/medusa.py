"""Medusa-1: heads on the target's last feature, the target itself untouched (Cai et al. 2401.10774).

Head h (from 1) reads the feature at token i and predicts token i + 1 + h, one further than the target's own output. The
loss is the cross-entropy with the tokens the target wrote, 0.2 · 0.8^h of each head's mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from speclocal.core.head_spec import MedusaSpec
from speclocal.core.interfaces import Array
from speclocal.errors import UsageError
from speclocal.train.calibrate import RANKS, Hits, calibrate
from speclocal.train.law import ahead
from speclocal.train.material import Material, Outcome, Params, Rows
from speclocal.train.published import MedusaLayout, medusa
from speclocal.train.vocabulary import DraftVocabulary

SHARE = 0.2
"""Of the sum of all heads, as the trainer that also trains the target weighs it against the target's own loss."""
LAYOUTS = ("version2", "original", "vllm")


@dataclass(frozen=True)
class Settings:
    """heads, blocks: how many, and of each. decay: weight of each head relative to the one before. tree: most nodes of
    the calibrated tree.

    layout: `version2` with the target's output matrix; `original` with a matrix of its own for each head, which makes
    them huge; `vllm` with one copy of the target's, for vLLM. loss_vocab: the softmax runs over so many tokens, those
    the target writes most, and other labels do not count: faster by as much as this is smaller; 0 = all tokens.
    """

    heads: int = 4
    blocks: int = 1
    decay: float = 0.8
    loss_vocab: int = 0
    layout: str = "version2"
    tree: int = 63

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UsageError("unknown layout of Medusa heads", got=self.layout, expected=", ".join(LAYOUTS))
        for name in ("heads", "blocks", "tree"):
            if getattr(self, name) < 1:
                raise UsageError(f"impossible {name}", got=getattr(self, name), expected="1 or more")


class Objective:
    """See `material.Objective`."""

    def __init__(self, settings: Settings, spec: MedusaSpec, material: Material):
        self.settings, self.spec, self._material = settings, spec, material
        size = settings.loss_vocab or spec.vocab
        self._vocabulary = DraftVocabulary.of(material.counts, size)
        self._all = len(self._vocabulary.ids) == spec.vocab
        self._ids = material.array(self._vocabulary.ids.astype(np.int32))
        self._output = material.output_rows(range(spec.vocab) if spec.own_output else self._vocabulary.ids.tolist())
        self._scale = material.scales[-1].astype(np.float32)
        self._sizes = material.array(self._scale)
        self.tree: tuple[tuple[int, ...], ...] = ()

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """See Objective. Zero blocks hand on the feature, so that every head begins as the target's own output."""
        spec = self.spec
        out: dict[str, np.ndarray] = {}
        for h in range(spec.heads):
            for j in range(spec.blocks):
                out[f"heads.{h}.blocks.{j}.weight"] = np.zeros((spec.hidden, spec.hidden), np.float32)
                out[f"heads.{h}.blocks.{j}.bias"] = np.zeros(spec.hidden, np.float32)
            if spec.own_output:
                out[f"heads.{h}.output.weight"] = self._material.numpy(self._output).astype(np.float32)
        return out

    def loss(self, params: Params, rows: Rows, progress: float) -> Outcome:
        """See Objective."""
        xp, array = self._material.ops.xp, self._material.array
        feature = self._feature(rows)
        total: Array = 0.0
        losses, hits, at = [], [], []
        for h in range(self.spec.heads):
            # Row i + 1 + h holds the label as its token, and what the target would have said there.
            label = np.where(ahead(rows.own, h + 1, False), self._place(ahead(rows.tokens, h + 1, -1)), -1).reshape(-1)
            row = np.flatnonzero(label >= 0).astype(np.int32)
            best = self._place(ahead(rows.best, h + 1, -1)).reshape(-1)[row]
            z = self.logits(params, h, feature[array(row)])
            if len(row):
                lost = (xp.logsumexp(z, -1) - self._at(z, label[row])).sum() / len(row)
                hits.append(xp.argmax(z, -1) == array(best))
            else:  # not every backend takes the largest of nothing
                lost = z.sum()
                hits.append(z.sum(-1) > 0)
            losses.append(SHARE * self.settings.decay ** (h + 1) * lost)
            total = total + losses[-1]
            at.append(row)
        return Outcome(total, losses, hits, at)

    def logits(self, params: Params, h: int, x: Array) -> Array:
        """Head h (from 0) over features [m, H]: logits [m, Vd] of the tokens the loss counts."""
        xp = self._material.ops.xp
        for j in range(self.spec.blocks):
            at = f"heads.{h}.blocks.{j}."
            y = (x / self._sizes) @ params[at + "weight"].T + params[at + "bias"]
            x = x + y * xp.sigmoid(y)
        if not self.spec.own_output:
            return x @ self._output.T
        matrix = params[f"heads.{h}.output.weight"]
        return x @ (matrix if self._all else matrix[self._ids]).T

    def calibrate(self, params: Params, held_out: Iterable[Rows]) -> None:
        """Measure on texts held out which ranks are right, and choose the tree that is written with the heads."""
        counted = Hits(self.spec.heads)
        for rows in held_out:
            self.count(params, rows, counted)
        self.tree = calibrate(counted.hits, counted.rows, self.settings.tree)

    def count(self, params: Params, rows: Rows, counted: Hits) -> None:
        """Add at which rank each head has the target's likeliest token."""
        array, numpy = self._material.array, self._material.numpy
        feature = self._feature(rows)
        for h in range(self.spec.heads):
            best = ahead(rows.best, h + 1, -1)
            row = np.flatnonzero(ahead(rows.own, h + 1, False) & (best >= 0)).astype(np.int32)
            place = self._place(best).reshape(-1)[row]
            z = self.logits(params, h, feature[array(row)])
            rank = numpy((z > self._at(z, np.maximum(place, 0))[:, None]).sum(-1))
            counted.add(h, np.where(place >= 0, rank, RANKS))

    def files(self, params: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """See Objective."""
        layout: MedusaLayout = self.settings.layout  # type: ignore[assignment]  # checked when it was set
        output = self._material.numpy(self._material.output_rows(range(self.spec.vocab))) if layout == "vllm" else None
        return medusa(self.fold(params), self.spec, layout, self.tree, output)

    def fold(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors for features as they are: in training blocks read them divided by their usual size."""
        scaled = (name for name in params if ".blocks." in name and name.endswith(".weight"))
        return dict(params) | {name: params[name] / self._scale[None] for name in scaled}

    def _feature(self, rows: Rows) -> Array:
        feature = rows.states[..., -1, :].astype(np.float32)
        return self._material.array(feature.reshape(-1, feature.shape[-1]))

    def _at(self, z: Array, place: np.ndarray) -> Array:
        """The number [m] of each row of z [m, Vd] at its place [m]."""
        return z[self._material.ops.arange(len(place)), self._material.array(place)]

    def _place(self, ids: np.ndarray) -> np.ndarray:
        """Columns of tokens, -1 for those that have none."""
        return self._vocabulary.place[ids]


def make(settings: Settings, material: Material) -> Objective:
    """The objective for a target."""
    spec = MedusaSpec(
        heads=settings.heads,
        blocks=settings.blocks,
        hidden=material.facts.hidden,
        vocab=material.facts.vocab,
        own_output=settings.layout == "original",
        shared_output=False,
        bias=True,
        changes_target=False,
        notices=(),
    )
    return Objective(settings, spec, material)
