"""A smaller model of the same tokenizer drafts: a chain with its real q, or a tree grown by path probability."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from speclocal.core.draft_law import fit
from speclocal.core.interfaces import Acceptance, Array, Limit, Scores, Target
from speclocal.core.pending import Pending
from speclocal.core.propose import propose
from speclocal.core.sampling import Law, Sampler
from speclocal.core.tree import DraftTree, Siblings
from speclocal.drafters import check_share, check_tree

CATCH_UP = 32
"""Tokens the draft model may be behind before they are processed as a prompt."""


@dataclass(frozen=True)
class Settings:
    """depth: longest path.  topk: children of an expanded node; 1 drafts a chain.  nodes: most drafted tokens a round.

    confidence: a path is not continued once the model gives it less than this probability (coupled rule only: under
    the others, looking at drawn tokens before deciding what to check would change the law). Without it a chain stays on
    the device; with it, and for trees, the host waits for every level.
    """

    depth: int = 4
    topk: int = 1
    nodes: int = 16
    confidence: float = 0.0

    def __post_init__(self) -> None:
        check_tree(self.depth, self.nodes, self.topk)
        check_share("confidence", self.confidence)


@dataclass
class _Growth:
    """A tree while it grows. Node 0 is the root; `score` is the log-probability of the path.

    fed: nodes the draft model has processed, in order; `place[node]` is their position in that order.
    q:   draft laws of the fed nodes, one array per pass.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    score: list[float] = field(default_factory=lambda: [0.0])
    fed: list[int] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)
    q: list[Array] = field(default_factory=list)

    def feed(self, nodes: Sequence[int]) -> DraftTree:
        """Note that `nodes` are processed next; the tree of all fed nodes."""
        for node in nodes:
            self.place[node] = len(self.fed)
            self.fed.append(node)
        return DraftTree(
            tuple(self.tokens[n] for n in self.fed),
            tuple(self.place[self.parents[n]] if n else -1 for n in self.fed),
        )


class Drafter:
    """Drives a `Target` as the draft model, with its own cache rolled back exactly."""

    name = "draft_model"

    def __init__(self, settings: Settings, model: Target, notify: Callable[[str], None] = lambda text: None):
        self.settings, self.model, self._notify = settings, model, notify
        self.limit = Limit(settings.depth, settings.nodes if settings.topk > 1 else settings.depth)
        self._topk = settings.topk if model.trees else 1
        self._tokens: list[int] = []
        self._lead = 0
        self._nodes: list[int] = []
        self._fed: Pending | None = None
        self._told = False

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._tokens, self._sampler = list(tokens), sampler
        if len(tokens) <= self.model.context:
            self.model.prefill(self._tokens[:-1])

    def draft(self, limit: Limit) -> DraftTree:
        self._lead, self._fed = 0, None
        # The last drafted token is not fed, so the deepest one that is stands at position len(tokens) + depth - 2.
        depth = min(limit.depth, self.model.context - len(self._tokens) + 1)
        if depth <= 0 and limit.depth > 0 and not self._told:
            self._told = True
            self._notify(
                f"the draft model's context of {self.model.context} tokens is full at {len(self._tokens)}: "
                "decoding goes on without drafts"
            )
        if depth <= 0 or limit.nodes <= 0:
            return DraftTree.chain(self._tokens[-1])
        if len(self._tokens) - len(self.model.cached) > CATCH_UP:
            self.model.prefill(self._tokens[:-1])
        lead = self._tokens[len(self.model.cached) :]
        self._lead = len(lead)
        if self._topk == 1 and not (self.settings.confidence and self._deterministic):
            return self._chain(lead, min(depth, limit.nodes))
        growth = _Growth([lead[-1]])
        frontier = [0]
        for level in range(depth):
            laws = self._laws(growth, frontier, lead)
            frontier = self._expand(growth, frontier, laws, level, limit.nodes)
            if not frontier or level == depth - 1:
                break
        return self._select(growth, limit.nodes)

    def _chain(self, lead: Sequence[int], depth: int) -> DraftTree:
        """The best path, from the model's output to its next input on the device: no id is looked at here.

        lead: the tokens the model is behind by; the last of them is the root.
        """
        sampler, ops = self._sampler, self._sampler.ops
        tokens, root = ops.array(list(lead)), len(lead) - 1
        q: list[Array] = []
        for level in range(depth):
            self._fed = Pending(ops, tokens, None if level else lead)
            logits = self.model.score(_path(self._fed), root + level if level else 0).logits[-1:]
            law = sampler.law(fit(sampler, logits), _path(Pending(ops, tokens[root:])), level)
            # The best of a law is always possible, so that nobody has to look whether there is one.
            _, best, _ = propose(sampler, law, level, 1)
            tokens = ops.xp.concat([tokens, best[0]])
            if ops.submit:
                ops.submit(tokens)
            if not self._deterministic:
                q.append(sampler.probabilities(law))
        self._nodes = [*range(depth), -1]
        drafted = Pending(ops, tokens[root:])
        if self._deterministic:
            return _path(drafted)
        return _path(drafted, ops.xp.concat([*q, q[-1]]), "iid")

    def _laws(self, growth: _Growth, frontier: Sequence[int], lead: Sequence[int]) -> Law:
        """Feed the frontier to the model; its processed laws, in the target's vocabulary."""
        start = len(growth.fed)
        fed = growth.feed(frontier)
        # The model sees the tokens it is behind by as a chain above the root.
        extra = len(lead) - 1
        tree = DraftTree(
            (*lead[:-1], *fed.tokens),
            (*range(-1, extra - 1), *(p + extra if p >= 0 else extra - 1 for p in fed.parents)),
        )
        scores = self.model.score(tree, start + extra if start else 0)
        logits = fit(self._sampler, scores.logits[-len(frontier) :])
        return self._sampler.law(logits, fed, start)

    def _expand(self, growth: _Growth, frontier: list[int], laws: Law, level: int, nodes: int) -> list[int]:
        """Add the children of the frontier; returns those that are fed next."""
        sampler = self._sampler
        best, ids, total = sampler.ops.to_host(*propose(sampler, laws, level, self._topk))
        if not self._deterministic:
            growth.q.append(sampler.probabilities(laws))
        added = []
        for row, node in enumerate(frontier):
            for value, token in zip(best[row], ids[row], strict=True):
                if value == -math.inf or (not self._deterministic and len(growth.tokens) > nodes):
                    continue
                added.append(len(growth.tokens))
                growth.tokens.append(token)
                growth.parents.append(node)
                growth.score.append(growth.score[node] + min(value - total[row], 0.0))
        if not self._deterministic:
            return added
        least = math.log(self.settings.confidence) if self.settings.confidence else -math.inf
        promising = sorted((n for n in added if growth.score[n] >= least), key=lambda n: -growth.score[n])
        return sorted(promising[: self._topk])

    @property
    def _deterministic(self) -> bool:
        """Whether the drafts are a function of the text and of noise that verification may share.

        Then nodes may be chosen by the tokens drawn, and no q is needed. If not, the shape is fixed: breadth first.
        """
        return self._sampler.rule == "coupled" or self._sampler.sampling.greedy

    def _select(self, growth: _Growth, nodes: int) -> DraftTree:
        """The `nodes` best paths as a tree to check."""
        drawn = list(range(1, len(growth.tokens)))
        if self._deterministic:
            drawn = sorted(sorted(drawn, key=lambda n: (-growth.score[n], n))[:nodes])
        chosen = [0, *drawn]
        number = {node: i for i, node in enumerate(chosen)}
        self._nodes = [growth.place.get(node, -1) for node in chosen]
        tokens = tuple(growth.tokens[n] for n in chosen)
        parents = tuple(number[growth.parents[n]] if n else -1 for n in chosen)
        if self._deterministic:
            return DraftTree(tokens, parents)
        ops = self._sampler.ops
        q = ops.xp.concat(growth.q)
        q = q[ops.array([max(place, 0) for place in self._nodes])]
        return DraftTree(tokens, parents, q, "without-replacement" if self._topk > 1 else "iid")

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        if self._lead:
            if self._fed is not None:
                # What was fed has come to the host as part of the tree that was checked.
                self._fed.settle((*self._tokens[-self._lead :], *tree.tokens[1:])[: len(self._fed)])
            kept = [self._nodes[i] for i in taken.path if self._nodes[i] > 0]
            self.model.commit([*range(1, self._lead), *(place + self._lead - 1 for place in kept)])
        self._tokens.extend(taken.tokens(tree))


def _path(tokens: Pending, q: Array = None, siblings: Siblings = "one-hot") -> DraftTree:
    """A chain of which the first token is the root."""
    return DraftTree(tokens, tuple(range(-1, len(tokens) - 1)), q, siblings)
