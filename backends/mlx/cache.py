"""Keys and values of B texts at once, preallocated; what mlx-lm's layers ask of a cache: positions, mask, storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import create_causal_mask

from speclocal.core.tree import DraftTree, Layout
from speclocal.errors import ModelError

BLOCK = 256
"""Slots are allocated in multiples of this."""
GROUP = 64
"""Numbers that share a scale in a quantised cache; 32 where a head's size asks for it."""

Mask = mx.array | str | None


class View:
    """Positions of the rows of one pass, and which keys they see.

    lengths: committed tokens of each text. trees: a tree for each, of which the nodes from `start` on are the rows; a
    tree with fewer nodes than the widest has rows that stand for nothing.
    Keys are the committed tokens and all nodes scored so far, in node order: slot `lengths[b] + i` holds node i.
    """

    def __init__(self, lengths: Sequence[int], trees: Sequence[DraftTree], start: int):
        self._lengths, self._trees, self.start = tuple(lengths), trees, start
        self.stop = max(map(len, trees))
        self.rows = self.stop - start
        self._is_chain = len(trees) == 1 and trees[0].is_chain
        self._layout = trees[0].layout if len(trees) == 1 else None
        self._made: dict[tuple[int | None, int | None, bool], Mask] = {}
        self._positions: np.ndarray | None = None
        self._offset: int | mx.array | None = None

    @property
    def positions(self) -> np.ndarray:
        """[B, stop] position of every node: the text's length plus the node's depth."""
        if self._positions is None:
            self._positions = np.zeros((len(self._trees), self.stop), np.int32)
            for b, (length, tree) in enumerate(zip(self._lengths, self._trees, strict=True)):
                self._positions[b, : len(tree)] = tree.depth
                self._positions[b] += length
        return self._positions

    @property
    def offset(self) -> int | mx.array:
        """What a rope is told: the first position if the rows follow each other, else the position of each, [B, n]."""
        if self._is_chain:
            return self._lengths[0] + self.start
        if self._offset is None and self._layout is not None:
            self._offset = (self._layout.depth[self.start :] + self._lengths[0])[None]
        if self._offset is None:
            self._offset = mx.array(self.positions[:, self.start :])
        return self._offset

    def first(self, window: int | None) -> int:
        """The first slot that any row sees through a window."""
        if window is None:
            return 0
        if self._is_chain or self._layout is not None:
            # Of a tree that grew on the device nothing is known but that its first row is its highest.
            return max(0, self._lengths[0] + (self.start if self._is_chain else 0) - window + 1)
        return max(0, int(self.positions[:, self.start :].min()) - window + 1)

    def mask(self, cut: int | None, window: int | None, as_array: bool = False) -> Mask:
        """What attention is told of the keys from slot `first(cut)` on.

        cut: window by which keys are left out already. window: the one that counts, in positions along the node's own
        path: a row at position s sees s-window+1..s. None: every row sees every key; `causal`: a chain at the end of
        the keys; else bool [n, T] or [B, 1, n, T], true where a row sees a key. Made once a pass.
        """
        key = (cut, window, as_array)
        if key not in self._made:
            if self._is_chain:
                self._made[key] = self._of_chain(cut, window, as_array)
            elif self._layout is not None:
                self._made[key] = self._on_device(self._layout, cut, window)
            else:
                self._made[key] = self._of_trees(cut, window)
        return self._made[key]

    def _of_chain(self, cut: int | None, window: int | None, as_array: bool) -> Mask:
        first = self.first(cut)
        offset = self._lengths[0] + self.start - first
        # Does some row stand further than a window from the first key?
        if window is not None and offset + self.rows > window:
            return create_causal_mask(self.rows, offset, window)
        if self.rows == 1:
            return None
        return create_causal_mask(self.rows, offset) if as_array else "causal"

    def _of_trees(self, cut: int | None, window: int | None) -> mx.array:
        total = max(self._lengths) + self.stop
        seen = np.zeros((len(self._trees), self.rows, total), bool)
        for b, length in enumerate(self._lengths):
            seen[b, :, :length] = True
            seen[b, :, length : length + self.stop] = self._ancestors(b)
            if window is not None:
                at = np.concatenate([np.arange(length), self.positions[b]])
                far = at[None] <= self.positions[b, self.start :, None] - window
                seen[b, :, : length + self.stop] &= ~far
        return mx.array(seen[:, None, :, self.first(cut) :])

    def _on_device(self, layout: Layout, cut: int | None, window: int | None) -> mx.array:
        length = self._lengths[0]
        seen = mx.concatenate([mx.ones((self.rows, length), mx.bool_), layout.seen[self.start :] > 0], 1)
        if window is not None:
            at = mx.concatenate([mx.arange(length), layout.depth + length])
            seen = seen & (at[None] > at[length + self.start :, None] - window)
        return seen[None, None, :, self.first(cut) :]

    def _ancestors(self, b: int) -> np.ndarray:
        """[n, stop] which nodes each row sees. A row that stands for nothing sees itself: no row may see nothing."""
        seen = np.eye(self.stop, dtype=bool)
        for node, mask in enumerate(self._trees[b].ancestors):
            seen[node] = [mask >> j & 1 for j in range(self.stop)]
        return seen[self.start :]


class LayerCache:
    """What one attention layer writes into; stands in for mlx-lm's cache classes.

    window: of a sliding layer. Its keys are all kept, but only those in reach are handed out.
    arrays: keys and values, `[B, G, slots, d]` each.
    """

    def __init__(self, owner: TreeCache, window: int | None):
        self._owner, self.window = owner, window
        self.arrays: list[mx.array] = []
        self._fresh: list[list[mx.array]] = []

    @property
    def offset(self) -> int | mx.array:
        """Position or positions of the rows of this pass."""
        return self._owner.view.offset

    def make_mask(self, rows: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        """Called by `mlx_lm.models.base.create_attention_mask`."""
        return self._owner.view.mask(self.window, self.window or window_size, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store the rows of this pass, return all keys and values in reach."""
        owner = self._owner
        rows = self._pack(keys, values)
        if not self.arrays:
            self.arrays = [_room(row, owner.capacity) for row in rows]
        # They are kept until the commit: copying rows inside a buffer would copy the buffer.
        self._fresh.append(rows)
        for array, row in zip(self.arrays, rows, strict=True):
            owner.write(array, row)
        first, last = owner.view.first(self.window), owner.last
        return self._unpack([array[..., first:last, :] for array in self.arrays])

    def _pack(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [keys, values]

    def _unpack(self, arrays: list[mx.array]) -> tuple[mx.array, mx.array]:
        return arrays[0], arrays[1]

    def keep(self, b: int, at: int, nodes: Sequence[int]) -> None:
        """Put the rows of some nodes of text `b` at slot `at`."""
        index = mx.array(list(nodes))
        for i, array in enumerate(self.arrays):
            passes = [rows[i][b : b + 1] for rows in self._fresh]
            fresh = passes[0] if len(passes) == 1 else mx.concatenate(passes, axis=2)
            array[b : b + 1, :, at : at + len(nodes)] = fresh[:, :, index]

    def forget(self) -> None:
        """The pass is decided: its rows are kept or not needed."""
        self._fresh.clear()

    def grow(self, slots: int) -> None:
        """Move to larger buffers, one at a time so that the peak is one copy."""
        for i, old in enumerate(self.arrays):
            new = _room(old, slots)
            new[..., : old.shape[2], :] = old
            mx.eval(new)
            self.arrays[i] = new


class QuantisedLayerCache(LayerCache):
    """Keys and values in 4 or 8 bits, each row by itself: a tree pass rounds as single steps do.

    Hands out de-quantised arrays, which every attention understands.
    """

    def __init__(self, owner: TreeCache, window: int | None, bits: int):
        super().__init__(owner, window)
        self._bits, self._group = bits, GROUP

    def _pack(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        sizes = keys.shape[-1], values.shape[-1]
        self._group = GROUP if all(size % GROUP == 0 for size in sizes) else GROUP // 2
        if any(size % self._group for size in sizes):
            raise ModelError("keys and values of this model cannot be quantised", got=f"heads of {min(sizes)} numbers")
        return [part for x in (keys, values) for part in mx.quantize(x, self._group, self._bits)]

    def _unpack(self, arrays: list[mx.array]) -> tuple[mx.array, mx.array]:
        keys, values = (
            mx.dequantize(w, scales, biases, group_size=self._group, bits=self._bits)
            for w, scales, biases in (arrays[:3], arrays[3:])
        )
        return keys, values


class PackedLayerCache(QuantisedLayerCache):
    """The same, handed out as it is: for classes that attend with mlx-lm's `scaled_dot_product_attention`."""

    @property
    def bits(self) -> int:
        """That function takes a cache with this attribute as quantised."""
        return self._bits

    @property
    def group_size(self) -> int:
        return self._group

    def _unpack(self, arrays: list[mx.array]) -> tuple[mx.array, mx.array]:
        return tuple(arrays[:3]), tuple(arrays[3:])  # type: ignore[return-value]


def _room(like: mx.array, slots: int) -> mx.array:
    return mx.zeros((*like.shape[:2], slots, like.shape[3]), like.dtype)


class TreeCache:
    """All layers' caches, in step. Slots 0..length-1 hold committed tokens, the next ones the tree being scored.

    windows: sliding window of each layer, or None. texts: how many are held (the batch axis). layer: makes the cache of
    one layer.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        texts: int = 1,
        layer: Callable[[TreeCache, int | None], LayerCache] = LayerCache,
    ):
        self.layer = layer
        self.windows = tuple(windows)
        self.lengths = [0] * texts
        self.capacity = 0
        self.view = View(self.lengths, [DraftTree.chain(0)] * texts, 0)
        self.layers = [layer(self, window) for window in windows]

    def twin(self) -> TreeCache:
        """A cache of the same kind that holds nothing."""
        return TreeCache(self.windows, len(self.lengths), self.layer)

    @property
    def length(self) -> int:
        """Committed tokens of the first text."""
        return self.lengths[0]

    @property
    def last(self) -> int:
        """One past the last slot that this pass reads."""
        return max(self.lengths) + self.view.stop

    def reserve(self, slots: int) -> None:
        """Make room for `slots` tokens of each text."""
        if slots <= self.capacity:
            return
        self.capacity = -(-slots // BLOCK) * BLOCK
        for layer in self.layers:
            layer.grow(self.capacity)

    def open(self, trees: Sequence[DraftTree], start: int = 0) -> None:
        """The next pass writes the nodes of the trees from `start` on."""
        self.view = View(self.lengths, trees, start)
        self.reserve(self.last)
        if start == 0:
            for layer in self.layers:
                layer.forget()

    def write(self, array: mx.array, rows: mx.array) -> None:
        """Put the rows of this pass behind what each text has."""
        start, stop = self.view.start, self.view.stop
        if len(set(self.lengths)) == 1:
            array[:, :, self.length + start : self.length + stop] = rows
            return
        for b, length in enumerate(self.lengths):
            array[b : b + 1, :, length + start : length + stop] = rows[b : b + 1]

    def commit(self, path: Sequence[int]) -> None:
        """Of the one text, keep the root and the nodes of `path`."""
        self.commit_all([path])

    def commit_all(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep of each text the root and the nodes of its path: only rows that are not yet in place move."""
        for b, path in enumerate(paths):
            placed = next((i for i, node in enumerate(path) if node != i + 1), len(path))
            if moving := path[placed:]:
                for layer in self.layers:
                    layer.keep(b, self.lengths[b] + 1 + placed, moving)
        for b, path in enumerate(paths):
            self.lengths[b] += 1 + len(path)
        for layer in self.layers:
            layer.forget()

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of every text."""
        self.lengths = [min(length, n) for n in self.lengths]

    def clear(self) -> None:
        """Forget everything and give the memory back."""
        self.lengths = [0] * len(self.lengths)
        self.capacity = 0
        for layer in self.layers:
            layer.forget()
            layer.arrays.clear()

    @property
    def arrays(self) -> list[mx.array]:
        """All buffers, for evaluation."""
        return [array for layer in self.layers for array in layer.arrays]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.arrays)
