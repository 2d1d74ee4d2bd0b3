"""`Ops` for torch, and the keyed noise."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from speclocal.core.interfaces import Ops
from speclocal.core.noise import MASK, Purpose, gumbel, key_of, threefry


def make_ops(device: torch.device) -> Ops:
    """The operations on one device."""

    def array(values: Any) -> torch.Tensor:
        return torch.tensor(values, device=device)

    def to_host(*arrays: torch.Tensor) -> list[Any]:
        return [a.tolist() for a in arrays]

    def noise(
        seed: int,
        positions: Sequence[int],
        purpose: Purpose,
        tokens: int | torch.Tensor,
        stream: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        words = _words_numpy if device.type == "cpu" else _words_device
        return gumbel(torch, *words(seed, positions, purpose, tokens, stream, device, dtype))

    return Ops(
        xp=torch,
        array=array,
        arange=lambda n: torch.arange(n, device=device),
        noise=noise,
        top=lambda x, k: torch.topk(x, k, dim=-1),
        to_host=to_host,
        support=_support if device.type == "cpu" else None,
    )


def _support(scores: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return torch.nonzero((scores - floor).amax(0) >= 0)[:, 0]


@lru_cache(maxsize=4)
def _counters(width: int) -> np.ndarray:
    return np.arange(width, dtype=np.uint32)


def _words_numpy(
    seed: int,
    positions: Sequence[int],
    purpose: Purpose,
    tokens: int | torch.Tensor,
    stream: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Output words and complements as floats. numpy's unsigned arithmetic is the fastest on a core's own cache."""
    index = _counters(tokens) if isinstance(tokens, int) else tokens.numpy().astype(np.uint32)
    x1 = np.empty((len(positions), len(index)), np.uint32)
    x1[:] = index | np.uint32(purpose << 24)
    x0 = np.empty_like(x1)
    x0[:] = np.array([p & MASK for p in positions], np.uint32)[:, None]
    scratch = np.empty_like(x1)

    def rotate(x: np.ndarray, r: int) -> np.ndarray:
        np.left_shift(x, r, out=scratch)
        np.right_shift(x, 32 - r, out=x)
        return np.bitwise_or(x, scratch, out=x)

    key = key_of(seed, stream)
    # One position after the other where rows are long: their words stay in the cache of a core.
    if len(positions) > 1 and len(index) > 8192:
        rows = [_words_numpy(seed, [p], purpose, tokens, stream, device, dtype) for p in positions]
        return [torch.cat(parts) for parts in zip(*rows, strict=True)]
    w0, w1 = threefry(key, x0, x1, rotate, np.uint32, lambda x: x)
    return [torch.from_numpy(w).to(dtype) for w in (w0, w1, ~w0, ~w1)]


def _words_device(
    seed: int,
    positions: Sequence[int],
    purpose: Purpose,
    tokens: int | torch.Tensor,
    stream: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """The same on a device: int32 wraps like 32-bit words, only right shifts and floats need the sign cleared."""

    def word(x: int) -> int:
        return x - (1 << 32) if x >= 1 << 31 else x

    def rotate(x: torch.Tensor, r: int) -> torch.Tensor:
        return (x << r) | ((x >> 32 - r) & ((1 << r) - 1))

    def real(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.int64) & MASK).to(dtype)

    index = torch.arange(tokens, device=device) if isinstance(tokens, int) else tokens
    x1 = (index.to(torch.int32) | word(purpose << 24)).repeat(len(positions), 1)
    x0 = torch.tensor([[word(p & MASK)] for p in positions], dtype=torch.int32, device=device).repeat(1, x1.shape[1])
    w0, w1 = threefry(key_of(seed, stream), x0, x1, rotate, word, lambda x: x)
    return [real(w) for w in (w0, w1, ~w0, ~w1)]
