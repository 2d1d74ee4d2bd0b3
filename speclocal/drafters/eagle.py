"""EAGLE-1, EAGLE-2 and EAGLE-3: a small head reads the target's hidden states and drafts a tree.

Li et al. 2401.15077, 2406.16858, 2503.01840. Of drafted tokens nothing is kept: the head's context is always made of
the target's own states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speclocal.core.draft_law import DraftLaws
from speclocal.core.fixed_tree import EAGLE_1, FixedTree, run_fixed
from speclocal.core.growth import chain, grow
from speclocal.core.interfaces import Acceptance, Array, Head, Limit, Scores
from speclocal.core.prefix import shared_prefix
from speclocal.core.sampling import Sampler
from speclocal.core.tree import DraftTree
from speclocal.drafters import check_tree, check_whole

MOST_BORROWED = 2**16
"""Largest `context_vocab`."""


@dataclass(frozen=True)
class Settings:
    """depth: longest path.  topk: children of a node; 1 drafts a chain.  nodes: most drafted tokens a round.

    tree: empty for a tree that grows where the head is confident; `eagle1` for EAGLE-1's fixed one; or a JSON file
    with paths of ranks.
    taps: target states the head reads, as boundary numbers 0..L; empty: what its files say.
    theta: base of the head's rope; 0: what its files say.
    residual, norm_output: conventions of the head (`yes`, `no`); empty: what its files say.
    context_vocab: most tokens of the text that join the draft vocabulary, of a head whose output rows are the target's.
    """

    depth: int = 5
    topk: int = 6
    nodes: int = 16
    tree: str = ""
    taps: tuple[int, ...] = ()
    theta: float = 0.0
    residual: str = ""
    norm_output: str = ""
    context_vocab: int = 1024

    def __post_init__(self) -> None:
        check_tree(self.depth, self.nodes, self.topk)
        check_whole("context_vocab", self.context_vocab, 0, MOST_BORROWED)

    def fixed(self) -> FixedTree | None:
        """The tree that is asked for by name or file."""
        return FixedTree.asked(self.tree, "eagle1", EAGLE_1, lambda path: Path(path).read_text(encoding="utf-8"))


class Reader:
    """Keeps a head fed with the target's states: what all drafters that read them share.

    borrow: most tokens of the text that the head may draft though its vocabulary lacks them.
    """

    def __init__(self, head: Head, borrow: int):
        self.head, self._borrow = head, borrow
        self.tokens: list[int] = []
        self._met: dict[int, None] = {}
        self._fed: list[int] = []
        self._new: list[Array] = []

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        """A new text. The head keeps the rows of what it shares with the last one."""
        if self._new and sum(t.shape[0] for t in self._new) == len(self.tokens) - len(self._fed):
            self.feed(sampler)  # the end of the last text; anything else was interrupted
        self.tokens = list(tokens)
        self._met.clear()
        self._meet(self.tokens)
        states = 0 if scores.taps is None else scores.taps.shape[0]
        start = len(tokens) - 1 - states
        # Row i pairs state i with token i + 1.
        kept = min(max(shared_prefix(tokens, self._fed) - 1, 0), self.head.rows)
        # Where states are missing in between, the head's context begins later: its positions are relative.
        self.head.truncate(start if start <= kept else 0)
        self._fed = self.tokens[: start + 1]
        self._new = [] if scores.taps is None else [scores.taps]

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores, sampler: Sampler) -> None:
        """Note the states of the nodes that were kept."""
        rows = sampler.ops.array([0, *taken.path])
        self._new.append(scores.taps[rows])
        tokens = taken.tokens(tree)
        self.tokens.extend(tokens)
        self._meet(tokens)

    def feed(self, sampler: Sampler, masks: int = 0) -> Array | None:
        """Logits after the last token, [1 + masks, Vd]; None if no state is known yet."""
        if not self._new:
            return None
        taps = self._new[0] if len(self._new) == 1 else sampler.ops.xp.concat(self._new)
        self.head.borrow(self._met, self._borrow)
        logits = self.head.extend(self.tokens[len(self._fed) :], taps, masks)
        self._new, self._fed = [], list(self.tokens)
        return logits

    def _meet(self, tokens: Sequence[int]) -> None:
        """Distinct tokens of the text, the latest last."""
        for token in tokens:
            self._met.pop(token, None)
            self._met[token] = None


class Drafter:
    """Drafts with an EAGLE head. `name` tells the family."""

    def __init__(self, settings: Settings, head: Head, name: str = "eagle3"):
        self.settings, self.name = settings, name
        self._fixed = settings.fixed()
        self._reader = Reader(head, settings.context_vocab)
        depth, nodes = settings.depth, settings.depth if settings.topk == 1 else settings.nodes
        if self._fixed is not None:
            depth, nodes = min(depth, self._fixed.depth), min(nodes, len(self._fixed))
        self.limit = Limit(depth, nodes)

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._sampler = sampler
        self._reader.begin(tokens, scores, sampler)

    def draft(self, limit: Limit) -> DraftTree:
        root = self._reader.tokens[-1]
        depth, nodes = min(limit.depth, self.limit.depth), min(limit.nodes, self.limit.nodes)
        if depth <= 0 or nodes <= 0 or (first := self._reader.feed(self._sampler)) is None:
            return DraftTree.chain(root)
        is_chain = self._fixed is None and self.settings.topk == 1
        head = self._reader.head
        laws = DraftLaws.of(self._sampler, head.ids, root, is_chain)
        if is_chain:
            return chain(laws, first, head.step, min(depth, nodes))
        if self._fixed is not None:
            return run_fixed(laws, self._fixed.cut(depth, nodes), first, head.step)
        return grow(laws, first, head.step, self.settings.topk, depth, nodes)

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        self._reader.commit(tree, taken, scores, self._sampler)
