"""Mutants of the torch backend: one mistake each, for as long as the context lasts. Every one must fail a check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from speclocal.backends.torch.cache import TreeCache, View
from speclocal.backends.torch.target import Taps, TorchTarget
from speclocal.core.cached_target import CHUNK
from speclocal.core.tree import DraftTree


def _node_positions(original: Any) -> Any:
    def init(self: View, length: int, tree: DraftTree, start: int, device: torch.device) -> None:
        original(self, length, tree, start, device)
        self.positions = torch.arange(length + start, length + len(tree), device=device)[None]

    return init


def _siblings_visible(original: Any) -> Any:
    def make(self: View, window: int | None, dtype: torch.dtype) -> Any:
        tree = self._tree
        self._tree = DraftTree.chain(tree.tokens[0], tree.tokens[1:])
        try:
            return original(self, None, dtype)
        finally:
            self._tree = tree

    return make


def _ancestors_missing(original: Any) -> Any:
    def make(self: View, window: int | None, dtype: torch.dtype) -> Any:
        bias = original(self, window, dtype)
        for row, node in enumerate(range(self._start, len(self._tree))):
            for seen in self._tree.path(node)[:-1]:
                bias[row, self._length + seen] = float("-inf")
        return bias

    return make


def _window_ignored(original: Any) -> Any:
    return lambda self, window, dtype, repeat=1: original(self, None, dtype, repeat)


def _window_by_slot(original: Any) -> Any:
    def make(self: View, window: int | None, dtype: torch.dtype) -> Any:
        bias = original(self, None, dtype)
        if window is None:
            return bias
        total = self._length + len(self._tree)
        bias = torch.zeros(len(self._tree) - self._start, total, dtype=dtype) if bias is None else bias
        slots = torch.arange(total)
        return bias.masked_fill(slots[None] <= slots[self._length + self._start :, None] - window, float("-inf"))

    return make


def _rows_stay(original: Any) -> Any:
    def commit(self: TreeCache, path: Sequence[int]) -> None:
        self.length += 1 + len(path)

    return commit


def _one_too_many(original: Any) -> Any:
    return lambda self, length: original(self, length + 1)


def _last_chunk_missing(original: Any) -> Any:
    def prefill(self: TorchTarget, tokens: Sequence[int], progress: Any = None) -> Any:
        scores = original(self, tokens[: len(tokens) // CHUNK * CHUNK], progress)
        self._cached = list(tokens)
        return scores

    return prefill


def _reversed_taps(original: Any) -> Any:
    def take(self: Any) -> Any:
        taps = original(self)
        return None if taps is None else taps.flip(0)

    return take


_PATCHES: dict[str, tuple[Any, str, Any]] = {
    "node index as position": (View, "__init__", _node_positions),
    "siblings visible": (View, "_make", _siblings_visible),
    "ancestors missing": (View, "_make", _ancestors_missing),
    "window ignored": (View, "bias", _window_ignored),
    "window by slot": (View, "_make", _window_by_slot),
    "rows stay": (TreeCache, "commit", _rows_stay),
    "refused token kept": (TreeCache, "truncate", _one_too_many),
    "last chunk missing": (TorchTarget, "prefill", _last_chunk_missing),
    "taps of other nodes": (Taps, "take", _reversed_taps),
}
MUTANTS = tuple(_PATCHES)


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """The backend with one mistake in it."""
    owner, attribute, make = _PATCHES[name]
    with mock.patch.object(owner, attribute, make(getattr(owner, attribute))):
        yield


def never_rolled_back(target: TorchTarget) -> None:
    """Break one target: after a commit its cache still counts the refused rows."""
    cache = target.cache
    commit = cache.commit

    def broken(path: Sequence[int]) -> None:
        commit(path)
        cache.length = max(cache.length, cache._end)

    cache.commit = broken  # type: ignore[method-assign]


def copies_its_cache(target: TorchTarget) -> None:
    """Break one target: a commit moves all rows to new buffers."""
    cache = target.cache
    commit = cache.commit

    def broken(path: Sequence[int]) -> None:
        commit(path)
        cache._keys[:] = [buffer.clone() for buffer in cache._keys]
        cache._values[:] = [buffer.clone() for buffer in cache._values]

    cache.commit = broken  # type: ignore[method-assign]
