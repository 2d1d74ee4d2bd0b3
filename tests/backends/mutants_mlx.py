"""Mutants of the mlx backend: one mistake each, for as long as the context lasts. Every one must fail a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from speclocal.backends.mlx.cache import TreeCache, View
from speclocal.backends.mlx.hooks import Taps
from speclocal.backends.mlx.target import MlxTarget
from speclocal.core.cached_target import CHUNK


def _node_positions(original: Any) -> Any:
    def offset(self: View) -> mx.array:
        first = self._lengths[0]
        return mx.array(np.arange(first + self.start, first + self.stop)[None])

    return property(offset)


def _siblings_visible(original: Any) -> Any:
    return lambda self, b: np.tri(self.stop, dtype=bool)[self.start :]


def _ancestors_missing(original: Any) -> Any:
    def mask(self: View, cut: int | None, window: int | None, as_array: bool = False) -> Any:
        length, tree = self._lengths[0], self._trees[0]
        seen = original(self, cut, window, as_array)
        if seen is None or isinstance(seen, str):
            seen = mx.array(np.tri(self.rows, length + self.stop, length + self.start, dtype=bool))
        else:
            seen = mx.array(seen)
        for row, node in enumerate(range(self.start, self.stop)):
            for ancestor in tree.path(node)[:-1]:
                seen[..., row, length + ancestor - self.first(cut)] = False
        return seen

    return mask


def _window_ignored(original: Any) -> Any:
    return lambda self, cut, window, as_array=False: original(self, None, None, as_array)


def _all_slots(original: Any) -> Any:
    return lambda self, window: 0


def _window_by_slot(original: Any) -> Any:
    def make(self: View, cut: int | None, window: int | None) -> mx.array:
        seen = original(self, cut, None)
        if window is None:
            return seen
        slots = np.arange(self._lengths[0] + self.stop)
        near = slots[None] > slots[self._lengths[0] + self.start :, None] - window
        return seen & mx.array(near[:, self.first(cut) :])

    return make


def _rows_stay(original: Any) -> Any:
    def commit(self: TreeCache, path: Sequence[int]) -> None:
        original(self, range(1, len(path) + 1))

    return commit


def _one_too_many(original: Any) -> Any:
    return lambda self, length: original(self, length + 1)


def _last_chunk_missing(original: Any) -> Any:
    def prefill(self: MlxTarget, tokens: Sequence[int], progress: Any = None) -> Any:
        scores = original(self, tokens[: len(tokens) // CHUNK * CHUNK], progress)
        self._cached = list(tokens)
        return scores

    return prefill


def _reversed_taps(original: Any) -> Any:
    def take(self: Taps) -> Any:
        taps = original(self)
        return None if taps is None else taps[::-1]

    return take


_PATCHES: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "node index as position": ((View, "offset", _node_positions),),
    "siblings visible": ((View, "_ancestors", _siblings_visible),),
    "ancestors missing": ((View, "mask", _ancestors_missing),),
    "window ignored": ((View, "mask", _window_ignored), (View, "first", _all_slots)),
    "window by slot": ((View, "_of_trees", _window_by_slot),),
    "rows stay": ((TreeCache, "commit", _rows_stay),),
    "refused token kept": ((TreeCache, "truncate", _one_too_many),),
    "last chunk missing": ((MlxTarget, "prefill", _last_chunk_missing),),
    "taps of other nodes": ((Taps, "take", _reversed_taps),),
}
MUTANTS = tuple(_PATCHES)


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """The backend with one mistake in it."""
    with ExitStack() as stack:
        for owner, attribute, make in _PATCHES[name]:
            stack.enter_context(mock.patch.object(owner, attribute, make(getattr(owner, attribute))))
        yield


def never_rolled_back(target: MlxTarget) -> None:
    """Break one target: after a commit its cache still counts the refused rows."""
    cache = target.cache
    commit = cache.commit

    def broken(path: Sequence[int]) -> None:
        last = cache.last
        commit(path)
        cache.lengths = [max(length, last) for length in cache.lengths]

    cache.commit = broken  # type: ignore[method-assign]


def copies_its_cache(target: MlxTarget) -> None:
    """Break one target: a commit writes while what was there is still held, so that the buffers are copied."""
    cache = target.cache
    commit = cache.commit

    def broken(path: Sequence[int]) -> None:
        held = [mx.array(buffer) for buffer in cache.arrays]
        commit(path)
        mx.eval(cache.arrays)
        held.clear()

    cache.commit = broken  # type: ignore[method-assign]
