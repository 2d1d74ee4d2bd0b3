"""A drafter that follows a script, for tests: what is proposed, and so what is accepted, is decided by the tester."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speclocal.core.interfaces import Acceptance, Limit, Scores
from speclocal.core.sampling import Sampler
from speclocal.core.tree import DraftTree, TreeBuilder
from speclocal.errors import UsageError

Plan = Callable[[Sequence[int], Limit], Sequence[Sequence[int]]]
"""(committed tokens, limit) -> paths of drafted tokens below the last one."""


@dataclass(frozen=True)
class Settings:
    """preset: `oracle` proposes the known continuation, `wrong` never proposes it, `mixed` does so every other round.

    text:  token ids of the whole text (prompt and answer) that `oracle` knows, comma-separated on the command line.
    depth: length of a draft.  width: siblings under each node of the right path; the right one comes last.
    vocab: ids are drawn below this number to make wrong siblings.
    """

    preset: str = "oracle"
    text: tuple[int, ...] = ()
    depth: int = 4
    width: int = 1
    vocab: int = 2

    def __post_init__(self) -> None:
        if self.preset not in ("oracle", "wrong", "mixed"):
            raise UsageError(
                "unknown preset of the scripted drafter", got=self.preset, expected="oracle, wrong or mixed"
            )


class Drafter:
    """Proposes what `plan` returns, cut to the limit."""

    name = "scripted"

    def __init__(self, settings: Settings = Settings(), plan: Plan | None = None):
        self._settings = settings
        self._plan = plan or self._preset
        self._tokens: list[int] = []
        self._round = 0
        self.limit = Limit(settings.depth, settings.depth * settings.width) if plan is None else Limit(1000, 1000)

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._tokens = list(tokens)
        self._round = 0

    def draft(self, limit: Limit) -> DraftTree:
        tree = TreeBuilder(self._tokens[-1])
        if limit.depth > 0:
            for path in self._plan(self._tokens, limit):
                tree.add(path[: limit.depth], limit.nodes + 1)
        self._round += 1
        return tree.build()

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        self._tokens.extend(taken.tokens(tree))

    def _preset(self, tokens: Sequence[int], limit: Limit) -> list[list[int]]:
        s, done = self._settings, len(tokens)
        right = list(s.text[done : done + s.depth])
        wrong = s.preset == "wrong" or (s.preset == "mixed" and self._round % 2 == 1)
        if wrong:
            return [[(t + 1) % s.vocab for t in right]]
        siblings = [[*right[:d], (right[d] + 1 + w) % s.vocab] for d in range(len(right)) for w in range(s.width - 1)]
        return [*siblings, right]
