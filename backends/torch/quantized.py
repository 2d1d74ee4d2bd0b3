"""Keys and values in 4 or 8 bits: each row by itself, so that a tree pass rounds as single steps do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speclocal.backends.torch.cache import TreeCache
from speclocal.core.memory import GROUPS
from speclocal.errors import ModelError, UsageError

BITS = (4, 8)


def make_cache(bits: int | None = None) -> TreeCache:
    """An empty cache; UsageError for a number of bits that there is none for."""
    if bits is None:
        return TreeCache()
    if bits not in BITS:
        raise UsageError("impossible kv_bits", got=bits, expected=" or ".join(map(str, BITS)))
    return QuantizedTreeCache(bits)


class QuantizedTreeCache(TreeCache):
    """A TreeCache whose slots hold codes, scales and minima as bytes; attention is handed de-quantised numbers.

    bits: of a number, 4 or 8.
    """

    def __init__(self, bits: int):
        super().__init__()
        self.bits = bits

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See TreeCache. The rows of this pass come back rounded too: later passes see them the same."""
        keys, values = super().update(quantize(key_states, self.bits), quantize(value_states, self.bits), layer_idx)
        return dequantize(keys, key_states, self.bits), dequantize(values, value_states, self.bits)


def group_of(size: int) -> int:
    """Numbers that share a scale in heads of a size. ModelError if no group divides it."""
    for group in GROUPS:
        if size % group == 0:
            return group
    raise ModelError(
        "keys and values of this model cannot be quantised",
        got=f"heads of size {size}",
        expected=f"a multiple of {GROUPS[-1]}",
        do="leave out --kv-bits",
    )


def quantize(x: Tensor, bits: int) -> Tensor:
    """[..., d] numbers → [..., w] bytes: codes (two to a byte if bits is 4), then a scale and a minimum of each group.

    w = d * bits / 8 + 2 * groups * bytes of a number. A number comes back as code * scale + minimum.
    """
    groups = x.unflatten(-1, (-1, group_of(x.shape[-1]))).float()
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    most = 2**bits - 1
    # Rounded as they are stored: codes are chosen for the scale that will be read.
    scale, low = ((high - low) / most).to(x.dtype), low.to(x.dtype)
    step = scale.float()
    codes = ((groups - low.float()) / torch.where(step > 0, step, 1.0)).round().clamp(0, most)
    codes = codes.to(torch.uint8).flatten(-2)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    return torch.cat([codes, *(part.squeeze(-1).contiguous().view(torch.uint8) for part in (scale, low))], -1)


def dequantize(rows: Tensor, like: Tensor, bits: int) -> Tensor:
    """[..., T, w] bytes → [..., T, d] numbers of the size and type of `like`."""
    size = like.shape[-1]
    group = group_of(size)
    end = size * bits // 8
    width = size // group * like.dtype.itemsize
    codes = rows[..., :end]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    scale, low = (rows[..., at : at + width].contiguous().view(like.dtype) for at in (end, end + width))
    out = codes.unflatten(-1, (-1, group)).to(like.dtype)
    return out.mul_(scale.unsqueeze(-1)).add_(low.unsqueeze(-1)).flatten(-2)
