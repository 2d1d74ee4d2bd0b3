"""The golden toy laws, and how a drafted tree of them becomes arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from speclocal.core.interfaces import Ops
from speclocal.core.tree import DraftTree
from tests.conftest import golden
from tests.core.exact import Prefix, Table, nested, prefixes
from tests.toys import double, fractions

SIBLINGS = {"iid": "iid", "wor": "without-replacement", "topk": "one-hot"}
ROOT = 9
"""Token of the root: no toy law looks at it."""


def table(rows: Mapping[str, Sequence[str]]) -> dict[Prefix, list[float]]:
    """`"0,2": ["1/2", ...]` -> {(0, 2): [0.5, ...]}."""
    return {prefix(key): fractions(row) for key, row in rows.items()}


def prefix(key: str) -> Prefix:
    return tuple(map(int, key.split(","))) if key else ()


def instances() -> dict[str, tuple[Table, Table]]:
    """Name -> target law p and draft law q, functions of the prefix."""
    read = golden("tables")["instances"]
    return {name: (table(both["p"]).__getitem__, table(both["q"]).__getitem__) for name, both in read.items()}


def drafted(ops: Ops, branches: Sequence[Any], q: Table, siblings: str) -> DraftTree:
    """`[[token, children], ...]` as a draft with its law."""
    tokens, parents = nested(branches)
    tree = DraftTree((ROOT, *tokens), (-1, *parents))
    if siblings == "one-hot":
        return tree
    return DraftTree(tree.tokens, tree.parents, double(ops, rows(q, tree)), siblings)


def rows(law: Table, tree: DraftTree) -> list[Sequence[float]]:
    """A law at every node; where the table ends (below the deepest leaves) the law of the root stands in."""
    out = []
    for path in prefixes(tree):
        try:
            out.append(law(path))
        except KeyError:
            out.append(law(()))
    return out


def logs(row: Sequence[float]) -> list[float]:
    """Log-probabilities."""
    return [math.log(x) if x else -math.inf for x in row]


def golden_law(round: Sequence[Any]) -> dict[tuple[Prefix, int], float]:
    """`[[emitted, accepted, probability], ...]` as a law."""
    return {(tuple(tokens), kept): chance for tokens, kept, chance in round}
