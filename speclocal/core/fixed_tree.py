"""Trees of a fixed shape: paths of ranks, where rank r is the r-th best child of its parent."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from speclocal.core.growth import Beam, Run
from speclocal.core.pending import Pending
from speclocal.core.tree import DraftTree
from speclocal.errors import UsageError

if TYPE_CHECKING:
    from speclocal.core.draft_law import DraftLaws
    from speclocal.core.interfaces import Array, Ops

Path = tuple[int, ...]


@dataclass(frozen=True)
class FixedTree:
    """paths: of all nodes below the root, shortest first, then in order of ranks; every prefix is among them."""

    paths: tuple[Path, ...]

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]]) -> FixedTree:
        """From paths in any order. UsageError for one whose beginning is missing or whose rank is impossible."""
        found = {tuple(path) for path in paths}
        for path in found:
            if not path or any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in path):
                raise UsageError("impossible path in a tree", got=list(path), expected="ranks from 0 up")
            if len(path) > 1 and path[:-1] not in found:
                raise UsageError("a tree lacks the beginning of a path", got=list(path), expected=str(list(path[:-1])))
        if not found:
            raise UsageError("a tree without paths", expected="a list of lists of ranks, such as [[0], [0, 0], [1]]")
        return cls(tuple(sorted(found, key=lambda path: (len(path), path))))

    @classmethod
    def read(cls, text: str) -> FixedTree:
        """From JSON, a list of lists of ranks."""
        try:
            paths = json.loads(text)
            return cls.of([list(path) for path in paths])
        except (ValueError, TypeError) as error:
            raise UsageError("a tree that is no JSON", got=text[:40], expected="[[0], [0, 0], [1]]") from error

    @classmethod
    def asked(cls, text: str, name: str, known: FixedTree, load: Callable[[str], str]) -> FixedTree | None:
        """The tree of a setting: `known` by its name, else from what `load` finds under the text; None for nothing."""
        if not text:
            return None
        if text == name:
            return known
        try:
            return cls.read(load(text))
        except OSError as error:
            raise UsageError("no such tree", got=repr(text), expected=f"{name}, or a JSON file with paths") from error

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """As in DraftTree, root included."""
        number = {(): 0} | {path: i for i, path in enumerate(self.paths, 1)}
        return (-1, *(number[path[:-1]] for path in self.paths))

    @cached_property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    @cached_property
    def width(self) -> int:
        """One more than the largest rank."""
        return 1 + max((rank for path in self.paths for rank in path), default=0)

    @lru_cache(maxsize=64)  # noqa: B019 (few trees, made once)
    def cut(self, depth: int, nodes: int) -> FixedTree:
        """The part that a round may draft."""
        return FixedTree(tuple(path for path in self.paths if len(path) <= depth)[:nodes])

    def level(self, depth: int) -> list[Path]:
        """Paths of one depth."""
        return [path for path in self.paths if len(path) == depth]

    @cached_property
    def expanded(self) -> tuple[tuple[Path, ...], ...]:
        """By depth, from 0: the nodes that have children. Only they are run."""
        inner = {path[:-1] for path in self.paths}
        return (((),), *(tuple(p for p in self.level(d) if p in inner) for d in range(1, self.depth)))


def run_fixed(laws: DraftLaws, tree: FixedTree, first: Array, run: Run) -> DraftTree:
    """Fill a fixed tree level by level. first: logits after the root, [1, Vd]."""
    ops = laws.sampler.ops
    _, ids = laws.pick(laws.law(first), 0, tree.width)
    tokens = []
    above: tuple[Path, ...] = ((),)
    fed: list[Path] = []
    for depth in range(1, tree.depth + 1):
        found = _take(ops, ids, above, tree.level(depth))
        tokens.append(found)
        if depth == tree.depth or not tree.expanded[depth]:
            continue
        now = tree.expanded[depth]
        rows = ops.array([above.index(path[:-1]) for path in now])
        own = ops.array([tree.level(depth).index(path) for path in now])
        fed += now
        seen = ops.array([[int(path[: len(other)] == other) for other in fed] for path in now])
        logits = run(Beam(found[own], rows, depth, seen))
        _, ids = laws.pick(laws.law(logits), depth, tree.width)
        above = now
    return _tree(laws, tree, tokens)


def fill_fixed(laws: DraftLaws, tree: FixedTree, rows: Array) -> DraftTree:
    """Fill a fixed tree from one row of logits a depth, [depths, Vd]: children do not depend on the path (Medusa)."""
    ops = laws.sampler.ops
    tokens = []
    for depth in range(1, tree.depth + 1):
        _, ids = laws.pick(laws.law(rows[depth - 1 : depth]), depth - 1, tree.width)
        tokens.append(ids[0][_ranks_of(ops, ids, tree.level(depth))])
    return _tree(laws, tree, tokens)


def _take(ops: Ops, ids: Array, above: Sequence[Path], paths: Sequence[Path]) -> Array:
    """Tokens of nodes: of their parent's row, the one of their rank."""
    return ids[ops.array([above.index(path[:-1]) for path in paths]), _ranks_of(ops, ids, paths)]


def _ranks_of(ops: Ops, ids: Array, paths: Sequence[Path]) -> Array:
    """Last ranks of paths; the last one there is where filters left fewer candidates than a tree has."""
    return ops.array([min(path[-1], ids.shape[-1] - 1) for path in paths])


def _tree(laws: DraftLaws, tree: FixedTree, tokens: Sequence[Array]) -> DraftTree:
    ops = laws.sampler.ops
    return DraftTree(Pending(ops, ops.xp.concat([ops.array([laws.root]), *tokens])), tree.parents)


def _ranks(text: str) -> FixedTree:
    """From words of one digit a rank."""
    return FixedTree.of([[int(rank) for rank in word] for word in text.split()])


EAGLE_1 = _ranks("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")
"""The tree of EAGLE-1: 25 nodes, depth 5."""
MEDUSA = _ranks(
    "0 1 2 3 4 5 6 7 8 9 00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 "
    "90 000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200 0000 "
    "0001 "
)
"""The tree Medusa drafts with unless one was calibrated: 63 nodes, depth 4."""
