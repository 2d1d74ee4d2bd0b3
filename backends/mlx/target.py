"""A model of mlx-lm as a Target: tree attention, own cache, taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import mlx.core as mx

from speclocal.backends.mlx.cache import TreeCache
from speclocal.backends.mlx.hooks import Anatomy, Taps
from speclocal.backends.mlx.ops import make_ops
from speclocal.core.head_spec import TargetFacts
from speclocal.core.interfaces import Scores
from speclocal.core.pending import Pending
from speclocal.core.prefix import shared_prefix
from speclocal.core.tree import DraftTree
from speclocal.errors import ContextError

CHUNK = 256
"""Prompt tokens per pass: bounds the memory of activations and masks."""
CLEAR = 256
"""Tokens between two returns of unused buffers to the system: passes of many widths leave many sizes behind."""


class MlxTarget:
    """Implements `core.interfaces.Target` over a model of mlx-lm that `loading.wrap` has prepared.

    cache:   as many layers as the model has caches.
    context: most positions it may use.
    taps:    see `tap`.

    All work belongs to the thread that made it and to MLX's default stream.
    """

    def __init__(self, model: Any, cache: TreeCache, context: int, taps: Sequence[int] = ()):
        self.model, self.cache, self.context = model, cache, context
        self.trees = True
        self.device = mx.default_device().type.name
        self.ops = make_ops()
        self._thread = get_ident()
        self._cached: list[int] = []
        self._tree = DraftTree.chain(0)
        self._scored = 0
        self._since_clear = 0
        self._logits: mx.array | None = None
        self._anatomy = Anatomy(model)
        self._scale: mx.array | float = 1.0
        self._taps = Taps(self._anatomy, (0,) if self._anatomy.embedding is not None else ())
        self.facts = TargetFacts(0, 0, 0)
        self.vocab, self.dtype = self._look()
        self._taps.remove()
        self._taps = Taps(self._anatomy, taps)

    def _look(self) -> tuple[int, str]:
        """Width and number type of the logits, from a pass of which only the embedding is computed."""
        self.cache.open([self._tree])
        logits = self.model(mx.array([[1]]), cache=self.cache.layers)
        self.cache.clear()
        if (scaled := self._taps.take()) is not None:
            # Some classes scale what they look up.
            plain = self._anatomy.embedding(mx.array([1]))
            self._scale = (scaled[:, 0] * plain).sum() / mx.maximum((plain * plain).sum(), 1e-20)
            rows, hidden = self._anatomy.embedding.weight.shape[0], scaled.shape[-1]
            self.facts = TargetFacts(len(self._anatomy.layers), hidden, rows, self.context)
        return logits.shape[-1], str(logits.dtype).removeprefix("mlx.core.")

    def tap(self, points: Sequence[int]) -> None:
        """See Target."""
        if tuple(points) != self._taps.points:
            self._taps.remove()
            self._taps = Taps(self._anatomy, points)
            self.prefill([])

    def embed(self, tokens: mx.array) -> mx.array:
        """See Target."""
        found = self._anatomy.embedding(tokens)
        return (found * self._scale).astype(found.dtype)

    def unembed(self, hidden: mx.array) -> mx.array:
        """See Target."""
        return self._anatomy.unembed(hidden)

    @property
    def cached(self) -> Sequence[int]:
        """Committed token ids whose keys and values are in the cache."""
        return self._cached

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> Scores:
        """See Target. Taps cover the tokens that were not in the cache already."""
        if len(tokens) > self.context:
            raise ContextError(
                "the text is longer than the context", got=f"{len(tokens)} tokens", expected=f"at most {self.context}"
            )
        if len(self._cached) != self.cache.length:
            self._cached.clear()  # a commit was interrupted: what the cache holds is not known
        same = shared_prefix(tokens, self._cached)
        if self._taps.points:
            same = max(same - 1, 0)
        self.cache.truncate(same)
        del self._cached[same:]
        self._scored = 0
        self.cache.reserve(min(len(tokens) + CHUNK, self.context))
        taps = []
        for first in range(same, len(tokens), CHUNK):
            chunk = tokens[first : first + CHUNK]
            held = self._run(DraftTree.chain(chunk[0], chunk[1:]), 0).taps
            self._logits = None
            # What nobody asks for is not computed: neither logits nor, without taps, the end of the last layer.
            mx.eval(self.cache.arrays, [] if held is None else [held])
            taps.append(held)
            self.commit(range(1, len(chunk)))
            if progress:
                progress(first + len(chunk))
        return Scores(taps=mx.concatenate(taps) if self._taps.points and taps else None)

    def score(self, tree: DraftTree, start: int = 0) -> Scores:
        """See Target. The pass is only described; reading a value, or `Ops.submit`, starts it."""
        if start not in (0, self._scored):
            raise ValueError(f"nodes before {start} must be scored first, only {self._scored} are")
        return self._run(tree, start)

    def _run(self, tree: DraftTree, start: int) -> Scores:
        if get_ident() != self._thread:
            raise RuntimeError("MLX work belongs to the thread that loaded the model")
        tokens = tree.tokens.array if isinstance(tree.tokens, Pending) else mx.array(list(tree.tokens))
        if start and self._logits is not None:
            # Two passes in one graph would copy the buffers: the first one is still to be read when the next writes.
            mx.async_eval(self._logits)
        self.cache.open([tree], start)
        self._taps.clear()
        out = self.model(tokens[None, start:], cache=self.cache.layers)
        self._tree, self._scored, self._logits = tree, len(tree), out[0].astype(mx.float32)
        return Scores(self._logits, self._taps.take())

    def commit(self, path: Sequence[int]) -> None:
        """See Target."""
        if self._scored <= max(path, default=0):
            raise ValueError(f"node {max(path, default=0)} was not scored, only {self._scored} nodes are")
        self.cache.commit([path])
        self._cached.append(self._tree.tokens[0])
        self._cached.extend(self._tree.tokens[i] for i in path)
        self._scored, self._logits = 0, None
        self._since_clear += 1 + len(path)
        if self._since_clear >= CLEAR:
            self._since_clear = 0
            mx.clear_cache()
