"""Medusa: heads on the target's last feature guess one position each; guesses are combined to a tree.

Cai et al. 2401.10774. Heads do not see each other's guesses, so a token has the same rank below every parent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from speclocal.core.draft_law import DraftLaws
from speclocal.core.fixed_tree import MEDUSA, FixedTree, fill_fixed
from speclocal.core.growth import Beam, chain, grow
from speclocal.core.interfaces import Acceptance, Array, Limit, ParallelHead, Scores
from speclocal.core.sampling import Sampler
from speclocal.core.tree import DraftTree
from speclocal.drafters import MOST_NODES, check_tree

LIKELIEST = "likeliest"


@dataclass(frozen=True)
class Settings:
    """depth: most heads used.  topk: alternatives a position; 1 drafts a chain.  nodes: most drafted tokens a round.

    tree: empty for the tree the heads were calibrated with, as far as depth, topk and nodes allow, or the likeliest
    combinations if they come with none; `likeliest` for these; `medusa` for the fixed tree of 63 nodes; or a JSON file
    with paths of ranks.
    """

    depth: int = 5
    topk: int = 6
    nodes: int = 16
    tree: str = ""

    def __post_init__(self) -> None:
        check_tree(self.depth, self.nodes, self.topk)

    def fixed(self, calibrated: Sequence[Sequence[int]] = ()) -> FixedTree | None:
        """The tree that is asked for by name or file, or the most useful part of the calibrated one."""
        if self.tree == LIKELIEST or (not self.tree and self.topk == 1):
            return None
        if not self.tree:
            paths = [path for path in calibrated if len(path) <= self.depth and max(path) < self.topk]
            return FixedTree.of(paths[: self.nodes]) if paths else None
        return FixedTree.asked(self.tree, "medusa", MEDUSA, lambda path: Path(path).read_text(encoding="utf-8"))


class Drafter:
    """Drafts with the heads of `head`. calibrated: paths of ranks that its maker measured, the most useful first."""

    name = "medusa"

    def __init__(
        self,
        settings: Settings,
        head: ParallelHead,
        heads: int,
        notify: Callable[[str], None] = lambda text: None,
        calibrated: Sequence[Sequence[int]] = (),
    ):
        self.settings, self._head = settings, head
        self._fixed = settings.fixed(calibrated)
        if self._fixed is not None and self._fixed.depth > heads:
            notify(f"the tree is {self._fixed.depth} deep, there are {heads} Medusa heads: it is cut to that depth")
            self._fixed = self._fixed.cut(heads, MOST_NODES)
        depth = min(settings.depth, heads)
        nodes = depth if settings.topk == 1 else settings.nodes
        if self._fixed is not None:
            depth, nodes = min(heads, self._fixed.depth), len(self._fixed)
        self.limit = Limit(depth, nodes)
        self._feature: Array | None = None

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._sampler, self._root = sampler, tokens[-1]
        self._feature = None if scores.taps is None else scores.taps[-1, 0]

    def draft(self, limit: Limit) -> DraftTree:
        depth, nodes = min(limit.depth, self.limit.depth), min(limit.nodes, self.limit.nodes)
        if depth <= 0 or nodes <= 0 or self._feature is None:
            return DraftTree.chain(self._root)
        rows = self._head.predict(self._feature)
        is_chain = self._fixed is None and self.settings.topk == 1
        laws = DraftLaws.of(self._sampler, None, self._root, is_chain)

        def run(beam: Beam) -> Array:
            return rows[beam.depth : beam.depth + 1]  # the same for every path

        if is_chain:
            return chain(laws, rows[:1], run, min(depth, nodes))
        if self._fixed is not None:
            return fill_fixed(laws, self._fixed.cut(depth, nodes), rows)
        return grow(laws, rows[:1], run, self.settings.topk, depth, nodes)

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        self._feature = scores.taps[taken.path[-1] if taken.path else 0, 0]
        self._root = taken.token
