"""EAGLE-1/2, EAGLE-3 and P-EAGLE heads: a decoder layer or more over the target's hidden states, with its own cache.

Li et al. 2401.15077, 2406.16858, 2503.01840. Row i pairs the target's state of position i with token i+1 and predicts
token i+2. Rows of true states are kept from round to round; rows of drafted tokens are dropped with the round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speclocal.backends.torch.cache import BLOCK
from speclocal.backends.torch.heads.rope import Rope, rotate
from speclocal.backends.torch.kernels.attention import FEW_ROWS, packed
from speclocal.backends.torch.linear import pack
from speclocal.backends.torch.target import TorchTarget
from speclocal.core.cached_target import CHUNK
from speclocal.core.columns import Columns
from speclocal.core.growth import Beam
from speclocal.core.heads import EagleSpec

Tensors = Mapping[str, Tensor]


class EagleHead:
    """Implements `core.interfaces.Head`.

    tensors: by normalised name (`core.heads.identify`). ids: the target's id of every draft id, None if they are equal.
    """

    def __init__(self, spec: EagleSpec, tensors: Tensors, ids: Sequence[int] | None, target: TorchTarget):
        self.spec, self.ops = spec, target.ops
        device = target.device
        own = None if spec.output_bias else tensors.get("lm_head.weight")
        self._columns = Columns(self.ops, ids, own, target.output_rows)
        self._embed: Callable[[Tensor], Tensor] = target.embed
        if spec.own_embedding:
            self._embed = nn.Embedding.from_pretrained(tensors["embed_tokens.weight"].to(device))
        body = Body(spec, tensors).to(device).eval().requires_grad_(False)
        if device.type == "cpu":
            pack(body)
        self._body = body
        self._unembed: Callable[[Tensor], Tensor] = target.unembed if body.lm_head is None else body.lm_head
        self._mask = _mask_row(body, spec, tensors, device)
        self._cache = _Rows(spec, target.dtype, device)
        self._rope = Rope(spec, device)
        self._hidden = torch.empty(0, device=device)

    @property
    def rows(self) -> int:
        """Positions whose true states have been fed."""
        return self._cache.length

    @property
    def ids(self) -> Tensor | None:
        """See Head."""
        return self._columns.ids

    def borrow(self, tokens: Iterable[int], most: int) -> None:
        """See Head."""
        self._columns.borrow(tokens, most)

    def truncate(self, rows: int) -> None:
        """Forget all but the first `rows` positions, and what was drafted."""
        self._cache.length = min(rows, self._cache.length)
        self._cache.drafted = 0

    @torch.inference_mode()
    def extend(self, tokens: Sequence[int], taps: Tensor, masks: int = 0) -> Tensor:
        """Feed true states [n, E, H] with the tokens that follow them.

        Returns the logits of the last row [1, Vd]; with `masks` > 0 (P-EAGLE) also those of so many mask rows after it,
        [1 + masks, Vd], one more position ahead each.
        """
        if masks and self._mask is None:
            raise ValueError("only P-EAGLE heads have mask rows")
        self._cache.drafted = 0
        states = taps.flatten(1)
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first : first + CHUNK]
            emb = self._embed(torch.tensor(list(part), device=states.device))
            hidden = self._body.fuse(states[first : first + CHUNK])
            extra = masks if first + CHUNK >= len(tokens) else 0
            if extra and self._mask:
                emb = torch.cat([emb, self._mask[0].expand(extra, -1)])
                hidden = torch.cat([hidden, self._mask[1].expand(extra, -1)])
            start = self._cache.length
            positions = torch.arange(start, start + len(emb), device=states.device)
            hidden = self._rows(emb, hidden, positions, None)
            self._cache.length += len(part)
        last = hidden[-1 - masks :]
        self._hidden, logits = self._out(last)
        return logits

    @torch.inference_mode()
    def step(self, beam: Beam) -> Tensor:
        """Run drafted nodes below their parents, whose outputs are those of the call before; logits [k, Vd]."""
        n = self._cache.length
        positions = torch.full((len(beam.tokens),), n + beam.depth - 1, device=beam.tokens.device)
        hidden = self._rows(self._embed(beam.tokens), self._hidden[beam.parents], positions, beam.seen)
        self._cache.drafted += len(beam.tokens)
        self._hidden, logits = self._out(hidden)
        return logits

    def _rows(self, emb: Tensor, hidden: Tensor, positions: Tensor, seen: Tensor | None) -> Tensor:
        bias = self._cache.open(len(emb), seen, emb.dtype)
        return self._body(emb, hidden, self._rope(positions, emb.dtype), self._cache, bias)

    def _out(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is fed back, and logits in float32."""
        y = self._body.norm(x) if self._body.norm is not None else x
        return (y if self.spec.norm_output else x), self._columns.widen(self._unembed(y), y).float()


def _mask_row(body: Body, spec: EagleSpec, tensors: Tensors, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Embedding and hidden of P-EAGLE's mask rows, [1, Hd] each."""
    if spec.mask_token is None:
        return None
    hidden = tensors["mask_hidden"].reshape(1, -1).to(device)
    with torch.inference_mode():
        fused = hidden if spec.mask_width == spec.hidden else body.fuse(hidden)
    return tensors["embed_tokens.weight"][spec.mask_token][None].to(device), fused


class _Rows:
    """Keys and values of the head's rows: true ones, then those drafted this round."""

    def __init__(self, spec: EagleSpec, dtype: torch.dtype, device: torch.device):
        self.length = self.drafted = 0
        shape = (1, spec.kv_heads, 0, spec.head_dim)
        self._buffers = [
            [torch.empty(shape, dtype=dtype, device=device) for _ in range(spec.layers)] for _ in ("keys", "values")
        ]
        self._repeat = spec.heads // spec.kv_heads
        self._at = self._end = 0

    def open(self, rows: int, seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The next pass writes so many rows. Returns their bias [n, T], repeated for the heads of a key head if n is
        small: a row sees all true rows and, of the drafted ones, those in `seen`; without it the rows before it."""
        held = self.length + self.drafted
        self._at, self._end = held, held + rows
        self._reserve(self._end)
        if seen is None and rows == 1:
            return None
        device = self._buffers[0][0].device
        if seen is None:
            bias = torch.full((rows, self._end), float("-inf"), dtype=dtype, device=device).triu_(held + 1)
        else:
            bias = torch.zeros(rows, self._end, dtype=dtype, device=device)
            bias[:, self.length :].masked_fill_(seen == 0, float("-inf"))
        return bias.repeat(self._repeat, 1) if rows <= FEW_ROWS else bias

    def _reserve(self, slots: int) -> None:
        if slots <= self._buffers[0][0].shape[2]:
            return
        slots = -(-slots // BLOCK) * BLOCK
        for buffers in self._buffers:
            for i, old in enumerate(buffers):
                buffers[i] = old.new_empty(1, old.shape[1], slots, old.shape[3])
                buffers[i][:, :, : old.shape[2]] = old

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [1, G, n, d]; all keys and values so far."""
        out = []
        for buffers, rows in zip(self._buffers, (keys, values), strict=True):
            buffers[layer][:, :, self._at : self._end] = rows
            out.append(buffers[layer][:, :, : self._end])
        return out[0], out[1]


class RMS(nn.Module):
    """Root-mean-square norm, computed in float32, scaled by a plain weight."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.weight, self._eps = nn.Parameter(weight), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self._eps).to(x.dtype)


def linear(tensors: Tensors, name: str) -> nn.Linear:
    """A linear layer with the stored weight, and the bias if there is one."""
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight)
    if bias is not None:
        made.bias = nn.Parameter(bias)
    return made


class Layer(nn.Module):
    """One decoder layer. The first one has inputs of its own; see `Body`."""

    def __init__(self, spec: EagleSpec, tensors: Tensors, number: int):
        super().__init__()
        at = f"layers.{number}."
        self.number, self._shape = number, (spec.heads, spec.kv_heads, spec.head_dim)
        attention = at + "self_attn."
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            linear(tensors, attention + name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm, self.k_norm = (RMS(tensors[f"{attention}{n}.weight"], spec.eps) for n in ("q_norm", "k_norm"))
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(tensors, f"{at}mlp.{name}") for name in ("gate_proj", "up_proj", "down_proj")
        )
        self.post_attention_layernorm = RMS(tensors[at + "post_attention_layernorm.weight"], spec.eps)

    def forward(
        self, x: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], cache: _Rows, bias: Tensor | None
    ) -> Tensor:
        """x: what attention reads, [n, Hd or 2 Hd]."""
        heads, groups, d = self._shape
        n = len(x)
        q = self.q_proj(x).view(n, heads, d)
        k = self.k_proj(x).view(n, groups, d)
        v = self.v_proj(x).view(n, groups, d)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, rope).transpose(0, 1)[None], rotate(k, rope).transpose(0, 1)[None]
        keys, values = cache.write(self.number, k, v.transpose(0, 1)[None])
        if n <= FEW_ROWS:
            out = packed(q, keys, values, bias, d**-0.5)
        else:
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=bias, scale=d**-0.5, enable_gqa=heads > groups
            ).transpose(1, 2)
        x = residual + self.o_proj(out.reshape(n, heads * d))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Body(nn.Module):
    """The weights: `fuse` true states, then layers; all of it as `spec` says."""

    def __init__(self, spec: EagleSpec, tensors: Tensors):
        super().__init__()
        self.spec = spec
        self.fc = linear(tensors, "fc") if spec.fc else None
        self.layers = nn.ModuleList(Layer(spec, tensors, i) for i in range(spec.layers))
        self.input_norms = nn.ModuleList(
            RMS(tensors[f"layers.{i}.input_layernorm.weight"], spec.eps)
            for i in range(1 if spec.family == "eagle" else 0, spec.layers)
        )
        first = spec.family != "eagle"
        self.hidden_norm = RMS(tensors["layers.0.hidden_norm.weight"], spec.eps) if first else None
        self.norm = RMS(tensors["norm.weight"], spec.eps) if first else None
        self.lm_head = linear(tensors, "lm_head") if spec.own_head else None
        self.input_norm = RMS(tensors["input_norm.weight"], spec.eps) if spec.norm_before_fc else None
        count = len(spec.taps) if spec.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMS(tensors[f"fc_norm.{a}.weight"], spec.eps) for a in range(count))

    def fuse(self, states: Tensor) -> Tensor:
        """True states [n, A H] as hidden [n, Hd]. EAGLE-1 takes its one state as it is."""
        if self.spec.family == "eagle" or self.fc is None:
            return states
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def forward(
        self, emb: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], cache: _Rows, bias: Tensor | None
    ) -> Tensor:
        """Embeddings and hidden states [n, Hd] → outputs [n, Hd], before any final norm."""
        if self.hidden_norm is None:
            assert self.fc is not None
            x = self.fc(torch.cat([emb, hidden], -1))
            x = self.layers[0](x, x, rope, cache, bias)
            norms = self.input_norms
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self.spec.norm_before_residual else hidden
            x = torch.cat([self.input_norms[0](emb), normed], -1)
            x = self.layers[0](x, residual, rope, cache, bias)
            norms = self.input_norms[1:]
        for layer, norm in zip(self.layers[1:], norms, strict=True):
            x = layer(norm(x), x, rope, cache, bias)
        return x
