"""`Ops` for torch, and the keyed noise."""

from __future__ import annotations

from collections.abc import Sequence
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
        seed: int, positions: Sequence[int], purpose: Purpose, width: int, stream: int = 0, dtype: Any = torch.float32
    ) -> torch.Tensor:
        words = _words_numpy if device.type == "cpu" else _words_device
        return torch.stack([gumbel(torch, *words(seed, p, purpose, width, stream, device, dtype)) for p in positions])

    return Ops(
        xp=torch,
        array=array,
        arange=lambda n: torch.arange(n, device=device),
        noise=noise,
        top=lambda x, k: torch.topk(x, k, dim=-1),
        to_host=to_host,
        on_host=device.type == "cpu",
    )


def _words_numpy(
    seed: int, position: int, purpose: Purpose, width: int, stream: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Output words and complements as floats. numpy's unsigned arithmetic is the fastest here for one core's cache."""
    real = np.float64 if dtype == torch.float64 else np.float32
    scratch = np.empty(width, np.uint32)

    def rotate(x: np.ndarray, r: int) -> np.ndarray:
        np.left_shift(x, r, out=scratch)
        np.right_shift(x, 32 - r, out=x)
        return np.bitwise_or(x, scratch, out=x)

    x1 = np.arange(width, dtype=np.uint32)
    x1 |= np.uint32(purpose << 24)
    x0 = np.full(width, position & MASK, np.uint32)
    w0, w1 = threefry(key_of(seed, stream), x0, x1, rotate, np.uint32, lambda x: x)
    return [torch.from_numpy(w.astype(real)) for w in (w0, w1, ~w0, ~w1)]


def _words_device(
    seed: int, position: int, purpose: Purpose, width: int, stream: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The same on a device: int32 wraps like 32-bit words, only right shifts and floats need the sign cleared."""

    def word(x: int) -> int:
        return x - (1 << 32) if x >= 1 << 31 else x

    def rotate(x: torch.Tensor, r: int) -> torch.Tensor:
        return (x << r) | ((x >> 32 - r) & ((1 << r) - 1))

    def real(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.int64) & MASK).to(dtype)

    x1 = torch.arange(width, dtype=torch.int32, device=device) | word(purpose << 24)
    x0 = torch.full((width,), word(position & MASK), dtype=torch.int32, device=device)
    w0, w1 = threefry(key_of(seed, stream), x0, x1, rotate, word, lambda x: x)
    return [real(w) for w in (w0, w1, ~w0, ~w1)]
