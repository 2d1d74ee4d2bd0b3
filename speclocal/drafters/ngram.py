"""Prompt lookup: what followed the same words earlier in the prompt or the answer is proposed again.

The longest suffix of the text that occurred before says what may follow, and shorter suffixes say what else; the best
continuations by estimated probability become a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from speclocal.core.interfaces import Acceptance, Limit, Scores
from speclocal.core.sampling import Sampler
from speclocal.core.tree import DraftTree, TreeBuilder
from speclocal.drafters import MOST_NODES, check_share, check_whole
from speclocal.drafters.suffix import SuffixAutomaton

BINS = 12
"""Match lengths from here on share one estimate of how often their continuation is right."""
PRIOR = (0.3, 4.0)
"""Expected hit rate of a match and how many observations that belief is worth."""
SUFFIXES = 3
"""How many suffixes of different length may propose a first token."""


@dataclass(frozen=True)
class Settings:
    """min, max: shortest and longest suffix looked up, in tokens.

    depth: longest path.  nodes: most drafted tokens a round.  topk: most continuations of one node (1: a chain).
    confidence: a token is proposed while its path is estimated to be kept with at least this probability.
    """

    min: int = 1
    max: int = 64
    depth: int = 15
    nodes: int = 15
    topk: int = 4
    confidence: float = 0.04

    def __post_init__(self) -> None:
        check_whole("max", self.max, 1, 1_000_000)
        check_whole("min", self.min, 1, self.max)
        check_whole("depth", self.depth, 0, MOST_NODES)
        check_whole("nodes", self.nodes, 0, MOST_NODES)
        check_whole("topk", self.topk, 1, MOST_NODES)
        check_share("confidence", self.confidence)


@dataclass(frozen=True)
class _Candidate:
    """A continuation that could be added: `token` under `parent`; `state` and `match` are where it leads."""

    parent: int
    token: int
    state: int
    match: int
    depth: int


class Drafter:
    """Looks up suffixes of prompt and answer.

    expected: how many tokens of the last draft are estimated to be kept.
    """

    name = "ngram"

    def __init__(self, settings: Settings = Settings()):
        self.settings = settings
        self.limit = Limit(settings.depth, settings.nodes)
        self._text = SuffixAutomaton()
        self._tokens: list[int] = []
        prior = PRIOR[0] * PRIOR[1]
        self._hits = [prior + 0.05 * PRIOR[1] * min(b, 8) for b in range(BINS + 1)]
        self._tries = [PRIOR[1]] * (BINS + 1)
        self._match: list[int] = []
        self._tree = DraftTree.chain(0)
        self.expected = 0.0

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        if list(tokens[: len(self._tokens)]) != self._tokens:
            self._text, self._tokens = SuffixAutomaton(), []
        self._extend(tokens[len(self._tokens) :])

    def _extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._text.append(token)
        self._tokens.extend(tokens)

    def draft(self, limit: Limit) -> DraftTree:
        tree = TreeBuilder(self._tokens[-1])
        self._match, self.expected = [0], 0.0
        if limit.depth > 0 and limit.nodes > 0:
            self._grow(tree, limit)
        self._tree = tree.build()
        return self._tree

    def _grow(self, tree: TreeBuilder, limit: Limit) -> None:
        """Add the likeliest continuations, best first."""
        order = count()  # of two equals the one found first wins
        heap = [(-probability, next(order), candidate) for probability, candidate in self._first()]
        heapq.heapify(heap)
        while heap and len(tree) <= limit.nodes:
            negative, _, best = heapq.heappop(heap)
            if -negative < self.settings.confidence:
                break
            node = tree.child(best.parent, best.token)
            self._match.append(best.match)
            self.expected -= negative
            if best.depth < limit.depth:
                for share, token, state in self._onward(best.state):
                    p = -negative * share * self._rate(best.match)
                    onward = _Candidate(node, token, state, best.match + 1, best.depth + 1)
                    heapq.heappush(heap, (-p, next(order), onward))

    def _first(self) -> list[tuple[float, _Candidate]]:
        """Continuations of the text itself: by the longest suffix, and with what is left over by shorter ones."""
        s, left = self.settings, 1.0
        out: list[tuple[float, _Candidate]] = []
        proposed: set[int] = set()
        for state in self._text.matches(SUFFIXES):
            match = min(self._text.length[state], s.max)
            if match < s.min:
                break
            rate = self._rate(match)
            for share, token, onward in self._onward(state):
                # A shorter suffix is no second witness for what a longer one proposes already.
                if token not in proposed:
                    proposed.add(token)
                    out.append((left * rate * share, _Candidate(0, token, onward, match + 1, 1)))
            if not self._match[0]:
                self._match[0] = match
            left *= 1 - rate
            if s.topk == 1:
                break
        return out

    def _onward(self, state: int) -> list[tuple[float, int, int]]:
        """(share, token, state) of the commonest continuations of a state, the most recent first among equals."""
        text = self._text
        onward = text.next[state]
        if len(onward) == 1:
            ((token, following),) = onward.items()
            return [(1.0, token, following)]
        best = heapq.nlargest(
            self.settings.topk, onward.items(), key=lambda item: (text.count[item[1]], text.last[item[1]])
        )
        total = sum(text.count[following] for following in onward.values()) or 1
        return [(text.count[following] / total, token, following) for token, following in best]

    def _rate(self, match: int) -> float:
        """How often the continuation of a match of that length was the right one."""
        b = min(match, BINS)
        return self._hits[b] / self._tries[b]

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        """Learn from what followed how good the last draft was, also where another one was checked in its place."""
        tokens, node = taken.tokens(tree), 0
        for token in tokens:
            children = self._tree.children[node]
            if not children:
                break
            b = min(self._match[node], BINS)
            node = next((child for child in children if self._tree.tokens[child] == token), 0)
            self._tries[b] = 0.97 * self._tries[b] + 1
            self._hits[b] = 0.97 * self._hits[b] + (node > 0)
            if not node:
                break
        self._extend(tokens)
