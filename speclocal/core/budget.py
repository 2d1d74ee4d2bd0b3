"""How much to draft in the next round."""

from __future__ import annotations

from speclocal.core.interfaces import Acceptance, Limit
from speclocal.core.tree import DraftTree


class Budget:
    """The drafter's own limits, with a back-off: after rounds that accept nothing, drafting pauses for a while.

    The decision uses only rounds that are over, so it cannot change the law of the output.

    limit:   the most a round may draft.
    misses:  drafted rounds in a row without an accepted token before the first pause; 0 never pauses.
    pause:   rounds of the first pause; doubled after each further miss, up to `longest`.
    """

    def __init__(self, limit: Limit, misses: int = 0, pause: int = 2, longest: int = 32):
        self.limit = limit
        self._allowed, self._first, self._longest = misses, pause, longest
        self._missed, self._pause, self._resting = 0, pause, 0

    def now(self, left: int) -> Limit:
        """Limit of the next round, with `left` tokens still to emit: the target adds one itself."""
        if self._resting:
            self._resting -= 1
            return Limit(0, 0)
        return Limit(min(self.limit.depth, left - 1), self.limit.nodes if left > 1 else 0)

    def learn(self, tree: DraftTree, taken: Acceptance) -> None:
        """A round ended."""
        if len(tree) == 1 or not self._allowed:
            return
        if taken.path:
            self._missed, self._pause = 0, self._first
            return
        self._missed += 1
        if self._missed >= self._allowed:
            self._resting = self._pause
            self._pause = min(2 * self._pause, self._longest)
