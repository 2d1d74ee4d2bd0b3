"""Keys and values of one text, preallocated, with slots for a tree behind the committed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from speclocal.core.tree import DraftTree

BLOCK = 256
"""Slots are allocated in multiples of this."""


class View:
    """Which keys the rows of one pass see.

    length: committed tokens. tree: the round's tree, of which the nodes from `start` on are the rows. Keys are the
    committed tokens and all nodes scored so far, in node order.
    """

    groups: tuple[()] = ()

    def __init__(self, length: int, tree: DraftTree, start: int, device: torch.device):
        self._length, self._tree, self._start, self._device = length, tree, start, device
        self.rows = len(tree) - start
        if tree.layout is not None:
            self.positions = (tree.layout.depth[start:] + length)[None]
        else:
            self.positions = torch.tensor([[length + d for d in tree.depth[start:]]], device=device)
        self._made: dict[tuple[int | None, torch.dtype, int], Tensor | None] = {}

    def bias(self, window: int | None, dtype: torch.dtype, repeat: int = 1) -> Tensor | None:
        """[repeat * n, T] additive mask, 0 where row sees key and -inf elsewhere; None if every row sees every key.

        A sliding window counts positions along the node's own path: a row at position s sees keys at s-window+1..s.
        Made once a pass, however many layers ask.
        """
        if window is not None and self._length + self._deepest < window:
            window = None
        key = (window, dtype, repeat)
        if key not in self._made:
            if repeat == 1:
                self._made[key] = self._make(window, dtype)
            else:
                bias = self.bias(window, dtype)
                self._made[key] = None if bias is None else bias.repeat(repeat, 1)
        return self._made[key]

    @property
    def _deepest(self) -> int:
        layout = self._tree.layout
        return max(self._tree.depth) if layout is None else layout.deepest

    def _seen(self) -> Tensor:
        """[n, N] which nodes each row sees: its ancestors and itself."""
        if self._tree.layout is not None:
            return self._tree.layout.seen[self._start :] > 0
        ancestors, nodes = self._tree.ancestors, range(len(self._tree))
        return torch.tensor(
            [[ancestors[i] >> j & 1 == 1 for j in nodes] for i in nodes[self._start :]], device=self._device
        )

    def _make(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        if window is None and len(self._tree) == 1:
            return None
        total = self._length + len(self._tree)
        hidden = float("-inf")
        bias = torch.zeros(self.rows, total, dtype=dtype, device=self._device)
        if self._tree.is_chain:
            rows = torch.full((self.rows, len(self._tree)), hidden, dtype=dtype, device=self._device)
            bias[:, self._length :] = rows.triu_(self._start + 1)
        else:
            bias[:, self._length :].masked_fill_(~self._seen(), hidden)
        if window is not None:
            at = torch.arange(self._length, device=self._device)
            at = torch.cat([at, self._depths() + self._length])
            bias.masked_fill_(at[None, :] <= self.positions[0][:, None] - window, hidden)
        return bias

    def _depths(self) -> Tensor:
        layout = self._tree.layout
        return torch.tensor(self._tree.depth, device=self._device) if layout is None else layout.depth


class BatchView:
    """Which keys the rows of a pass over several texts see: `positions` [B or 1, n], `keys` slots from 0 on.

    groups: texts that follow each other, with a view of their own over no more keys than the longest of them has.
    """

    def __init__(self, positions: Tensor, keys: int, groups: Sequence[tuple[int, int, BatchView]] = ()):
        self._positions, self.keys, self.groups = positions, keys, groups
        self.rows = positions.shape[1]
        self._made: dict[tuple[int | None, torch.dtype, int], Tensor] = {}

    def bias(self, window: int | None, dtype: torch.dtype, repeat: int = 1) -> Tensor:
        """[B or 1, 1, repeat * n, T] additive mask."""
        key = (window, dtype, repeat)
        if key not in self._made:
            at = torch.arange(self.keys, device=self._positions.device)[None, None, None]
            own = self._positions[:, None, :, None]
            hidden = at > own
            if window is not None:
                hidden = hidden | (at <= own - window)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._made[key] = bias.repeat(1, 1, repeat, 1)
        return self._made[key]


class TreeCache(Cache):
    """What transformers' attention layers write into: `[1, G, slots, d]` per layer, grown in place.

    Slots 0..length-1 hold committed tokens; the next ones the nodes of the tree being scored.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.length = 0
        self._at = 0
        self._end = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._capacity = 0

    def reserve(self, slots: int) -> None:
        """Make room for `slots` tokens. Layers grow one after the other, so that the peak is one layer's copy."""
        if slots <= self._capacity:
            return
        self._capacity = -(-slots // BLOCK) * BLOCK
        for buffers in (self._keys, self._values):
            for i, old in enumerate(buffers):
                buffers[i] = self._allocate(old)
                buffers[i][:, :, : self.length] = old[:, :, : self.length]

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_empty(*like.shape[:2], self._capacity, like.shape[3])

    def open(self, start: int, stop: int) -> None:
        """The next pass writes the nodes `start..stop-1` of the tree."""
        self.reserve(self.length + stop)
        self._at, self._end = self.length + start, self.length + stop

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by every attention layer, in order on the first pass: store, return all keys and values so far."""
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[:, :, self._at : self._end] = key_states
        values[:, :, self._at : self._end] = value_states
        return keys[:, :, : self._end], values[:, :, : self._end]

    def commit(self, path: Sequence[int]) -> None:
        """Keep the root and the nodes of `path`: only rows that are not yet in place move, and nothing else."""
        buffers = (*self._keys, *self._values)
        for i, node in enumerate(path, 1):
            if node != i:
                # Rows only move towards the front, in order, so none is overwritten before it has moved.
                new, old = self.length + i, self.length + node
                torch._foreach_copy_([b[:, :, new] for b in buffers], [b[:, :, old] for b in buffers])
        self.length += 1 + len(path)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.length = min(length, self.length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(b.nbytes for b in (*self._keys, *self._values))
