"""When a text ends: end token, stop string, token limit. Asked token by token, inside an accepted path."""

from __future__ import annotations

from collections.abc import Callable, Collection

from speclocal.core.interfaces import Acceptance, Origin
from speclocal.core.tree import DraftTree


class Stop:
    """Counts emitted tokens and cuts a round at the first reason to end.

    end_ids:    tokens that end the text (they are emitted, as its last token).
    max_tokens: most tokens to emit.
    matches:    told every token; True once the text holds a stop string. The next pass waits for it.
    """

    def __init__(
        self, max_tokens: int, end_ids: Collection[int] = (), matches: Callable[[int], bool] = lambda token: False
    ):
        self.left = max_tokens
        self._end_ids = end_ids
        self._matches = matches

    def cut(self, taken: Acceptance, tree: DraftTree) -> tuple[Acceptance, str | None]:
        """The part of a round that is emitted, and why the text ends there (`stop`, `length`) or None."""
        tokens = taken.tokens(tree)
        for i, token in enumerate(tokens):
            self.left -= 1
            # The matcher sees every emitted token, the last one included, so that text and ids agree.
            matched = self._matches(token)
            reason = "stop" if token in self._end_ids or matched else "length" if not self.left else None
            if reason:
                if i < len(taken.path):
                    # The last emitted token is a drafted one: it stays out of the cache, as the last token always does.
                    taken = Acceptance(taken.path[:i], token, Origin.ACCEPTED)
                return taken, reason
        return taken, None
