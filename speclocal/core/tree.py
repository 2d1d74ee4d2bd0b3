"""Draft trees: what a drafter proposes and what the target checks in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from speclocal.core.pending import Pending

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array, Ops

Siblings = Literal["one-hot", "iid", "without-replacement"]


@dataclass(frozen=True)
class Layout:
    """The shape of a tree that grew on the device: what a pass needs of it without a look from the host.

    parents, depth: [N] integers, as in `DraftTree`. seen: [N, N], 1 where a node (row) sees another: its ancestors and
    itself. deepest: no node is deeper.
    """

    parents: Array
    depth: Array
    seen: Array
    deepest: int

    @classmethod
    def of(cls, ops: Ops, parents: Array, deepest: int) -> Layout:
        """Shape from parents alone; parents[0] is -1."""
        xp, at = ops.xp, ops.arange(parents.shape[0])
        itself = xp.where(at[:, None] == at[None, :], 1, 0)
        above = xp.where(parents < 0, 0, parents)
        seen = itself
        for _ in range(deepest):
            seen = xp.where(itself + seen[above] > 0, 1, 0)
        return cls(parents, xp.sum(seen, -1) - 1, seen, deepest)


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of the committed text.

    Node 0 is the last committed token; node `i` continues `parents[i] < i`. Siblings stand in the order in which they
    were drawn, which is the order in which rejection sampling must test them.

    tokens:   N token ids; a `core.pending.Pending` where they are still on the device.
    parents:  N node numbers, `parents[0] == -1`; a `Pending` where the tree grew on the device, then with its `layout`.
    q:        device [N, V] or None. Row `i` is the law the children of node `i` were really drawn from.
    siblings: how children of one node were drawn: `one-hot` (deterministic; q is not needed), `iid`, or
              `without-replacement`.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    q: Any = None
    siblings: Siblings = "one-hot"
    layout: Layout | None = None

    def __post_init__(self) -> None:
        if (self.q is None) != (self.siblings == "one-hot"):
            raise ValueError("drawn siblings come with the law q they were drawn from, deterministic ones without")
        if isinstance(self.parents, Pending):
            if self.layout is None:
                raise ValueError("a tree whose parents are on the device needs its layout")
            return
        if len(self.tokens) != len(self.parents) or not self.tokens or self.parents[0] != -1:
            raise ValueError("a tree needs as many parents as tokens, and node 0 as its root")
        if any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError("parents must come before their children")

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def chain(cls, root: int, drafts: Sequence[int] = (), q: Any = None, siblings: Siblings = "one-hot") -> DraftTree:
        """A single path: the root followed by `drafts`."""
        return cls((root, *drafts), tuple(range(-1, len(drafts))), q, siblings)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Distance from the root, per node."""
        out: list[int] = []
        for p in self.parents:
            out.append(out[p] + 1 if p >= 0 else 0)
        return tuple(out)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children per node, in draw order."""
        kids: list[list[int]] = [[] for _ in self.parents]
        for i, p in enumerate(self.parents):
            if p >= 0:
                kids[p].append(i)
        return tuple(map(tuple, kids))

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Bitmask per node: bit `j` is set iff node `j` lies on the path from the root to the node, itself included."""
        out: list[int] = []
        for i, p in enumerate(self.parents):
            out.append((out[p] if p >= 0 else 0) | 1 << i)
        return tuple(out)

    @property
    def is_chain(self) -> bool:
        """True if every node continues the one before it."""
        return self.layout is None and self.parents == tuple(range(-1, len(self.tokens) - 1))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to `node`; empty for the root."""
        out: list[int] = []
        while node > 0:
            out.append(node)
            node = self.parents[node]
        return tuple(reversed(out))


class TreeBuilder:
    """Grows a tree of distinct siblings from paths, merging common prefixes."""

    def __init__(self, root: int):
        self.tokens = [root]
        self.parents = [-1]
        self._at: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int) -> int:
        """The node of `token` under `parent`, made if there is none yet."""
        node = self._at.get((parent, token))
        if node is None:
            node = self._at[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add(self, path: Sequence[int], limit: int) -> None:
        """Add a path of tokens below the root, as far as at most `limit` nodes (root included) allow."""
        node = 0
        for token in path:
            if len(self.tokens) >= limit and (node, token) not in self._at:
                return
            node = self.child(node, token)

    def build(self) -> DraftTree:
        return DraftTree(tuple(self.tokens), tuple(self.parents))
