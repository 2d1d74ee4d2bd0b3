"""No drafts: plain decoding, the same loop over trees of one node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speclocal.core.interfaces import Acceptance, Limit, Scores
from speclocal.core.sampling import Sampler
from speclocal.core.tree import DraftTree


@dataclass(frozen=True)
class Settings:
    """Nothing to set."""


class Drafter:
    """Proposes nothing."""

    name = "none"

    def __init__(self, settings: Settings = Settings()):
        self.limit = Limit(0, 0)
        self._root = 0

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._root = tokens[-1]

    def draft(self, limit: Limit) -> DraftTree:
        return DraftTree.chain(self._root)

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        self._root = taken.token
