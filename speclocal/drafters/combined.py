"""A head and a lookup in turns: what the text repeats is looked up, what it does not is guessed by the head.

A round is drafted by one of them. Which one depends on committed text alone, so a rule that is exact for both is exact
for their mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from speclocal.core import interfaces
from speclocal.core.interfaces import Acceptance, Limit, Scores
from speclocal.core.sampling import Sampler
from speclocal.core.tree import DraftTree
from speclocal.drafters import ngram, read_settings
from speclocal.errors import UsageError


@dataclass(frozen=True)
class Settings(ngram.Settings):
    """Those of the lookup, and when it is preferred.

    expect: the lookup drafts a round in which it expects to keep so many tokens or more; 0: whenever it finds some.
    """

    expect: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.expect, int | float) or not self.expect >= 0:
            raise UsageError("impossible expect", got=self.expect, expected="a number of tokens, 0 or more")


def split(head: type, lookup: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], Settings]:
    """Options of the head, and the lookup's settings from those that begin with its name: `ngram.depth`.

    head: the head's own `Settings`. UsageError for a setting of the lookup that is written without its name.
    """
    prefix, known = f"{lookup}.", {f.name for f in fields(head)}
    own = {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}
    rest = {name: value for name, value in options.items() if not name.startswith(prefix)}
    for name in {f.name for f in fields(Settings)} - known:
        if name in rest:
            raise UsageError(
                f"{name} is no setting of the head, but of the lookup", do=f"type -o {prefix}{name}={rest[name]}"
            )
    return rest, read_settings(Settings, lookup, own)


class Drafter:
    """Asks the lookup first, and the head where that expects too little. The head's context grows in every round."""

    def __init__(self, head: interfaces.Drafter, lookup: str, settings: Settings = Settings()):
        self.settings, self.name = settings, f"{head.name}+{lookup}"
        self._head, self._lookup = head, ngram.Drafter(settings)
        limits = head.limit, self._lookup.limit
        self.limit = Limit(max(each.depth for each in limits), max(each.nodes for each in limits))

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._head.begin(tokens, scores, sampler)
        self._lookup.begin(tokens, scores, sampler)

    def draft(self, limit: Limit) -> DraftTree:
        most = self._lookup.limit
        found = self._lookup.draft(Limit(min(limit.depth, most.depth), min(limit.nodes, most.nodes)))
        if len(found) > 1 and self._lookup.expected >= self.settings.expect:
            return found
        guessed = self._head.draft(limit)
        return guessed if len(guessed) > 1 else found

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        self._head.commit(tree, taken, scores)
        self._lookup.commit(tree, taken, scores)
