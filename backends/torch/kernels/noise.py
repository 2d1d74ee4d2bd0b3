"""Keyed Gumbel noise: a compiled kernel for CPUs, and its plain references in numpy and in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from speclocal.core.noise import MASK, Purpose, gumbel, key_of, threefry


def noise(
    seed: int,
    positions: Sequence[int],
    purpose: Purpose,
    tokens: int | Tensor,
    stream: int = 0,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`Ops.noise`: [len(positions), K] for the token ids `tokens`, or for the first so many."""
    key = key_of(seed, stream)
    kernel = compiled()
    if device.type == "cpu" and dtype == torch.float32 and kernel is not None:
        return by_kernel(kernel, key, positions, purpose, tokens)
    return by_reference(key, positions, purpose, tokens, device, dtype)


def by_reference(
    key: tuple[int, int],
    positions: Sequence[int],
    purpose: Purpose,
    tokens: int | Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The definition, `core.noise.gumbel` over the words of `core.noise.threefry`, row by row."""
    words = words_numpy if device.type == "cpu" else words_torch
    return torch.stack([gumbel(torch, *words(key, p, purpose, tokens, device, dtype)) for p in positions])


@cache
def compiled() -> ctypes.CDLL | None:
    """The library built from noise.c when the package was installed; None where there was no compiler."""
    spec = find_spec("speclocal.backends.torch._noise")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:  # built for another machine
        return None
    counter = [ctypes.c_uint32] * 5
    library.speclocal_gumbel_row.argtypes = [*counter, ctypes.c_void_p]
    library.speclocal_gumbel_at.argtypes = [*counter, ctypes.c_void_p, ctypes.c_void_p]
    library.speclocal_gumbel_row.restype = library.speclocal_gumbel_at.restype = None
    return library


def by_kernel(
    library: ctypes.CDLL, key: tuple[int, int], positions: Sequence[int], purpose: Purpose, tokens: int | Tensor
) -> Tensor:
    """The kernel of noise.c, a row a call."""
    index = None if isinstance(tokens, int) else tokens.contiguous()
    width = tokens if isinstance(tokens, int) else len(tokens)
    out = torch.empty(len(positions), width)
    for i, position in enumerate(positions):
        counter = (*key, position & MASK, purpose << 24, width)
        row = out.data_ptr() + 4 * width * i
        if index is None:
            library.speclocal_gumbel_row(*counter, row)
        else:
            library.speclocal_gumbel_at(*counter, index.data_ptr(), row)
    return out


@lru_cache(maxsize=4)
def _counters(width: int) -> np.ndarray:
    return np.arange(width, dtype=np.uint32)


def words_numpy(
    key: tuple[int, int],
    position: int,
    purpose: Purpose,
    tokens: int | Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Output words and complements as floats. numpy has unsigned arithmetic, which torch lacks."""
    index = _counters(tokens) if isinstance(tokens, int) else tokens.numpy().astype(np.uint32)
    x1 = index | np.uint32(purpose << 24)
    x0 = np.full_like(x1, position & MASK)
    scratch = np.empty_like(x1)

    def rotate(x: np.ndarray, r: int) -> np.ndarray:
        np.left_shift(x, r, out=scratch)
        np.right_shift(x, 32 - r, out=x)
        return np.bitwise_or(x, scratch, out=x)

    w0, w1 = threefry(key, x0, x1, rotate, np.uint32, lambda x: x)
    return [torch.from_numpy(w).to(dtype) for w in (w0, w1, ~w0, ~w1)]


def words_torch(
    key: tuple[int, int],
    position: int,
    purpose: Purpose,
    tokens: int | Tensor,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The same on a device: int32 wraps like 32-bit words, only right shifts and floats need the sign cleared."""

    def word(x: int) -> int:
        return x - (1 << 32) if x >= 1 << 31 else x

    def rotate(x: Tensor, r: int) -> Tensor:
        return (x << r) | ((x >> 32 - r) & ((1 << r) - 1))

    def real(x: Tensor) -> Tensor:
        return (x.to(torch.int64) & MASK).to(dtype)

    index = torch.arange(tokens, device=device) if isinstance(tokens, int) else tokens
    x1 = index.to(torch.int32) | word(purpose << 24)
    x0 = torch.full_like(x1, word(position & MASK))
    w0, w1 = threefry(key, x0, x1, rotate, word, lambda x: x)
    return [real(w) for w in (w0, w1, ~w0, ~w1)]
