"""P-EAGLE: an EAGLE-3 head that guesses several tokens in one pass, from rows that stand for tokens not known yet.

Rows of depth 0 are those of EAGLE-3: row i holds the target's states at token i and token i + 1, and predicts token
i + 2. A row of depth d behind row a holds the mask token and `mask_hidden` instead, stands at position a + d, and
predicts token a + d + 2. It sees the true rows up to a and the shallower rows behind a. Only a part of the rows is
trained at each depth (conditional drop, COD): r^d of them, each with all shallower rows behind the same true one.

The format stores a whole embedding. Only the mask token's row has to differ from the target's, so that row alone is
trained (`mask_embedding`) and the table is put together when the head is written; `embedding=yes` trains all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from speclocal.core.head_spec import EagleSpec
from speclocal.core.interfaces import Array
from speclocal.errors import UsageError
from speclocal.train.eagle_body import EagleBody, Kept, causal
from speclocal.train.initial import SPREAD, eagle_tensors
from speclocal.train.law import Law
from speclocal.train.material import Material, Outcome, Params, Rows
from speclocal.train.published import p_eagle
from speclocal.train.specs import eagle_spec
from speclocal.train.vocabulary import DraftVocabulary

TABLE, MASK = "embed_tokens.weight", "mask_embedding"


@dataclass(frozen=True)
class Settings:
    """depth: tokens guessed in a pass. ratio, least: share of the rows kept from each depth to the next, and the least.
    layers: of the head. mask_token: -1 for one the target never wrote. embedding: train the whole table.
    divergence, skip_outside: see EAGLE-3. seed: of the rows that are kept."""

    depth: int = 6
    ratio: float = 0.7
    least: float = 0.2
    layers: int = 2
    draft_vocab: int = 8192
    mask_token: int = -1
    embedding: bool = False
    divergence: Literal["cross_entropy", "kl"] = "cross_entropy"
    skip_outside: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.depth < 1 or self.layers < 1:
            raise UsageError("impossible depth or layers", got=f"{self.depth}, {self.layers}", expected="1 or more")
        if not (0 < self.ratio <= 1 and 0 < self.least <= 1):
            raise UsageError(
                "impossible ratio or least", got=f"{self.ratio}, {self.least}", expected="above 0, up to 1"
            )


@dataclass(frozen=True)
class Sample:
    """The rows behind the true ones, the same for all texts of a batch. anchor, depth: [R], depths ascending from 1."""

    anchor: np.ndarray
    depth: np.ndarray

    @classmethod
    def draw(cls, rows: int, settings: Settings, seed: int) -> Sample:
        """At each depth a share of the rows whose prediction still lies within so many rows, of those kept so far."""
        order = np.random.default_rng([settings.seed, seed]).permutation(rows)
        anchors, depths = [], []
        for d in range(1, min(settings.depth, rows)):
            order = order[order < rows - d]
            order = order[: max(1, round(max(settings.ratio**d, settings.least) * (rows - d)))]
            anchors.append(np.sort(order))
            depths.append(np.full(len(order), d))
        none = [np.zeros(0, int)]
        return cls(np.concatenate(none + anchors), np.concatenate(none + depths))

    def all_rows(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Anchors and depths [S + R] of the true rows and those behind them."""
        anchor = np.concatenate([np.arange(size), self.anchor])
        return anchor, np.concatenate([np.zeros(size, int), self.depth])

    def seen(self, true: np.ndarray) -> np.ndarray:
        """[1, S + R, S + R] which rows a row sees. true: [S, S] of the true rows among themselves."""
        anchor, depth = self.all_rows(len(true))
        own = (anchor[:, None] == anchor) & (depth[:, None] >= depth)
        before = (depth == 0) & (anchor[:, None] >= anchor)
        same_text = (true | true.T)[anchor][:, anchor]
        return ((own | before) & same_text)[None]


class Objective:
    """See `material.Objective`."""

    def __init__(self, settings: Settings, spec: EagleSpec, material: Material, vocabulary: DraftVocabulary):
        self.settings, self.spec, self._material, self._vocabulary = settings, spec, material, vocabulary
        self._body = EagleBody(spec, material.ops)
        self._output = material.output_rows(vocabulary.ids.tolist())
        self._scale = np.concatenate(material.scales[:-1]).astype(np.float32)
        self._scales = material.array(self._scale)

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """See Objective. The mask token begins as the mean of all tokens, `mask_hidden` at random, both of usual size:
        norms follow, and the gradient of a norm's input is the larger the smaller that is."""
        out = eagle_tensors(self.spec, self._material, self._vocabulary, seed)
        out["mask_hidden"] /= SPREAD
        mean = out[TABLE].mean(0)
        mean *= np.sqrt((out[TABLE] ** 2).mean() / max((mean**2).mean(), 1e-12))
        if self.settings.embedding:
            out[TABLE][self.spec.mask_token] = mean
        else:
            del out[TABLE]
            out[MASK] = mean[None]
        return out

    def loss(self, params: Params, rows: Rows, progress: float) -> Outcome:
        """See Objective. The rows kept are drawn by `progress`, so that a training that is resumed draws the same."""
        law = Law.of(rows, self._material, self._vocabulary, self._output, self.settings.skip_outside)
        states = rows.states[..., :-1, :].reshape(*rows.states.shape[:2], -1)
        states = self._material.array(states.astype(np.float32)) / self._scales
        size = rows.tokens.shape[1]
        sample = Sample.draw(size, self.settings, int(progress * 2**32))
        return self.over(params, rows.tokens, states, law, sample, np.tril(np.ones((size, size), bool)))

    def over(
        self,
        params: Params,
        tokens: np.ndarray,
        states: Array,
        law: Law,
        sample: Sample,
        true: np.ndarray,
        positions: np.ndarray | None = None,
    ) -> Outcome:
        """The loss of one pass; arguments as `outputs`."""
        y = self.outputs(params, tokens, states, sample, true, positions)
        y = y.reshape(-1, y.shape[-1])
        size = tokens.shape[1]
        anchor, depth = sample.all_rows(size)
        place = law.place[:, anchor + depth]
        count = max(float(law.weight[place[place >= 0]].sum()), 1.0)
        total: Array = 0.0
        losses, hits, at = [], [], []
        for d in range(self.settings.depth):
            text, column = np.nonzero((place >= 0) & (depth == d))
            row = self._material.array((text * len(anchor) + column).astype(np.int32))
            z = y[row] @ params["lm_head.weight"].T
            table = place[text, column].astype(np.int32)
            loss, hit = law.compare(z, self._material.array(table), self.settings.divergence)
            losses.append(loss / count)
            total = total + losses[-1]
            hits.append(hit)
            at.append((text * size + anchor[column]).astype(np.int32))
        return Outcome(total, losses, hits, at)

    def outputs(
        self,
        params: Params,
        tokens: np.ndarray,
        states: Array,
        sample: Sample,
        true: np.ndarray,
        positions: np.ndarray | None = None,
    ) -> Array:
        """What the output matrix reads, [B, S + R, D]: true rows, then those of the sample.

        tokens: [B, S], as in Rows. states: [B, S, A * H]. true: [S, S] see `Sample.seen`. positions: [S], from 0.
        """
        body = self._body
        anchor, depth = sample.all_rows(tokens.shape[1])
        positions = np.arange(tokens.shape[1]) if positions is None else positions
        emb, hidden = self._inputs(params, tokens, states, len(sample.depth))
        kept = [Kept() for _ in range(self.spec.layers)]
        rope = body.rope((positions[anchor] + depth)[None])
        bias = self._material.ops.array(causal(sample.seen(true)))
        return body.out(params, body.step(params, emb, hidden, rope, kept, bias))[0]

    def _inputs(self, params: Params, tokens: np.ndarray, states: Array, masks: int) -> tuple[Array, Array]:
        """Embeddings and hidden states of the true rows and those behind, [B, S + R, D]."""
        xp, body = self._material.ops.xp, self._body
        ids = self._material.array(np.maximum(tokens, 0))
        if TABLE in params:
            emb, mask = params[TABLE][ids], params[TABLE][self.spec.mask_token]
        else:
            emb, mask = self._material.embed(ids), params[MASK][0]
        hidden = body.fuse(params, states)
        if not masks:
            return emb, hidden
        fused = body.fuse(params, params["mask_hidden"].reshape(-1))
        shape = (tokens.shape[0], masks, self.spec.hidden)
        emb = xp.concat([emb, xp.broadcast_to(mask, shape)], 1)
        return emb, xp.concat([hidden, xp.broadcast_to(fused, shape)], 1)

    def files(self, params: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """See Objective."""
        return p_eagle(self.fold(params), self.spec, self._vocabulary, self._material)

    def fold(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors for states as they are, with the whole embedding."""
        out = {name: np.asarray(value, np.float32) for name, value in params.items()}
        out["fc.weight"] = out["fc.weight"] / self._scale
        out["mask_hidden"] = out["mask_hidden"].reshape(-1) * self._scale
        if MASK in out:
            every = self._material.array(np.arange(self.spec.vocab, dtype=np.int32))
            out[TABLE] = np.array(self._material.numpy(self._material.embed(every)), np.float32)
            out[TABLE][self.spec.mask_token] = out.pop(MASK)[0]
        return out


def make(settings: Settings, material: Material) -> Objective:
    """The objective for a target. ModelError for one that no head can be made for, UsageError for no token of it."""
    counts, vocab = material.counts, material.facts.vocab
    mask = settings.mask_token
    if not -1 <= mask < vocab:
        raise UsageError("mask token", got=mask, expected=f"0 to {vocab - 1}, or -1")
    if mask == -1:
        mask = int(np.flatnonzero(counts == counts.min())[-1])
    vocabulary = DraftVocabulary.of(counts, settings.draft_vocab)
    spec = eagle_spec(
        "p_eagle",
        material.config,
        material.facts,
        material.taps[:-1],
        len(vocabulary.ids),
        layers=settings.layers,
        mask_token=mask,
        depth=settings.depth,
    )
    return Objective(settings, spec, material, vocabulary)
