"""Counter-based random numbers keyed by (seed, position, purpose, index): the same on every backend, in any order.

Threefry-2x32 with 20 rounds (Salmon et al. 2011). Key: the 64-bit seed, low word first. Counter: (position,
purpose << 24 | index). `position` is the absolute index of the token being drawn, prompt included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from speclocal.errors import UsageError

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array, Ops

MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


class Purpose(IntEnum):
    """What a number is for. Numbers of different purposes are independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    PROCESSOR = 4


def _rotate_word(x: int, r: int) -> int:
    return (x << r | x >> 32 - r) & MASK


def threefry(
    key: tuple[int, int],
    x0: Any,
    x1: Any,
    rotate: Callable[[Any, int], Any] = _rotate_word,
    word: Callable[[int], Any] = int,
    wrap: Callable[[Any], Any] = lambda x: x & MASK,
) -> tuple[Any, Any]:
    """The two output words for counter (x0, x1): integers, or arrays of 32-bit words (their buffers are reused).

    rotate: rotates every word left. word: turns a constant into the array's number type. wrap: cuts to 32 bits (the
    identity for arrays whose arithmetic wraps by itself).
    """
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0 += word(keys[0])
    x1 += word(keys[1])
    x0, x1 = wrap(x0), wrap(x1)
    for group in range(5):
        for r in _ROTATIONS[group % 2]:
            x0 += x1
            x0 = wrap(x0)
            x1 = rotate(x1, r)
            x1 ^= x0
        x0 += word(keys[(group + 1) % 3])
        x1 += word(keys[(group + 2) % 3] + group + 1 & MASK)
        x0, x1 = wrap(x0), wrap(x1)
    return x0, x1


def key_of(seed: int, stream: int = 0) -> tuple[int, int]:
    """The key of a seed; stream s > 0 gives the independent samples 1, 2, ... of one request."""
    key = (seed & MASK, seed >> 32 & MASK)
    return threefry(key, MASK, stream) if stream else key


def words(seed: int, position: int, purpose: Purpose, index: int, stream: int = 0) -> tuple[int, int]:
    """Two 32-bit words for one counter."""
    return threefry(key_of(seed, stream), position & MASK, purpose << 24 | index)


def uniform(seed: int, position: int, purpose: Purpose, index: int, stream: int = 0) -> float:
    """A number in [0, 1) with 24 bits, exact in float32."""
    return (words(seed, position, purpose, index, stream)[0] >> 8) * 2.0**-24


def gumbel(xp: Any, w0: Array, w1: Array, inv0: Array, inv1: Array) -> Array:
    """Standard Gumbel noise from output words and their bitwise complements, all given as floats.

    The exponential -log(1-v), v = (w0 + (w1 + 1/2) / 2^32) / 2^32, keeps full relative precision at both ends: near 0,
    where races are decided, through log1p; near the far tail through 1-v, formed exactly from the complements.
    """
    v = w0 * 2.0**-32 + (w1 + 0.5) * 2.0**-64
    u = inv0 * 2.0**-32 + (inv1 + 0.5) * 2.0**-64
    return -xp.log(xp.where(v < 0.5, -xp.log1p(-v), -xp.log(u)))


class Noise:
    """Gumbel noise of one generation, made once per position and kept while the position can recur."""

    def __init__(self, ops: Ops, seed: int, width: int, stream: int = 0):
        self._ops, self._seed, self._width, self._stream = ops, seed, width, stream
        self._rows: dict[tuple[Purpose, int], Array] = {}

    def rows(self, position: int, count: int, purpose: Purpose = Purpose.TARGET) -> Array:
        """Device [count, V]: noise of `count` positions from `position` on."""
        missing = [p for p in range(position, position + count) if (purpose, p) not in self._rows]
        if missing:
            made = self._ops.noise(self._seed, missing, purpose, self._width, self._stream)
            for i, p in enumerate(missing):
                self._rows[purpose, p] = made[i]
        if count == 1:
            return self._rows[purpose, position][None]
        return self._ops.xp.stack([self._rows[purpose, p] for p in range(position, position + count)])

    def at(self, positions: Sequence[int], purpose: Purpose, tokens: Array) -> Array:
        """Device [len(positions), K]: noise of few tokens, made anew each time."""
        return self._ops.noise(self._seed, positions, purpose, tokens, self._stream)

    def block(self, position: int, number: int, purpose: Purpose, tokens: Array | None = None) -> Array:
        """Device [1, K]: vector `number` of those that belong to one position (index: number x V + token)."""
        if (number + 1) * self._width > 1 << 24:
            raise UsageError(
                "too many drafts for the block rule's noise", got=number, expected=f"at most {(1 << 24) // self._width}"
            )
        if tokens is None:
            tokens = self._ops.arange(self._width)
        return self._ops.noise(self._seed, [position], purpose, tokens + number * self._width, self._stream)

    def coin(self, position: int, index: int) -> float:
        """The acceptance coin number `index` of a position."""
        return uniform(self._seed, position, Purpose.ACCEPT, index, self._stream)

    def forget(self, before: int) -> None:
        """Drop positions that are decided."""
        for key in [k for k in self._rows if k[1] < before]:
            del self._rows[key]
