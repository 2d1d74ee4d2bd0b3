"""EAGLE-1/2, EAGLE-3 and P-EAGLE heads: a decoder layer or more over the target's hidden states, with its own cache.

Li et al. 2401.15077, 2406.16858, 2503.01840. Row i pairs the target's state of position i with token i+1 and predicts
token i+2. Rows of true states are kept from round to round; rows of drafted tokens are dropped with the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn

from speclocal.backends.mlx.cache import BLOCK
from speclocal.backends.mlx.heads.rope import Rope
from speclocal.backends.mlx.target import MlxTarget
from speclocal.core.cached_target import CHUNK
from speclocal.core.columns import Columns
from speclocal.core.growth import Beam
from speclocal.core.heads import EagleSpec

Tensors = Mapping[str, mx.array]
Mask = mx.array | str | None


class EagleHead:
    """Implements `core.interfaces.Head`.

    tensors: by normalised name (`core.heads.identify`). ids: the target's id of every draft id, None if they are equal.
    """

    def __init__(self, spec: EagleSpec, tensors: Tensors, ids: Sequence[int] | None, target: MlxTarget):
        self.spec, self.ops = spec, target.ops
        own = None if spec.output_bias else tensors.get("lm_head.weight")
        self._columns = Columns(self.ops, ids, own, target.output_rows)
        self._embed: Callable[[mx.array], mx.array] = target.embed
        if spec.own_embedding:
            self._embed = tensors["embed_tokens.weight"].__getitem__
        self._body = Body(spec, tensors)
        mx.eval(self._body.parameters())
        self._unembed: Callable[[mx.array], mx.array] = self._body.lm_head or target.unembed
        self._mask = _mask_row(self._body, spec, tensors)
        self._cache = _Rows(spec)
        self._rope = Rope(spec)
        self._hidden = self._logits = mx.zeros(0)

    @property
    def rows(self) -> int:
        """Positions whose true states have been fed."""
        return self._cache.length

    @property
    def ids(self) -> mx.array | None:
        """See Head."""
        return self._columns.ids

    def borrow(self, tokens: Iterable[int], most: int) -> None:
        """See Head."""
        self._columns.borrow(tokens, most)

    def truncate(self, rows: int) -> None:
        """Forget all but the first `rows` positions, and what was drafted."""
        self._cache.length = min(rows, self._cache.length)
        self._cache.drafted = 0

    def extend(self, tokens: Sequence[int], taps: mx.array, masks: int = 0) -> mx.array:
        """Feed true states [n, E, H] with the tokens that follow them.

        Returns the logits of the last row [1, Vd]; with `masks` > 0 (P-EAGLE) also those of so many mask rows after it,
        [1 + masks, Vd], one more position ahead each.
        """
        if masks and self._mask is None:
            raise ValueError("only P-EAGLE heads have mask rows")
        self._cache.drafted = 0
        states = taps.flatten(1)
        for first in range(0, len(tokens), CHUNK):
            if first:
                mx.eval(self._cache.arrays)  # else all chunks would be held at once
            part = tokens[first : first + CHUNK]
            emb, hidden = self._embed(mx.array(list(part))), self._body.fuse(states[first : first + CHUNK])
            extra = masks if first + CHUNK >= len(tokens) else 0
            if extra and self._mask:
                emb = mx.concatenate([emb, *[self._mask[0]] * extra])
                hidden = mx.concatenate([hidden, *[self._mask[1]] * extra])
            hidden = self._rows(emb, hidden, self._cache.length, None)
            self._cache.length += len(part)
        return self._out(hidden[-1 - masks :])

    def step(self, beam: Beam) -> mx.array:
        """Run drafted nodes below their parents, whose outputs are those of the call before; logits [k, Vd]."""
        mx.async_eval(self._logits)  # the device starts while the host describes this pass
        position = self._cache.length + beam.depth - 1
        hidden = self._rows(self._embed(beam.tokens), self._hidden[beam.parents], position, beam.seen)
        self._cache.drafted += len(beam.tokens)
        return self._out(hidden)

    def _rows(self, emb: mx.array, hidden: mx.array, position: int, seen: mx.array | None) -> mx.array:
        """Rows that follow each other from `position` on; with `seen`, all of them stand there."""
        mask = self._cache.open(len(emb), seen)

        def rope(x: mx.array) -> mx.array:
            return self._rope(x, position, seen is not None)

        return self._body(emb, hidden, rope, self._cache, mask)

    def _out(self, x: mx.array) -> mx.array:
        """Logits in float32; notes what is fed back."""
        y = x if self._body.norm is None else self._body.norm(x)
        self._hidden = y if self.spec.norm_output else x
        self._logits = self._columns.widen(self._unembed(y), y).astype(mx.float32)
        return self._logits


def _mask_row(body: Body, spec: EagleSpec, tensors: Tensors) -> tuple[mx.array, mx.array] | None:
    """Embedding and hidden of P-EAGLE's mask rows, [1, Hd] each."""
    if spec.mask_token is None:
        return None
    hidden = tensors["mask_hidden"].reshape(1, -1)
    fused = hidden if spec.mask_width == spec.hidden else body.fuse(hidden)
    row = tensors["embed_tokens.weight"][spec.mask_token][None], fused
    mx.eval(row)
    return row


class _Rows:
    """Keys and values of the head's rows: true ones, then those drafted this round."""

    def __init__(self, spec: EagleSpec):
        self.length = self.drafted = 0
        self.arrays: list[mx.array] = []
        self._layers = spec.layers
        self._slots = self._at = self._end = 0

    def open(self, rows: int, seen: mx.array | None) -> Mask:
        """The next pass writes so many rows. Returns their mask: a row sees all true rows and, of the drafted ones,
        those in `seen`; without it the rows before it."""
        held = self.length + self.drafted
        self._at, self._end = held, held + rows
        if self._end > self._slots:
            self._grow()
        if seen is not None:
            return mx.concatenate([mx.ones((rows, self.length), mx.bool_), seen > 0], 1)[None, None]
        return "causal" if rows > 1 else None

    def _grow(self) -> None:
        """Move to larger buffers, one at a time so that the peak is one copy."""
        self._slots = -(-self._end // BLOCK) * BLOCK
        for i, old in enumerate(self.arrays):
            new = self._room(old)
            new[:, :, : old.shape[2]] = old
            mx.eval(new)
            self.arrays[i] = new

    def _room(self, like: mx.array) -> mx.array:
        return mx.zeros((1, like.shape[1], self._slots, like.shape[3]), like.dtype)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store [1, G, n, d]; all keys and values so far."""
        if len(self.arrays) < 2 * self._layers:
            self.arrays += [self._room(keys), self._room(values)]
        out = []
        for i, rows in enumerate((keys, values), 2 * layer):
            self.arrays[i][:, :, self._at : self._end] = rows
            out.append(self.arrays[i][:, :, : self._end])
        return out[0], out[1]


def linear(tensors: Tensors, name: str) -> nn.Linear:
    """A linear layer with the stored weight, and the bias if there is one."""
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made


def rms(tensors: Tensors, name: str, eps: float) -> nn.RMSNorm:
    """Root-mean-square norm, computed in float32, scaled by a plain weight."""
    weight = tensors[f"{name}.weight"]
    made = nn.RMSNorm(len(weight), eps)
    made.weight = weight
    return made


class Layer(nn.Module):
    """One decoder layer. The first one has inputs of its own; see `Body`."""

    def __init__(self, spec: EagleSpec, tensors: Tensors, number: int):
        super().__init__()
        at = f"layers.{number}."
        self._number, self._shape = number, (spec.heads, spec.kv_heads, spec.head_dim)
        attention = at + "self_attn."
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            linear(tensors, attention + name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm, self.k_norm = (rms(tensors, attention + name, spec.eps) for name in ("q_norm", "k_norm"))
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(tensors, f"{at}mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")
        )
        self.post_attention_layernorm = rms(tensors, at + "post_attention_layernorm", spec.eps)

    def __call__(
        self, x: mx.array, residual: mx.array, rope: Callable[[mx.array], mx.array], cache: _Rows, mask: Mask
    ) -> mx.array:
        """x: what attention reads, [n, Hd or 2 Hd]."""
        heads, groups, d = self._shape
        n = len(x)
        q = self.q_proj(x).reshape(1, n, heads, d)
        k = self.k_proj(x).reshape(1, n, groups, d)
        v = self.v_proj(x).reshape(1, n, groups, d).transpose(0, 2, 1, 3)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope(q.transpose(0, 2, 1, 3)), rope(k.transpose(0, 2, 1, 3))
        keys, values = cache.write(self._number, k, v)
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=d**-0.5, mask=mask)
        x = residual + self.o_proj(out.transpose(0, 2, 1, 3).reshape(n, heads * d))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.silu(self.gate_proj(y)) * self.up_proj(y))


class Body(nn.Module):
    """The weights: `fuse` true states, then layers; all of it as `spec` says."""

    def __init__(self, spec: EagleSpec, tensors: Tensors):
        super().__init__()
        self._spec = spec
        first = spec.family != "eagle"
        self.fc = linear(tensors, "fc") if spec.fc else None
        self.layers = [Layer(spec, tensors, i) for i in range(spec.layers)]
        self.input_norms = [
            rms(tensors, f"layers.{i}.input_layernorm", spec.eps) for i in range(0 if first else 1, spec.layers)
        ]
        self.hidden_norm = rms(tensors, "layers.0.hidden_norm", spec.eps) if first else None
        self.norm = rms(tensors, "norm", spec.eps) if first else None
        self.lm_head = linear(tensors, "lm_head") if spec.own_head else None
        self.input_norm = rms(tensors, "input_norm", spec.eps) if spec.norm_before_fc else None
        count = len(spec.taps) if spec.fc_norm else 0
        self.fc_norm = [rms(tensors, f"fc_norm.{a}", spec.eps) for a in range(count)]

    def fuse(self, states: mx.array) -> mx.array:
        """True states [n, A H] as hidden [n, Hd]. EAGLE-1 takes its one state as it is."""
        if self._spec.family == "eagle" or self.fc is None:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm:
            parts = mx.split(states, len(self.fc_norm), -1)
            states = mx.concatenate([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def __call__(
        self, emb: mx.array, hidden: mx.array, rope: Callable[[mx.array], mx.array], cache: _Rows, mask: Mask
    ) -> mx.array:
        """Embeddings and hidden states [n, Hd] → outputs [n, Hd], before any final norm."""
        if self.hidden_norm is None:
            assert self.fc is not None
            x = self.fc(mx.concatenate([emb, hidden], -1))
            x = self.layers[0](x, x, rope, cache, mask)
            norms = self.input_norms
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self._spec.norm_before_residual else hidden
            x = mx.concatenate([self.input_norms[0](emb), normed], -1)
            x = self.layers[0](x, residual, rope, cache, mask)
            norms = self.input_norms[1:]
        for layer, norm in zip(self.layers[1:], norms, strict=True):
            x = layer(norm(x), x, rope, cache, mask)
        return x
