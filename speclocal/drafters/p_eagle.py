"""P-EAGLE: an EAGLE head that drafts all positions in one pass, by rows that stand for unknown tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speclocal.core.draft_law import DraftLaws
from speclocal.core.growth import Beam, chain, grow
from speclocal.core.interfaces import Acceptance, Array, Head, Limit, Scores
from speclocal.core.sampling import Sampler
from speclocal.core.tree import DraftTree
from speclocal.drafters import check_tree, check_whole
from speclocal.drafters.eagle import MOST_BORROWED, Reader


@dataclass(frozen=True)
class Settings:
    """depth: positions drafted.  topk: alternatives a position; 1 drafts a chain.  nodes: most drafted tokens a round.

    taps, theta, residual, norm_output, context_vocab: as for eagle.  mask_token: id of the token that stands for
    unknown ones, where the head's files do not say it.
    """

    depth: int = 6
    topk: int = 4
    nodes: int = 16
    taps: tuple[int, ...] = ()
    theta: float = 0.0
    residual: str = ""
    norm_output: str = ""
    mask_token: int = -1
    context_vocab: int = 1024

    def __post_init__(self) -> None:
        check_tree(self.depth, self.nodes, self.topk)
        check_whole("context_vocab", self.context_vocab, 0, MOST_BORROWED)


class Drafter:
    """Drafts with a P-EAGLE head: a chain, or a tree of the likeliest combinations."""

    name = "p_eagle"

    def __init__(self, settings: Settings, head: Head):
        self.settings = settings
        self._reader = Reader(head, settings.context_vocab)
        self.limit = Limit(settings.depth, settings.depth if settings.topk == 1 else settings.nodes)

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._sampler = sampler
        self._reader.begin(tokens, scores, sampler)

    def draft(self, limit: Limit) -> DraftTree:
        root = self._reader.tokens[-1]
        depth, nodes = min(limit.depth, self.limit.depth), min(limit.nodes, self.limit.nodes)
        if self.settings.topk == 1:
            depth = min(depth, nodes)
        if depth <= 0 or nodes <= 0 or (rows := self._reader.feed(self._sampler, depth - 1)) is None:
            return DraftTree.chain(root)
        is_chain = self.settings.topk == 1
        laws = DraftLaws.of(self._sampler, self._reader.head.ids, root, is_chain)

        def run(beam: Beam) -> Array:
            return rows[beam.depth : beam.depth + 1]  # the same for every path

        if is_chain:
            return chain(laws, rows[:1], run, depth)
        return grow(laws, rows[:1], run, self.settings.topk, depth, nodes)

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        self._reader.commit(tree, taken, scores, self._sampler)
