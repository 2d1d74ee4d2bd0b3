"""The walk: outcome of a rule -> Acceptance. Plain Python over host numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from speclocal.core.interfaces import Acceptance, Origin
from speclocal.core.tree import DraftTree


def _end(tree: DraftTree, path: list[int], token: int) -> Acceptance:
    node = path[-1] if path else 0
    if len(tree) == 1:
        origin = Origin.PLAIN
    else:
        origin = Origin.RECOVERED if tree.children[node] else Origin.BONUS
    return Acceptance(tuple(path), token, origin)


def follow(tree: DraftTree, drawn: Sequence[int]) -> Acceptance:
    """Walk down while the token the target drew at the current node is among its children."""
    node, path = 0, []
    while True:
        for child in tree.children[node]:
            if tree.tokens[child] == drawn[node]:
                path.append(child)
                node = child
                break
        else:
            return _end(tree, path, drawn[node])


def try_children(tree: DraftTree, survives: Callable[[int, int], bool], last: Sequence[int]) -> Acceptance:
    """Walk down the first child of each node that survives; where none does, the node's `last` token ends the round.

    survives: (node, rank among its siblings) -> bool.
    """
    node, path = 0, []
    while True:
        for rank, child in enumerate(tree.children[node]):
            if survives(child, rank):
                path.append(child)
                node = child
                break
        else:
            return _end(tree, path, last[node])


def longest(tree: DraftTree, succeeds: Sequence[bool], last: Sequence[int]) -> Acceptance:
    """Keep the longest prefix of a chain whose test succeeds (a failure does not veto a longer success)."""
    kept = max((i for i, ok in enumerate(succeeds) if ok), default=0)
    return _end(tree, list(range(1, kept + 1)), last[kept])


def deepest(tree: DraftTree, chances: Sequence[float], limits: Sequence[float], last: Sequence[int]) -> Acceptance:
    """Keep the longest path of nodes whose chance is above their limit; of equally long ones the likeliest."""
    kept = {0: (0, 0.0)}  # node → length and log-probability of its path
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent in kept and chances[node] > limits[node]:
            length, likelihood = kept[parent]
            kept[node] = length + 1, likelihood + math.log(chances[node])
    best = max(kept, key=lambda node: kept[node])
    return _end(tree, list(tree.path(best)), last[best])
