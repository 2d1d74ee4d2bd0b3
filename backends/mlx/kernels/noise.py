"""Keyed Gumbel noise on MLX's device: `core.noise.gumbel` over the words of `core.noise.threefry`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from speclocal.core.noise import MASK, Purpose, gumbel, key_of, threefry


def noise(seed: int, positions: Sequence[int], purpose: Purpose, tokens: int | mx.array, stream: int = 0) -> mx.array:
    """`Ops.noise`: [len(positions), K] for the token ids `tokens`, or for the first so many."""
    index = mx.arange(tokens, dtype=mx.uint32) if isinstance(tokens, int) else tokens.astype(mx.uint32)
    counters = index[None] | mx.array(purpose << 24, mx.uint32)
    at = mx.array([p & MASK for p in positions], mx.uint32)[:, None]
    key = mx.array(key_of(seed, stream), mx.uint32)
    return kernel()(key, at, counters)


@cache
def kernel() -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    """Fused where a GPU runs it; on a CPU the compiler takes longer than it ever saves."""
    return reference if mx.default_device() == mx.cpu else mx.compile(reference)


def reference(key: mx.array, positions: mx.array, counters: mx.array) -> mx.array:
    """The definition. key [2], positions [P, 1] and counters [1, K] are 32-bit words; returns [P, K]."""
    w0, w1 = words(key, positions, counters)
    return gumbel(mx, *(w.astype(mx.float32) for w in (w0, w1, ~w0, ~w1)))


def words(key: mx.array, positions: mx.array, counters: mx.array) -> tuple[mx.array, mx.array]:
    """Output words [P, K]. Unsigned arithmetic wraps by itself."""
    shape = mx.broadcast_shapes(positions.shape, counters.shape)
    x0, x1 = mx.broadcast_to(positions, shape), mx.broadcast_to(counters, shape)
    pair: Any = key[0], key[1]
    return threefry(pair, x0, x1, _rotate, lambda x: x, lambda x: x)


def _rotate(x: mx.array, r: int) -> mx.array:
    return (x << r) | (x >> 32 - r)
