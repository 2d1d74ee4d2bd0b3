"""EAGLE-3: several steps on the head's own outputs, as when it drafts (training-time test; Li et al. 2503.01840).

Row i holds the target's states at token i and token i + 1. Step s predicts token i + 2 + s: it reads token i + 1 + s
and, from the second step on, the output of the step before at the same row. The loss is the cross-entropy between the
target's law, cut to the draft vocabulary, and the head's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from speclocal.core.eagle_layout import tensors_of
from speclocal.core.head_spec import EagleSpec
from speclocal.core.interfaces import Array
from speclocal.train.eagle_body import EagleBody, Kept, causal
from speclocal.train.initial import eagle_tensors, head_tensors
from speclocal.train.law import Law, ahead
from speclocal.train.material import Material, Outcome, Params, Rows
from speclocal.train.published import eagle3
from speclocal.train.specs import eagle_spec
from speclocal.train.vocabulary import DraftVocabulary

OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class Settings:
    """steps: unrolled. grow: share of the training in which their number grows from 1. decay: weight of each step
    relative to the one before. divergence, count: as trainers differ; `kl` subtracts the law's entropy, `all` divides
    by all rows and `counted` by those that count. output: `target` keeps the target's output rows as they are, so that
    the head may draft any token of the text at hand (`core.columns`); every batch is then learnt with the columns of
    its own tokens. start: folder of a head to begin with."""

    steps: int = 5
    grow: float = 0.5
    decay: float = 0.8
    draft_vocab: int = 8192
    divergence: Literal["cross_entropy", "kl"] = "cross_entropy"
    count: Literal["counted", "all"] = "counted"
    skip_outside: bool = True
    """Rows whose likeliest token is not in the draft vocabulary do not count."""
    output: Literal["own", "target"] = "own"
    start: str = ""


class Objective:
    """See `material.Objective`."""

    def __init__(self, settings: Settings, spec: EagleSpec, material: Material, vocabulary: DraftVocabulary):
        self.settings, self.spec, self._material, self._vocabulary = settings, spec, material, vocabulary
        self._body = EagleBody(spec, material.ops)
        self._output = material.output_rows(vocabulary.ids.tolist())
        self._scales = material.array(np.concatenate(material.scales[:-1]).astype(np.float32))

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """See Objective."""
        start, of = self.settings.start, (self.spec, self._material, self._vocabulary)
        out = head_tensors(Path(start), *of) if start else eagle_tensors(*of, seed)
        return {name: value for name, value in out.items() if name != OUTPUT or self.settings.output == "own"}

    def steps(self, progress: float) -> int:
        """How many are unrolled now."""
        settings = self.settings
        grown = 1.0 if progress >= settings.grow else progress / settings.grow
        return 1 + int((settings.steps - 1) * grown + 1e-9)

    def loss(self, params: Params, rows: Rows, progress: float) -> Outcome:
        """See Objective."""
        vocabulary, output = self._vocabulary, self._output
        if self.settings.output == "target":
            vocabulary = vocabulary.wider(rows.tokens)
            more = self._material.output_rows(vocabulary.ids[len(self._vocabulary.ids) :].tolist())
            output = self._material.ops.xp.concat([output, more])
        law = Law.of(rows, self._material, vocabulary, output, self.settings.skip_outside)
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
        output: Array = params.get(OUTPUT, law.output)
        total: Array = 0.0
        losses, hits, at = [], [], []
        first = 0  # rows before it count at no step: after the first one, which makes the keys, they are left out
        for s in range(steps):
            ids = self._material.array(np.maximum(ahead(tokens, s, 0), 0)[:, first:])
            emb = self._material.embed(ids)
            rope = body.rope(positions[:, first:] + s)
            x = body.step(params, emb, hidden, rope, kept, bias[:, :, first:])
            y, hidden = body.out(params, x)
            row, place = law.rows_of(s)
            index, table = self._material.array(_without(row, tokens.shape[1], first)), self._material.array(place)
            if s == 0:
                first = law.first(steps)
                hidden = hidden[:, first:]
            z = y.reshape(-1, size)[index] @ output.T
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
        return eagle3(self.fold(params), self.spec, self._vocabulary, self._material)

    def fold(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors for states as they are: training divides every number of them by its usual size."""
        out = {name: np.asarray(value, np.float32) for name, value in params.items()}
        if OUTPUT not in out:
            out[OUTPUT] = np.asarray(self._material.numpy(self._output), np.float32)
        assert set(out) == set(tensors_of(self.spec)) - {"d2t", "t2d"}
        out["fc.weight"] = out["fc.weight"] / np.concatenate(self._material.scales[:-1])[None]
        return out


def _without(row: np.ndarray, width: int, first: int) -> np.ndarray:
    """Flat rows of texts of `width` rows, once the first so many of each text are left out."""
    return (row - first * (row // width + 1)).astype(np.int32)


def make(settings: Settings, material: Material) -> Objective:
    """The objective for a target; the draft vocabulary is what it wrote most."""
    vocabulary = DraftVocabulary.of(material.counts, settings.draft_vocab)
    taps = material.taps[:-1]
    spec = eagle_spec("eagle3", material.config, material.facts, taps, len(vocabulary.ids), depth=settings.steps)
    return Objective(settings, spec, material, vocabulary)
