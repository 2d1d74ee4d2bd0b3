"""A small draft model of the target's own family, distilled from it: it learns the target's law of the next token.

Row i reads tokens 0..i and gives a law for token i + 1; the loss is its divergence from the target's there. Layers are
copied from the target, evenly spaced, or fresh; embeddings and output matrix are the target's and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from speclocal.core.interfaces import Array
from speclocal.errors import ModelError, UsageError
from speclocal.train.eagle_body import Decoder, Kept, causal
from speclocal.train.initial import SPREAD
from speclocal.train.law import ahead
from speclocal.train.material import Material, Outcome, Params, Rows
from speclocal.train.specs import DecoderSizes
from speclocal.train.vocabulary import DraftVocabulary

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Their layers are those of `eagle_body.Decoder`."""
PARTS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)
SOMETIMES = ("self_attn.q_norm", "self_attn.k_norm")
POSITIONS = 4
"""Positions whose acceptance is told."""


@dataclass(frozen=True)
class Settings:
    """layers: 0 = a quarter of the target's. fresh: random layers, not copies. divergence: `kl` subtracts the law's
    entropy; the gradient is the same. loss_vocab: the laws are compared over so many tokens, those the target writes
    most, and rows whose likeliest token is another do not count; 0 = all."""

    layers: int = 0
    fresh: bool = False
    loss_vocab: int = 0
    divergence: Literal["cross_entropy", "kl"] = "kl"


class Objective:
    """See `material.Objective`."""

    def __init__(self, settings: Settings, sizes: DecoderSizes, layers: int, material: Material):
        self.settings, self.layers, self._sizes, self._material = settings, layers, sizes, material
        self._body = Decoder(sizes, material.ops)
        self._vocabulary = DraftVocabulary.of(material.counts, settings.loss_vocab or material.facts.vocab)
        self._output = material.output_rows(self._vocabulary.ids.tolist())

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """See Objective. ModelError if the target's files do not hold its layers as plain numbers."""
        draw = np.random.default_rng(seed)
        out = {"norm.weight": self._weight("model.norm.weight")}
        for i, source in enumerate(spaced(self._material.facts.layers, self.layers)):
            for name in self._names(source):
                value = self._weight(f"model.layers.{source}.{name}")
                if self.settings.fresh and value.ndim > 1:
                    value = SPREAD * draw.standard_normal(value.shape, np.float32)
                elif self.settings.fresh:
                    value = np.zeros_like(value) if name.endswith(".bias") else np.ones_like(value)
                out[f"layers.{i}.{name}"] = value
        return out

    def loss(self, params: Params, rows: Rows, progress: float) -> Outcome:
        """See Objective."""
        xp, array = self._material.ops.xp, self._material.array
        best = self._vocabulary.place[rows.best]
        row = np.flatnonzero(rows.own & (best >= 0)).astype(np.int32)
        feature = rows.states[..., -1, :].reshape(-1, rows.states.shape[-1])[row].astype(np.float32)
        p = xp.softmax(array(feature) @ self._output.T, -1)
        assert rows.first is not None, "a draft model reads the text from its first token"
        hidden = self.hidden(params, np.concatenate([rows.first[:, None], rows.tokens[:, :-1]], 1))
        z = hidden.reshape(-1, hidden.shape[-1])[array(row)] @ self._output.T
        if not len(row):  # not every backend takes the largest of nothing
            return Outcome(z.sum(), [], [], [])
        total = (xp.logsumexp(z, -1) - (p * z).sum(-1)).sum() / len(row)
        if self.settings.divergence == "kl":
            total = total + (p * xp.log(xp.where(p > 0, p, 1.0))).sum() / len(row)
        hit = xp.argmax(z, -1) == array(best.reshape(-1)[row])
        hits, at = self._chains(rows, row, hit)
        return Outcome(total, [total], hits, at)

    def hidden(self, params: Params, ids: np.ndarray) -> Array:
        """What the output matrix reads after token ids [B, S], [B, S, D]."""
        body, size = self._body, ids.shape[1]
        x = self._material.embed(self._material.array(np.maximum(ids, 0).astype(np.int32)))
        rope = body.rope(np.arange(size)[None])
        bias = self._material.ops.array(causal(np.tril(np.ones((1, size, size), bool))))
        for i in range(self.layers):
            normed = body.rms(x, params[f"layers.{i}.input_layernorm.weight"])
            x = body.layer(params, i, normed, x, rope, Kept(), bias)
        return body.rms(x, params["norm.weight"])

    def _chains(self, rows: Rows, row: np.ndarray, hit: Array) -> tuple[list[Array], list[np.ndarray]]:
        """Acceptance by position: s rows on, where the text is what the target likes best up to there."""
        place = np.full(rows.own.shape, -1)
        place.reshape(-1)[row] = np.arange(len(row))
        likes = rows.tokens == rows.best
        alive, hits, at = place >= 0, [], []
        for s in range(POSITIONS):
            there = alive & (ahead(place, s, -1) >= 0)
            hits.append(hit[self._material.array(ahead(place, s, -1)[there].astype(np.int32))])
            at.append(np.flatnonzero(there).astype(np.int32))
            alive = there & ahead(likes, s, False)
        return hits, at

    def files(self, params: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """See Objective. An ordinary model: the target's config with fewer layers; the tokenizer is the target's."""
        config = dict(self._material.config)
        tensors = {f"model.{name}": np.asarray(value, np.float32) for name, value in params.items()}
        tensors["model.embed_tokens.weight"] = self._weight("model.embed_tokens.weight")
        if not config.get("tie_word_embeddings"):
            tensors["lm_head.weight"] = self._weight("lm_head.weight")
        config["num_hidden_layers"] = self.layers
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][: self.layers]
        for key in ("dtype", "quantization", "quantization_config"):
            config.pop(key, None)
        return tensors, config

    def _names(self, layer: int) -> list[str]:
        """Tensors of a layer of the target: every weight, and what biases and norms there are."""
        names = [f"{part}.weight" for part in PARTS]
        maybe = [f"{part}.weight" for part in SOMETIMES] + [f"{part}.bias" for part in PARTS]
        for name in maybe:
            try:
                self._material.weights(f"model.layers.{layer}.{name}")
            except LookupError:
                continue
            names.append(name)
        return names

    def _weight(self, name: str) -> np.ndarray:
        try:
            found = self._material.weights(name)
        except LookupError as error:
            raise ModelError(
                f"the target's files do not hold {name}: no draft model can be made of it",
                do="take a target with safetensors in bfloat16, float16 or float32",
            ) from error
        if found.dtype.kind != "f":
            raise ModelError(f"{name} of the target is no matrix of plain numbers", got=found.dtype, expected="floats")
        return found.astype(np.float32)


def spaced(layers: int, count: int) -> list[int]:
    """So many of the target's layers, evenly spaced, first and last among them; of one, the first."""
    return [round(i) for i in np.linspace(0, layers - 1, count)]


def make(settings: Settings, material: Material) -> Objective:
    """The objective for a target. ModelError for one of another family."""
    family = material.config.get("model_type")
    if family not in FAMILIES:
        raise ModelError("no draft model can be made of this kind of target", got=family, expected=", ".join(FAMILIES))
    if any(kind != "full_attention" for kind in material.config.get("layer_types") or ()) or (
        material.config.get("sliding_window") and material.config.get("use_sliding_window", True)
    ):
        raise ModelError("no draft model can be made of a target with windows", expected="full attention")
    most = material.facts.layers
    if not 0 <= settings.layers <= most:
        raise UsageError("impossible layers", got=settings.layers, expected=f"1 to {most}, or 0 for a quarter of them")
    layers = settings.layers or max(1, most // 4)
    return Objective(settings, DecoderSizes.of(material.config), layers, material)
