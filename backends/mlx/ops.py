"""`Ops` for MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from speclocal.backends.mlx.kernels.noise import noise
from speclocal.core.interfaces import Ops


def make_ops() -> Ops:
    """The operations on MLX's default device."""
    return Ops(xp=mx, array=mx.array, arange=mx.arange, noise=noise, top=top, to_host=to_host, submit=mx.async_eval)


def to_host(*arrays: mx.array) -> list[Any]:
    """All arrays in one wait."""
    mx.eval(*arrays)
    return [a.tolist() for a in arrays]


def top(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k largest values of each row, descending [N, k], and their indices."""
    if k == 1:
        best = mx.argmax(x, -1, keepdims=True)
    elif k < x.shape[-1]:
        best = mx.argpartition(-x, k - 1, axis=-1)[..., :k]
        best = mx.take_along_axis(best, mx.argsort(-mx.take_along_axis(x, best, -1), -1), -1)
    else:
        best = mx.argsort(-x, -1)
    return mx.take_along_axis(x, best, -1), best
