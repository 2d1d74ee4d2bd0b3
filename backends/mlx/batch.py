"""Several texts side by side in one pass, each with its own length: what writing training data needs."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from speclocal.backends.mlx.cache import TreeCache
from speclocal.backends.mlx.hooks import only_rows
from speclocal.backends.mlx.target import MlxTarget
from speclocal.core.interfaces import Scores
from speclocal.core.tree import DraftTree


class Batch:
    """Implements `core.interfaces.Batch` with the model of a target, whose own cache is left alone.

    slots: texts at once. Slots that hold no text are computed with the rest and mean nothing.
    """

    def __init__(self, target: MlxTarget, slots: int):
        self._target = target
        self._cache = _Slots(target.cache.windows, slots, target.cache.layer)

    def read(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Scores:
        """See Batch."""
        sizes = [len(prompt) for prompt in prompts]
        width = max(sizes)
        ids = mx.array([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        # All begin at position 0, as one text does. Padding stands behind each prompt, where a causal mask hides it.
        fresh = self._target.cache.twin()
        fresh.open([DraftTree.chain(0, [0] * (width - 1))])
        norm, last = self._target.anatomy.norm, mx.array(sizes) - 1
        if norm is None:
            scores = self._run(ids, fresh)
            scores = Scores(scores.logits[mx.arange(len(sizes)), last], scores.taps)
        else:
            with only_rows(norm, last):
                scores = self._run(ids, fresh)
            scores = Scores(scores.logits[:, 0], scores.taps)
        self._cache.begin(slots, sizes, fresh)
        self._compute(scores)
        mx.clear_cache()  # passes of many widths leave many sizes behind
        return scores

    def step(self, tokens: mx.array) -> Scores:
        """See Batch."""
        cache = self._cache
        cache.open([DraftTree.chain(0)] * len(cache.lengths))
        scores = self._run(tokens[:, None], cache)
        scores = Scores(scores.logits[:, 0], scores.taps)
        cache.commit_all([()] * len(cache.lengths))
        self._compute(scores)
        return scores

    def keep(self, slots: Sequence[int]) -> None:
        """See Batch."""
        self._cache.select(slots)

    def clear(self, slots: Sequence[int]) -> None:
        """See Batch."""
        for slot in slots:
            self._cache.lengths[slot] = 0

    def _run(self, ids: mx.array, cache: TreeCache) -> Scores:
        """Logits [B, n or 1, V] and taps [B, n, E, D] of tokens [B, n]."""
        self._target.taps.clear()
        logits = self._target.model(ids, cache=cache.layers)
        return Scores(logits.astype(mx.float32), self._target.taps.take_batch())

    def _compute(self, scores: Scores) -> None:
        """Start: two passes in one graph would copy the buffers that the second one writes to."""
        taps = [] if scores.taps is None else [scores.taps]
        self._target.taps.clear()
        mx.async_eval(scores.logits, *taps, self._cache.arrays)


class _Slots(TreeCache):
    """Keys and values of texts that come and go."""

    def begin(self, slots: Sequence[int], sizes: Sequence[int], fresh: TreeCache) -> None:
        """Texts of these sizes start in these slots, with what `fresh` holds from position 0 on."""
        width = max(sizes)
        self.reserve(width)
        at = mx.array(list(slots))
        for layer, read in zip(self.layers, fresh.layers, strict=True):
            if not layer.arrays:
                layer.arrays = [
                    mx.zeros((len(self.lengths), a.shape[1], self.capacity, a.shape[3]), a.dtype) for a in read.arrays
                ]
            for array, rows in zip(layer.arrays, read.arrays, strict=True):
                array[at, :, :width] = rows[:, :, :width]
        for slot, size in zip(slots, sizes, strict=True):
            self.lengths[slot] = size

    def select(self, slots: Sequence[int]) -> None:
        """Only these slots, in this order; one buffer at a time, so that the peak is one copy."""
        at = mx.array(list(slots))
        for layer in self.layers:
            for i, array in enumerate(layer.arrays):
                layer.arrays[i] = array[at]
                mx.eval(layer.arrays[i])
        self.lengths[:] = [self.lengths[slot] for slot in slots]

    def write(self, array: mx.array, rows: mx.array) -> None:
        """See TreeCache. One row of each text: one scatter instead of a slice for every text."""
        array[mx.arange(len(self.lengths)), :, mx.array(self.lengths)] = rows[:, :, 0]
