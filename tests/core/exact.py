"""Exact laws: enumerate what the project's rules and walk do, instead of sampling it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from speclocal.core import accept, verify
from speclocal.core.interfaces import Acceptance, Ops
from speclocal.core.tree import DraftTree

T = TypeVar("T")
Choose = Callable[[Sequence[float]], int]
"""Weights -> index, drawn with these probabilities."""
Prefix = tuple[int, ...]
Law = dict[Prefix, float]
Table = Callable[[Prefix], Sequence[float]]
"""Prefix -> probabilities of the next token."""
Outcome = tuple[Acceptance, float]


def outcomes(play: Callable[[Choose], T]) -> Iterator[tuple[T, float]]:
    """Every result of a function that makes random choices, with its probability: replays it once per outcome."""
    pending: list[tuple[int, ...]] = [()]
    while pending:
        script = pending.pop()
        trail: list[int] = []
        chance = 1.0

        def choose(weights: Sequence[float], script: tuple[int, ...] = script, trail: list[int] = trail) -> int:
            nonlocal chance
            possible = [i for i, w in enumerate(weights) if w > 0]
            step = len(trail)
            pick = script[step] if step < len(script) else possible[0]
            if step >= len(script):
                pending.extend((*trail, other) for other in possible[1:])
            trail.append(pick)
            chance *= weights[pick]
            return pick

        result = play(choose)
        yield result, chance


class Drawn(Sequence[int]):
    """One token per node, drawn when the walk asks for it."""

    def __init__(self, choose: Choose, laws: Sequence[Sequence[float]]):
        self._choose, self._laws = choose, laws
        self._made: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._laws)

    def __getitem__(self, node: Any) -> Any:
        if node not in self._made:
            self._made[node] = self._choose(self._laws[node])
        return self._made[node]


def below(q: float, p: float) -> float:
    """P(u * q < p) for uniform u in [0, 1)."""
    return 1.0 if p > 0 and q <= p else p / q if p > 0 else 0.0


def rejection_round(ops: Ops, p: Any, tree: DraftTree) -> list[Outcome]:
    """The law of a round under recursive rejection, for one drafted tree."""
    keep_p, keep_q, left = ops.to_host(*verify.odds(ops, p, tree))

    def play(choose: Choose) -> Acceptance:
        def survives(node: int, rank: int) -> bool:
            parent = tree.parents[node]
            chance = below(keep_q[rank][parent], keep_p[rank][parent])
            return choose((1 - chance, chance)) == 1

        return accept.try_children(tree, survives, Drawn(choose, left))

    return list(outcomes(play))


def block_round(ops: Ops, p: Any, tree: DraftTree) -> list[Outcome]:
    """The law of a round under block verification."""
    thresholds, left = ops.to_host(*verify.block_thresholds(ops, p, tree))

    def play(choose: Choose) -> Acceptance:
        passed = [choose((1 - min(t, 1.0), t)) == 1 for t in thresholds]
        return accept.longest(tree, passed, Drawn(choose, left))

    return list(outcomes(play))


def walk_round(ops: Ops, p: Any, tree: DraftTree) -> list[Outcome]:
    """The law of a round in which the target draws its own token at every node, whatever the tree."""
    (laws,) = ops.to_host(p)
    return list(outcomes(lambda choose: accept.follow(tree, Drawn(choose, laws))))


ROUNDS = {"rejection": rejection_round, "block": block_round, "walk": walk_round}


def law_of(round: Iterable[Outcome], tree: DraftTree, weight: float = 1.0) -> dict[tuple[Prefix, int], float]:
    """{(emitted tokens, accepted count): probability}."""
    law: dict[tuple[Prefix, int], float] = defaultdict(float)
    for taken, chance in round:
        law[taken.tokens(tree), len(taken.path)] += weight * chance
    return law


def continued(law: Mapping[tuple[Prefix, int], float], plain: Table, length: int) -> Law:
    """Law of the first `length` tokens if a round is followed by plain sampling."""
    out: Law = defaultdict(float)
    for (emitted, _), chance in law.items():
        for rest, more in plainly(plain, emitted, length - len(emitted)):
            out[(*emitted, *rest)[:length]] += chance * more
    return out


def plainly(plain: Table, prefix: Prefix, length: int) -> Iterator[tuple[Prefix, float]]:
    """Continuations of plain sampling with their probabilities."""
    if length <= 0:
        yield (), 1.0
        return
    for token, chance in enumerate(plain(prefix)):
        if chance > 0:
            for rest, more in plainly(plain, (*prefix, token), length - 1):
                yield (token, *rest), chance * more


def difference(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """Largest absolute difference of two laws."""
    return max(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b})


def distance(a: Mapping[Any, float], b: Mapping[Any, float]) -> float:
    """Total variation."""
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b}) / 2


def nested(tree: Sequence[Any]) -> tuple[list[int], list[int]]:
    """`[[token, children], ...]` -> tokens and parents of the nodes below the root, breadth-first."""
    tokens, parents, queue = [], [], [(0, tree)]
    while queue:
        parent, children = queue.pop(0)
        for token, below in children:
            tokens.append(token)
            parents.append(parent)
            queue.append((len(tokens), below))
    return tokens, parents


def draft_tuples(q: Sequence[float], count: int, siblings: str) -> Iterator[tuple[Prefix, float]]:
    """Every way to draw the children of one node, with its probability; `one-hot`: the best, ties to the lower id."""
    if siblings == "one-hot":
        yield tuple(sorted(range(len(q)), key=lambda t: (-q[t], t))[:count]), 1.0
    elif siblings == "iid":
        for tokens in itertools.product([t for t, w in enumerate(q) if w > 0], repeat=count):
            chance = 1.0
            for t in tokens:
                chance *= q[t]
            yield tokens, chance
    else:
        support = [t for t, w in enumerate(q) if w > 0]
        for tokens in itertools.permutations(support, min(count, len(support))):
            chance, left = 1.0, set(support)
            for t in tokens:
                chance *= q[t] / sum(q[x] for x in left)
                left.remove(t)
            yield tokens, chance


def drafts(q: Table, shape: Any, siblings: str, prefix: Prefix = ()) -> Iterator[tuple[list[Any], float]]:
    """Every drafted tree of a shape below a prefix as `[[token, children], ...]`, with its probability."""
    if not shape:
        yield [], 1.0
        return
    for tokens, chance in draft_tuples(q(prefix), len(shape), siblings):
        branches = [list(drafts(q, s, siblings, (*prefix, t))) for s, t in zip(shape, tokens, strict=False)]
        for combination in itertools.product(*branches):
            weight = chance
            for _, more in combination:
                weight *= more
            yield [[t, subtree] for t, (subtree, _) in zip(tokens, combination, strict=True)], weight


def prefixes(tree: DraftTree) -> list[Prefix]:
    """Drafted tokens on the way to each node."""
    return [tuple(tree.tokens[i] for i in tree.path(n)) for n in range(len(tree))]
