"""What the targets of all backends share: which tokens are cached, prompts in chunks, what a commit needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from speclocal.core.interfaces import Array, Ops, Scores
from speclocal.core.prefix import shared_prefix
from speclocal.core.tree import DraftTree
from speclocal.errors import ContextError

CHUNK = 256
"""Prompt tokens per pass: bounds the memory of activations and masks."""


class CachedTarget:
    """Base of `core.interfaces.Target`s. A backend brings `run`, `read_prompt` and a cache.

    cache: has `length`, `reserve(slots)`, `truncate(length)` and `commit(path)` for one text.
    """

    ops: Ops
    cache: Any
    context: int
    points: tuple[int, ...] = ()
    """What is tapped; see `Target.tap`."""

    def __init__(self) -> None:
        self._cached: list[int] = []
        self._tree = DraftTree.chain(0)
        self._scored = 0

    @property
    def cached(self) -> Sequence[int]:
        """Committed token ids whose keys and values are in the cache."""
        return self._cached

    def run(self, tree: DraftTree, start: int) -> Scores:
        """One pass of the model over the nodes from `start` on."""
        raise NotImplementedError

    def read_prompt(self, tree: DraftTree) -> Array:
        """One pass over a piece of a prompt, of which only taps are wanted; they are returned, None without."""
        raise NotImplementedError

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> Scores:
        """See Target."""
        if len(tokens) > self.context:
            raise ContextError(
                "the text is longer than the context", got=f"{len(tokens)} tokens", expected=f"at most {self.context}"
            )
        if len(self._cached) != self.cache.length:
            self._cached.clear()  # a commit was interrupted: what the cache holds is not known
        same = shared_prefix(tokens, self._cached)
        if self.points:
            same = max(same - 1, 0)
        self.cache.truncate(same)
        del self._cached[same:]
        self._scored = 0
        self.cache.reserve(min(len(tokens) + CHUNK, self.context))
        taps = []
        for first in range(same, len(tokens), CHUNK):
            chunk = tokens[first : first + CHUNK]
            tree = DraftTree.chain(chunk[0], chunk[1:])
            taps.append(self.read_prompt(tree))
            self._tree, self._scored = tree, len(tree)
            self.commit(range(1, len(chunk)))
            if progress:
                progress(first + len(chunk))
        return Scores(taps=self.ops.xp.concat(taps) if self.points and taps else None)

    def score(self, tree: DraftTree, start: int = 0) -> Scores:
        """See Target."""
        if start not in (0, self._scored):
            raise ValueError(f"nodes before {start} must be scored first, only {self._scored} are")
        scores = self.run(tree, start)
        self._tree, self._scored = tree, len(tree)
        return scores

    def commit(self, path: Sequence[int]) -> None:
        """See Target."""
        if self._scored <= max(path, default=0):
            raise ValueError(f"node {max(path, default=0)} was not scored, only {self._scored} nodes are")
        self.cache.commit(path)
        self._cached.append(self._tree.tokens[0])
        self._cached.extend(self._tree.tokens[i] for i in path)
        self._scored = 0
