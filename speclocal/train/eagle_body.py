"""The forward pass of EAGLE-3 and P-EAGLE heads over whole texts, differentiable on every backend.

The same function as the backends' `heads/eagle.py`, which run few rows on a cache; a test holds them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from speclocal.core.head_spec import EagleSpec
from speclocal.core.interfaces import Array, Ops
from speclocal.core.rope import frequencies
from speclocal.train.material import Params

HIDDEN = -1e30
"""Added to scores of keys a row does not see; finite, so that no gradient is undefined."""


@dataclass
class Kept:
    """Keys and values of one layer: [B, G, S, d] of the rows of true states, then of each later step at the same rows."""

    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)


class EagleBody:
    """Weights are handed to every call; shapes: B texts, S rows, D hidden of the head."""

    def __init__(self, spec: EagleSpec, ops: Ops):
        self.spec, self._ops, self._xp = spec, ops, ops.xp

    def rope(self, positions: np.ndarray) -> tuple[Array, Array]:
        """Cosines and sines [1 or B, 1, S, d] for positions [1 or B, S]."""
        spec = self.spec
        radians, scale = frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        angles = positions[:, None, :, None].astype(np.float32) * np.asarray(radians, np.float32)
        angles = np.concatenate([angles, angles], -1)
        cos, sin = np.cos(angles) * np.float32(scale), np.sin(angles) * np.float32(scale)
        return self._ops.array(cos), self._ops.array(sin)

    def fuse(self, w: Params, states: Array) -> Array:
        """True states [..., A * H] as hidden [..., D]."""
        spec, xp = self.spec, self._xp
        if spec.norm_before_fc:
            states = self._rms(states, w["input_norm.weight"])
        if spec.fc_norm:
            size = spec.target_hidden
            parts = [states[..., a * size : (a + 1) * size] for a in range(len(spec.taps))]
            states = xp.concat([self._rms(part, w[f"fc_norm.{a}.weight"]) for a, part in enumerate(parts)], -1)
        return _linear(w, "fc", states) if spec.fc else states

    def step(
        self, w: Params, emb: Array, hidden: Array, rope: tuple[Array, Array], kept: Sequence[Kept], bias: Array
    ) -> Array:
        """Embeddings and hidden [B, S, D] → outputs, before the final norm; keys and values are added to `kept`.

        bias: [1 or B, 1, S, S], 0 where a row sees a row of true states, `HIDDEN` elsewhere. Of the later steps a row
        sees those at its own place.
        """
        spec, xp = self.spec, self._xp
        normed = self._rms(hidden, w["layers.0.hidden_norm.weight"])
        residual = normed if spec.norm_before_residual else hidden
        x = xp.concat([self._rms(emb, w["layers.0.input_layernorm.weight"]), normed], -1)
        x = self._layer(w, 0, x, residual, rope, kept[0], bias)
        for i in range(1, spec.layers):
            x = self._layer(w, i, self._rms(x, w[f"layers.{i}.input_layernorm.weight"]), x, rope, kept[i], bias)
        return x

    def out(self, w: Params, x: Array) -> tuple[Array, Array]:
        """What the output matrix reads, and what is fed back."""
        y = self._rms(x, w["norm.weight"])
        return y, y if self.spec.norm_output else x

    def _layer(
        self, w: Params, i: int, x: Array, residual: Array, rope: tuple[Array, Array], kept: Kept, bias: Array
    ) -> Array:
        xp, at = self._xp, f"layers.{i}."
        x = residual + self._attention(w, at + "self_attn.", x, rope, kept, bias)
        y = self._rms(x, w[at + "post_attention_layernorm.weight"])
        gate = _linear(w, at + "mlp.gate_proj", y)
        return x + _linear(w, at + "mlp.down_proj", gate * xp.sigmoid(gate) * _linear(w, at + "mlp.up_proj", y))

    def _attention(self, w: Params, at: str, x: Array, rope: tuple[Array, Array], kept: Kept, bias: Array) -> Array:
        spec, xp = self.spec, self._xp
        texts, rows, d = x.shape[0], x.shape[1], spec.head_dim
        groups, share = spec.kv_heads, spec.heads // spec.kv_heads

        def heads(name: str, count: int) -> Array:
            return xp.swapaxes(_linear(w, at + name, x).reshape(texts, rows, count, d), 1, 2)

        q, k, v = heads("q_proj", spec.heads), heads("k_proj", groups), heads("v_proj", groups)
        if spec.qk_norm:
            q, k = self._rms(q, w[at + "q_norm.weight"]), self._rms(k, w[at + "k_norm.weight"])
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
        out = xp.swapaxes(out.reshape(texts, spec.heads, rows, d), 1, 2).reshape(texts, rows, spec.heads * d)
        return _linear(w, at + "o_proj", out)

    def _rotate(self, x: Array, rope: tuple[Array, Array]) -> Array:
        cos, sin = rope
        half = x.shape[-1] // 2
        return x * cos + self._xp.concat([-x[..., half:], x[..., :half]], -1) * sin

    def _rms(self, x: Array, weight: Array) -> Array:
        return x * self._xp.rsqrt((x * x).mean(-1)[..., None] + self.spec.eps) * weight


def _linear(w: Params, name: str, x: Array) -> Array:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def causal(seen: np.ndarray) -> np.ndarray:
    """The bias of a mask [1 or B, S, S] of what each row sees."""
    return np.where(seen, 0.0, HIDDEN).astype(np.float32)[:, None]
