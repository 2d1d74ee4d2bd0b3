"""Toy models: targets whose laws are a table or a hash of the prefix, and a drafter with a law of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import inf
from typing import Any
from zlib import crc32

from speclocal.core.budget import Budget
from speclocal.core.decode import Round, decode
from speclocal.core.interfaces import Acceptance, Limit, Ops, Scores
from speclocal.core.noise import Purpose
from speclocal.core.propose import propose
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.stop import Stop
from speclocal.core.tree import DraftTree

Row = Callable[[tuple[int, ...]], Sequence[float]]
"""Whole history -> raw logits of the next token."""
Shape = tuple[Any, ...]
"""A tree without tokens: the tuple of a node's children, each again a Shape."""


def chain(depth: int) -> Shape:
    """One path."""
    return (chain(depth - 1),) if depth else ()


def full(*widths: int) -> Shape:
    """Every node of depth d has `widths[d]` children."""
    return (full(*widths[1:]),) * widths[0] if widths else ()


WIDE = Limit(64, 10_000)
RAGGED: Shape = (((), ((),)), (), ((),))
"""Three children: one with a leaf and a path below it, a leaf, one with a leaf."""


def double(ops: Ops, values: Any) -> Any:
    """A float64 device array."""
    make = getattr(ops.xp, "tensor", None) or ops.xp.array
    return make(values, dtype=ops.xp.float64)


def single(ops: Ops, values: Any) -> Any:
    """A float32 device array."""
    return ops.array([[float(v) for v in row] for row in values])


class ToyTarget:
    """`core.interfaces.Target` over a function of the history; refuses calls that a real cache could not serve."""

    context = 1 << 20
    trees = True

    def __init__(self, ops: Ops, vocab: int, row: Row, make: Callable[[Ops, Any], Any] = single):
        self.ops, self.vocab = ops, vocab
        self._row, self._make = row, make
        self._tokens: list[int] = []
        self._tree: DraftTree | None = None
        self._scored = 0
        self.passes = 0

    @property
    def cached(self) -> Sequence[int]:
        return tuple(self._tokens)

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> Scores:
        self._tokens, self._scored = list(tokens), 0
        self.passes += 1
        if progress:
            progress(len(tokens))
        return Scores()

    def score(self, tree: DraftTree, start: int = 0) -> Scores:
        assert start <= self._scored, "earlier nodes must have been scored"
        self._tree, self._scored = tree, len(tree)
        self.passes += 1
        return Scores(self._make(self.ops, [self._row(self.history(tree, i)) for i in range(start, len(tree))]))

    def commit(self, path: Sequence[int]) -> None:
        tree = self._tree
        assert tree is not None
        assert all(i < self._scored for i in path), "only scored nodes have rows to keep"
        assert [tree.parents[i] for i in path] == [0, *path][: len(path)], "a path goes from parent to child"
        self._tokens += [tree.tokens[0], *(tree.tokens[i] for i in path)]
        self._tree, self._scored = None, 0

    def history(self, tree: DraftTree, node: int) -> tuple[int, ...]:
        """Everything the node sees, itself included."""
        return (*self._tokens, tree.tokens[0], *(tree.tokens[i] for i in tree.path(node)))


class TableTarget(ToyTarget):
    """Laws from a table: generated prefix -> log-probabilities; a uniform law where the table ends."""

    def __init__(
        self,
        ops: Ops,
        table: Mapping[tuple[int, ...], Sequence[float]],
        prompt: int,
        make: Callable[[Ops, Any], Any] = single,
    ):
        vocab = len(table[()])
        flat = [0.0] * vocab
        super().__init__(ops, vocab, lambda history: table.get(history[prompt:], flat), make)


class HashTarget(ToyTarget):
    """Logits of any vocabulary from a hash of the history; `scale` sets how sharp the laws are."""

    def __init__(self, ops: Ops, vocab: int, salt: str = "target", scale: float = 1.5):
        super().__init__(ops, vocab, hashed(vocab, salt, scale))


def hashed(vocab: int, salt: str, scale: float = 1.5) -> Row:
    """Normal logits, the same for the same history and salt."""

    @cache
    def row(history: tuple[int, ...]) -> tuple[float, ...]:
        draw = random.Random(crc32(f"{salt}{history}".encode()))
        return tuple(draw.gauss(0, scale) for _ in range(vocab))

    return row


def mixed(a: Row, b: Row, share: float) -> Row:
    """Logits between two functions: a draft model that is `share` like `a`."""
    return cache(lambda h: tuple(share * x + (1 - share) * y for x, y in zip(a(h), b(h), strict=True)))


class LawDrafter:
    """Draws a tree of a given shape, level by level, from its own law q, in each of the three ways.

    row:      history -> raw draft logits; filtered by the sampler like the target's.
    siblings: `without-replacement` and `iid` draw with private noise (coupled: with the target's), `one-hot` takes
              the best.
    """

    name = "law"

    def __init__(self, row: Row, shape: Shape, siblings: str = "without-replacement"):
        self._row, self._shape, self._siblings = row, shape, siblings
        self._tokens: list[int] = []

    def begin(self, tokens: Sequence[int], scores: Scores, sampler: Sampler) -> None:
        self._tokens, self._sampler = list(tokens), sampler

    def commit(self, tree: DraftTree, taken: Acceptance, scores: Scores) -> None:
        self._tokens += taken.tokens(tree)

    def draft(self, limit: Limit) -> DraftTree:
        tokens, parents, shapes = [self._tokens[-1]], [-1], [self._shape]
        rows, start, ops = [], 0, self._sampler.ops
        for depth in range(limit.depth):
            tree = DraftTree(tuple(tokens), tuple(parents))
            law, drawn = self._level(tree, start, depth, max(map(len, shapes[start:])))
            rows.append(self._sampler.probabilities(law))
            end = len(tokens)
            for node in range(start, end):
                for shape, token in zip(shapes[node], drawn[node - start], strict=False):
                    tokens.append(token)
                    parents.append(node)
                    shapes.append(shape)
            start = end
            if start == len(tokens):
                break
        if len(tokens) == 1:
            return DraftTree.chain(tokens[0])
        if self._siblings == "one-hot":
            return DraftTree(tuple(tokens), tuple(parents))
        missing = len(tokens) - sum(len(r) for r in rows)
        if missing:
            rows.append(rows[0][:1] + 0.0 * ops.arange(missing)[:, None])
        return DraftTree(tuple(tokens), tuple(parents), ops.xp.concat(rows), self._siblings)

    def _level(self, tree: DraftTree, start: int, depth: int, width: int) -> tuple[Any, list[list[int]]]:
        """Law of the nodes from `start` on, and the children drawn for each."""
        sampler, ops = self._sampler, self._sampler.ops
        paths = [(*self._tokens, *(tree.tokens[i] for i in tree.path(n))) for n in range(start, len(tree))]
        law = sampler.law(single(ops, [self._row(h) for h in paths]), tree, start)
        if self._siblings == "iid" and not sampler.sampling.greedy:
            noise = [sampler.noise.block(sampler.position + depth, r, Purpose.DRAFT) for r in range(width)]
            return law, [[int(ops.xp.argmax(row + own[0])) for own in noise] for row in sampler.full(law)]
        if self._siblings == "one-hot":
            best, ids = ops.to_host(*ops.top(sampler.full(law), min(width, sampler.width)))
        else:
            best, ids, _ = ops.to_host(*propose(sampler, law, depth, width))
        pairs = zip(best, ids, strict=True)
        return law, [[t for s, t in zip(*pair, strict=True) if s > -inf] for pair in pairs]


def generate(
    target: ToyTarget,
    drafter: Any,
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    *,
    rule: str = "coupled",
    limit: Limit = WIDE,
    end_ids: Sequence[int] = (),
    matches: Callable[[int], bool] = lambda token: False,
    **more: Any,
) -> Iterator[Round]:
    """The real loop over toys."""
    sampler = Sampler(target.ops, sampling, target.vocab, prompt, rule=rule, end_ids=end_ids, **more)
    return decode(target, drafter, sampler, prompt, Stop(max_tokens, end_ids, matches), Budget(limit))


def text(rounds: Iterator[Round]) -> list[int]:
    """All emitted tokens."""
    return [t for r in rounds for t in r.tokens]


def fractions(row: Sequence[str]) -> list[float]:
    """Exact fractions as floats."""
    return [float(Fraction(x)) for x in row]
