"""Decoder layers over whole texts, and of them EAGLE-3 and P-EAGLE heads: differentiable on every backend.

The same function as the backends' `heads/eagle.py`, which run few rows on a cache; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from speclocal.core.head_spec import Config, EagleSpec
from speclocal.core.interfaces import Array, Ops
from speclocal.core.rope import frequencies
from speclocal.train.material import Params

HIDDEN = -1e30
"""Added to scores of keys a row does not see; finite, so that no gradient is undefined."""


@dataclass
class Kept:
    """Keys and values of one layer, [B, G, S, d]: of the rows of true states, then of each later step at those rows."""

    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)


class Sizes(Protocol):
    """What a decoder layer must know of itself; an `EagleSpec` does."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def rope_scaling(self) -> Config | None: ...
    @property
    def qk_norm(self) -> bool: ...


class Decoder:
    """Decoder layers. Weights are handed to every call; shapes: B texts, S rows, D hidden."""

    def __init__(self, sizes: Sizes, ops: Ops):
        self.sizes, self._ops, self._xp = sizes, ops, ops.xp

    def rope(self, positions: np.ndarray) -> tuple[Array, Array]:
        """Cosines and sines [1 or B, 1, S, d] for positions [1 or B, S]."""
        sizes = self.sizes
        radians, scale = frequencies(sizes.head_dim, sizes.rope_theta, sizes.rope_scaling)
        angles = positions[:, None, :, None].astype(np.float32) * np.asarray(radians, np.float32)
        angles = np.concatenate([angles, angles], -1)
        cos, sin = np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
        return self._ops.array(cos), self._ops.array(sin)

    def layer(
        self, w: Params, i: int, x: Array, residual: Array, rope: tuple[Array, Array], kept: Kept, bias: Array
    ) -> Array:
        """What layer i makes of x [B, S, .], which attention reads, and the residual [B, S, D]; `kept` gets its keys.

        bias: [1 or B, 1, S, S], 0 where a row sees a row of the first pass, `HIDDEN` elsewhere. Of later passes with
        the same `kept` a row sees those at its own place.
        """
        xp, at = self._xp, f"layers.{i}."
        x = residual + self._attention(w, at + "self_attn.", x, rope, kept, bias)
        y = self.rms(x, w[at + "post_attention_layernorm.weight"])
        gate = _linear(w, at + "mlp.gate_proj", y)
        return x + _linear(w, at + "mlp.down_proj", gate * xp.sigmoid(gate) * _linear(w, at + "mlp.up_proj", y))

    def _attention(self, w: Params, at: str, x: Array, rope: tuple[Array, Array], kept: Kept, bias: Array) -> Array:
        sizes, xp = self.sizes, self._xp
        texts, rows, d = x.shape[0], x.shape[1], sizes.head_dim
        groups, share = sizes.kv_heads, sizes.heads // sizes.kv_heads

        def heads(name: str, count: int) -> Array:
            return xp.swapaxes(_linear(w, at + name, x).reshape(texts, rows, count, d), 1, 2)

        q, k, v = heads("q_proj", sizes.heads), heads("k_proj", groups), heads("v_proj", groups)
        if sizes.qk_norm:
            q, k = self.rms(q, w[at + "q_norm.weight"]), self.rms(k, w[at + "k_norm.weight"])
        q, k = self._rotate(q, rope), self._rotate(k, rope)
        kept.keys.append(k)
        kept.values.append(v)
        # Query heads of a key head as further rows of one product.
        q = (q * d**-0.5).reshape(texts, groups, share * rows, d)
        scores = q @ xp.swapaxes(kept.keys[0], -1, -2)
        scores = scores.reshape(texts, groups * share, rows, -1) + bias
        q = q.reshape(texts, groups, share, rows, d)
        later = [
            (q * k[:, :, None]).sum(-1).reshape(texts, groups * share, rows, 1) for k in kept.keys[1:]
        ]  # own place only
        width = scores.shape[-1]
        p = xp.softmax(xp.concat([scores, *later], -1) if later else scores, -1)
        first = p[..., :width].reshape(texts, groups, share * rows, width)
        out = (first @ kept.values[0]).reshape(texts, groups, share, rows, d)
        for r, value in enumerate(kept.values[1:]):
            out = out + p[..., width + r].reshape(texts, groups, share, rows, 1) * value[:, :, None]
        out = xp.swapaxes(out.reshape(texts, sizes.heads, rows, d), 1, 2).reshape(texts, rows, sizes.heads * d)
        return _linear(w, at + "o_proj", out)

    def _rotate(self, x: Array, rope: tuple[Array, Array]) -> Array:
        cos, sin = rope
        half = x.shape[-1] // 2
        return x * cos + self._xp.concat([-x[..., half:], x[..., :half]], -1) * sin

    def rms(self, x: Array, weight: Array) -> Array:
        """Root-mean-square norm of the last axis."""
        return x * self._xp.rsqrt((x * x).mean(-1)[..., None] + self.sizes.eps) * weight


class EagleBody(Decoder):
    """The layers of a head, and what is around them."""

    def __init__(self, spec: EagleSpec, ops: Ops):
        super().__init__(spec, ops)
        self.spec = spec

    def fuse(self, w: Params, states: Array) -> Array:
        """True states [..., A * H] as hidden [..., D]."""
        spec, xp = self.spec, self._xp
        if spec.norm_before_fc:
            states = self.rms(states, w["input_norm.weight"])
        if spec.fc_norm:
            size = spec.target_hidden
            parts = [states[..., a * size : (a + 1) * size] for a in range(len(spec.taps))]
            states = xp.concat([self.rms(part, w[f"fc_norm.{a}.weight"]) for a, part in enumerate(parts)], -1)
        return _linear(w, "fc", states) if spec.fc else states

    def step(
        self, w: Params, emb: Array, hidden: Array, rope: tuple[Array, Array], kept: Sequence[Kept], bias: Array
    ) -> Array:
        """Embeddings and hidden [B, S, D] → outputs, before the final norm; keys and values are added to `kept`.

        bias: [1 or B, 1, S, S], 0 where a row sees a row of true states, `HIDDEN` elsewhere. Of the later steps a row
        sees those at its own place.
        """
        spec, xp = self.spec, self._xp
        normed = self.rms(hidden, w["layers.0.hidden_norm.weight"])
        residual = normed if spec.norm_before_residual else hidden
        x = xp.concat([self.rms(emb, w["layers.0.input_layernorm.weight"]), normed], -1)
        x = self.layer(w, 0, x, residual, rope, kept[0], bias)
        for i in range(1, spec.layers):
            x = self.layer(w, i, self.rms(x, w[f"layers.{i}.input_layernorm.weight"]), x, rope, kept[i], bias)
        return x

    def out(self, w: Params, x: Array) -> tuple[Array, Array]:
        """What the output matrix reads, and what is fed back."""
        y = self.rms(x, w["norm.weight"])
        return y, y if self.spec.norm_output else x


def _linear(w: Params, name: str, x: Array) -> Array:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def causal(seen: np.ndarray) -> np.ndarray:
    """The bias of a mask [1 or B, S, S] of what each row sees."""
    return np.where(seen, 0.0, HIDDEN).astype(np.float32)[:, None]
