"""A model of mlx-lm as a Target: tree attention, own cache, taps."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import mlx.core as mx

from speclocal.backends.mlx.cache import TreeCache
from speclocal.backends.mlx.hooks import Anatomy, Taps
from speclocal.backends.mlx.ops import make_ops
from speclocal.core.cached_target import CachedTarget
from speclocal.core.head_spec import TargetFacts
from speclocal.core.interfaces import Scores
from speclocal.core.pending import Pending
from speclocal.core.tree import DraftTree

CLEAR = 256
"""Tokens between two returns of unused buffers to the system: passes of many widths leave many sizes behind."""


class MlxTarget(CachedTarget):
    """Implements `core.interfaces.Target` over a model of mlx-lm that `loading.wrap` has prepared.

    cache:   as many layers as the model has caches.
    context: most positions it may use.
    taps:    see `tap`.

    All work belongs to the thread that made it and to MLX's default stream.
    """

    def __init__(self, model: Any, cache: TreeCache, context: int, taps: Sequence[int] = ()):
        super().__init__()
        self.model, self.cache, self.context = model, cache, context
        self.trees = True
        self.device = mx.default_device().type.name
        self.ops = make_ops()
        self._thread = get_ident()
        self._since_clear = 0
        self._logits: mx.array | None = None
        self.anatomy = Anatomy(model)
        self._scale: mx.array | float = 1.0
        self.taps = Taps(self.anatomy, (0,) if self.anatomy.embedding is not None else ())
        self.facts = TargetFacts(0, 0, 0)
        self.vocab, self.dtype = self._look()
        self.taps.remove()
        self.taps = Taps(self.anatomy, taps)
        self.points = self.taps.points

    def _look(self) -> tuple[int, str]:
        """Width and number type of the logits, from a pass of which only the embedding is computed."""
        self.cache.open([self._tree])
        logits = self.model(mx.array([[1]]), cache=self.cache.layers)
        self.cache.clear()
        if (scaled := self.taps.take()) is not None:
            # Some classes scale what they look up.
            plain = self.anatomy.embedding(mx.array([1]))
            self._scale = (scaled[:, 0] * plain).sum() / mx.maximum((plain * plain).sum(), 1e-20)
            rows, hidden = self.anatomy.embedding.weight.shape[0], scaled.shape[-1]
            self.facts = TargetFacts(len(self.anatomy.layers), hidden, rows, self.context)
        return logits.shape[-1], str(logits.dtype).removeprefix("mlx.core.")

    def tap(self, points: Sequence[int]) -> None:
        """See Target."""
        if tuple(points) != self.taps.points:
            self.taps.remove()
            self.taps = Taps(self.anatomy, points)
            self.points = self.taps.points
            self.prefill([])

    def embed(self, tokens: mx.array) -> mx.array:
        """See Target."""
        found = self.anatomy.embedding(tokens)
        return (found * self._scale).astype(found.dtype)

    def unembed(self, hidden: mx.array) -> mx.array:
        """See Target."""
        return self.anatomy.unembed(hidden)

    def output_rows(self, tokens: mx.array) -> mx.array | None:
        """See Target."""
        return self.anatomy.output_rows(tokens)

    def run(self, tree: DraftTree, start: int) -> Scores:
        """The pass is only described; reading a value, or `Ops.submit`, starts it."""
        if get_ident() != self._thread:
            raise RuntimeError("MLX work belongs to the thread that loaded the model")
        tokens = tree.tokens.array if isinstance(tree.tokens, Pending) else mx.array(list(tree.tokens))
        if start and self._logits is not None:
            # Two passes in one graph would copy the buffers: the first one is still to be read when the next writes.
            mx.async_eval(self._logits)
        self.cache.open([tree], start)
        self.taps.clear()
        out = self.model(tokens[None, start:], cache=self.cache.layers)
        self._logits = out[0].astype(mx.float32)
        return Scores(self._logits, self.taps.take())

    def read_prompt(self, tree: DraftTree) -> mx.array | None:
        taps = self.run(tree, 0).taps
        # What nobody asks for is not computed: neither logits nor, without taps, the end of the last layer.
        self._logits = None
        mx.eval(self.cache.arrays, [] if taps is None else [taps])
        return taps

    def commit(self, path: Sequence[int]) -> None:
        """See Target."""
        super().commit(path)
        self._logits = None
        self._since_clear += 1 + len(path)
        if self._since_clear >= CLEAR:
            self._since_clear = 0
            mx.clear_cache()
