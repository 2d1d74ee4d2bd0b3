"""What the tests do with a target: trees of given shapes, drafters that hit and miss, generations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from speclocal.core.decode import Round
from speclocal.core.interfaces import Acceptance, Drafter, Limit, Scores, Target
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.tree import DraftTree
from speclocal.drafters import draft_model, ngram, none, scripted
from tests.backends.kinds import VOCAB
from tests.toys import Shape, chain, full, generate

TOLERANCE = 1e-4
GREEDY = Sampling()
SHAPES: dict[str, Shape] = {
    "chain": chain(4),
    "wide": full(10),
    "deep": chain(6),
    "full": full(3, 3),
    "ragged": ((), (((((),),), ()),), ((),)),
}


def ids(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Random token ids."""
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(count)]


def tree_of(shape: Shape, root: int, seed: int = 0) -> DraftTree:
    """A tree of random tokens, siblings distinct, breadth first."""
    draw = random.Random(seed)
    tokens, parents, queue = [root], [-1], [(0, shape)]
    while queue:
        node, children = queue.pop(0)
        for token, below in zip(draw.sample(range(VOCAB), len(children)), children, strict=True):
            queue.append((len(tokens), below))
            tokens.append(token)
            parents.append(node)
    return DraftTree(tuple(tokens), tuple(parents))


def leaves(tree: DraftTree) -> list[int]:
    """Nodes without children."""
    return [node for node in range(len(tree)) if not tree.children[node]]


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    """The tokens from the root to a node, both included."""
    return [tree.tokens[0], *(tree.tokens[i] for i in tree.path(node))]


def host(target: Target, array: Any) -> np.ndarray:
    """A device array as numpy."""
    return np.array(target.ops.to_host(array)[0])


class Shaped:
    """Drafts trees of one shape. A known text runs down a random branch as far as `luck` lets it."""

    name = "shaped"

    def __init__(self, shape: Shape, text: Sequence[int], luck: float = 1.0, vocab: int = VOCAB, seed: int = 0):
        self._shape, self._text, self._luck, self._vocab = shape, list(text), luck, vocab
        self._draw = random.Random(seed)
        self.limit = Limit(64, 64)

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._done, self._root = len(tokens), tokens[-1]

    def draft(self, limit: Limit) -> DraftTree:
        right = self._text[self._done : self._done + limit.depth]
        tokens, parents = [self._root], [-1]
        queue: list[tuple[int, Shape, Sequence[int], int]] = [(0, self._shape, right, limit.depth)]
        while queue:
            node, children, right, depth = queue.pop(0)
            if not depth or not children:
                continue
            wrong = self._draw.sample([t for t in range(self._vocab) if t not in right[:1]], len(children))
            lucky = self._draw.randrange(len(children)) if right and self._draw.random() < self._luck else -1
            for i, below in enumerate(children):
                queue.append((len(tokens), below, right[1:] if i == lucky else (), depth - 1))
                tokens.append(right[0] if i == lucky else wrong[i])
                parents.append(node)
        return DraftTree(tuple(tokens), tuple(parents))

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        self._done += len(taken.tokens(tree))
        self._root = taken.token


DRAFTERS = (
    "none",
    "ngram",
    "ngram chain",
    "draft chain",
    "draft tree",
    "stranger",
    "stranger tree",
    "oracle",
    "wrong",
    "mixed",
)
HITS = ("draft chain", "draft tree", "oracle", "mixed")
"""Drafters of which some drafts must be accepted."""


def drafter(
    name: str,
    lab: ModuleType,
    kind: str,
    text: Sequence[int] = (),
    depth: int = 4,
    vocab: int = VOCAB,
    notify: Callable[[str], None] = lambda text: None,
    **changes: Any,
) -> Drafter:
    """A drafter by name. text: prompt and answer, for those that know it. changes: of the draft model."""
    if name == "none":
        return none.Drafter()
    if name.startswith("ngram"):
        return ngram.Drafter(ngram.Settings(depth=depth, topk=1 if name == "ngram chain" else 4, confidence=0.0))
    if name.startswith(("draft", "stranger", "twin")):
        own = {"twin": {}, "stranger": {"seed": 7}}.get(name.split()[0], {"noise": 0.05})
        tree = {"topk": 3, "nodes": max(8, depth)} if name.endswith("tree") else {}
        return draft_model.Drafter(
            draft_model.Settings(depth=depth, **tree), lab.new(kind, **{**own, **changes}), notify
        )
    width = 2 if name == "mixed" else 1
    return scripted.Drafter(scripted.Settings(preset=name, text=tuple(text), depth=depth, width=width, vocab=vocab))


def play(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    n: int,
    sampling: Sampling = GREEDY,
    watch: Callable[[list[int], Round], None] | None = None,
    **more: Any,
) -> list[Round]:
    """All rounds of a generation. `watch` sees the text so far after every round, with no pass under way."""
    if watch:
        target.ops = replace(target.ops, submit=None)
    rounds, text = [], list(prompt)
    for round in generate(target, drafter, prompt, sampling, n, limit=drafter.limit, **more):
        rounds.append(round)
        text.extend(round.tokens)
        if watch:
            watch(text, round)
    return rounds


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    """Everything emitted."""
    return [token for round in rounds for token in round.tokens]


def accepted_length(rounds: Sequence[Round]) -> float:
    """Emitted tokens per round."""
    return len(tokens_of(rounds)) / len(rounds)


def acceptance(rounds: Sequence[Round]) -> float:
    """Accepted share of what was drafted."""
    return sum(len(r.path) for r in rounds) / max(sum(len(r.tree) - 1 for r in rounds), 1)
