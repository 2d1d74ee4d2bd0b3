"""Many generations at once: the project's rules and walk, driven by the documented noise keys.

Seeds that see the same prefix and the same draft are handled together, so that millions of rounds take seconds. The
loop, the drafter and the keying are not the project's: `test_statistics` compares the texts with the real loop's, seed
by seed, before it trusts them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from speclocal.core import accept, noise, verify
from speclocal.core.interfaces import Acceptance, Ops
from speclocal.core.noise import MASK, Purpose
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.tree import DraftTree
from tests.core.exact import Law, Prefix, plainly, prefixes
from tests.toys import LawDrafter, Shape, TableTarget, hashed, mixed, single

VOCAB = 5
LENGTH = 3
PROMPT = (0, 4)
Group = tuple[DraftTree, np.ndarray]


@dataclass(frozen=True)
class Model:
    """Logits of target and draft on every prefix of three tokens."""

    target: Any
    draft: Any

    @classmethod
    def of(cls, salt: str, near: float) -> Model:
        """A random pair; the draft's logits are the target's by the share `near`."""
        target = hashed(VOCAB, salt, 1.0)
        return cls(target, mixed(target, hashed(VOCAB, f"{salt} draft", 1.0), near))

    def plain(self) -> Law:
        """The target's law of three tokens."""

        def law(prefix: Prefix) -> list[float]:
            weights = np.exp(self.target((*PROMPT, *prefix)))
            return list(weights / weights.sum())

        return dict(plainly(law, (), LENGTH))

    def loop(self, ops: Ops, shape: Shape, siblings: str) -> tuple[TableTarget, LawDrafter]:
        """Target and drafter for the real loop."""
        every = (p for n in range(LENGTH + 1) for p in np.ndindex(*(VOCAB,) * n))
        table = {p: self.target((*PROMPT, *p)) for p in every}
        return TableTarget(ops, table, len(PROMPT)), LawDrafter(self.draft, shape, siblings)


def rotate(x: np.ndarray, r: int) -> np.ndarray:
    return (x << np.uint32(r)) | (x >> np.uint32(32 - r))


class Keyed:
    """Noise of many seeds, made when first asked for."""

    def __init__(self, seeds: np.ndarray):
        self._key = (seeds.astype(np.uint32)[:, None], (seeds >> 32).astype(np.uint32)[:, None])
        self.rows = cache(self._rows)
        self.coins = cache(self._coins)

    def _words(self, position: int, purpose: Purpose, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(self._key[0]), count)
        x0 = np.full(shape, position, np.uint32)
        x1 = np.broadcast_to(np.arange(first, first + count, dtype=np.uint32) | np.uint32(purpose << 24), shape).copy()
        return noise.threefry(self._key, x0, x1, rotate, self._constant, lambda x: x)  # type: ignore[arg-type]

    @staticmethod
    def _constant(x: Any) -> Any:
        return x if isinstance(x, np.ndarray) else np.uint32(x)

    def _rows(self, position: int, purpose: Purpose, number: int = 0) -> np.ndarray:
        """[seeds, V]: vector `number` of a position."""
        w0, w1 = self._words(position, purpose, number * VOCAB, VOCAB)
        with np.errstate(divide="ignore"):
            return noise.gumbel(
                np, *(w.astype(np.float32) for w in (w0, w1, w0 ^ np.uint32(MASK), w1 ^ np.uint32(MASK)))
            )

    def _coins(self, position: int, index: int) -> np.ndarray:
        w0, _ = self._words(position, Purpose.ACCEPT, index, 1)
        return (w0[:, 0] >> np.uint32(8)) * 2.0**-24


class Simulation:
    """One rule over one model, for an array of seeds."""

    def __init__(self, ops: Ops, model: Model, rule: str, siblings: str, shape: Shape, seeds: np.ndarray):
        self._ops, self._model, self._rule, self._siblings, self._shape = ops, model, rule, siblings, shape
        self._sampler = Sampler(ops, Sampling(temperature=1.0), VOCAB, PROMPT, rule=rule)
        self._noise = Keyed(seeds)
        self._seeds = len(seeds)

    def texts(self) -> np.ndarray:
        """[seeds, 3]: the tokens of every seed."""
        out = np.zeros((self._seeds, LENGTH), np.int8)
        work: dict[Prefix, list[np.ndarray]] = {(): [np.arange(self._seeds)]}
        while work:
            prefix = min(work, key=len)
            which = np.concatenate(work.pop(prefix))
            if len(prefix) == LENGTH:
                out[which] = prefix
                continue
            for tree, group in self._drafts(prefix, which):
                for tokens, part in self._round(prefix, tree, group):
                    work.setdefault((*prefix, *tokens), []).append(part)
        return out

    def counts(self) -> Counter[Prefix]:
        codes = self.texts().astype(np.int64) @ VOCAB ** np.arange(LENGTH)[::-1]
        seen = np.bincount(codes, minlength=VOCAB**LENGTH)
        return Counter({text: int(seen[i]) for i, text in enumerate(np.ndindex(*(VOCAB,) * LENGTH)) if seen[i]})

    def _drafts(self, prefix: Prefix, which: np.ndarray) -> Iterator[Group]:
        """Every tree that some seeds draft, with those seeds; nodes breadth-first."""
        deepest = LENGTH - len(prefix) - 1
        todo = [([PROMPT[-1]], [-1], deque([(0, self._shape, ())]), which)]
        while todo:
            tokens, parents, pending, group = todo.pop()
            while pending and (not pending[0][1] or len(pending[0][2]) == deepest):
                pending.popleft()
            if not pending:
                yield self._tree(prefix, tokens, parents), group
                continue
            node, shape, path = pending.popleft()
            drawn = self._children(prefix, path, len(shape), group)
            for kids, part in split(drawn):
                below = [(len(tokens) + i, s, (*path, t)) for i, (s, t) in enumerate(zip(shape, kids, strict=True))]
                todo.append(([*tokens, *kids], [*parents, *[node] * len(kids)], deque([*pending, *below]), group[part]))

    def _children(self, prefix: Prefix, path: Prefix, count: int, group: np.ndarray) -> np.ndarray:
        """[seeds, count] tokens in draw order."""
        start, depth = len(PROMPT) + len(prefix), len(path)
        law = np.array(self._model.draft((*PROMPT, *prefix, *path)), np.float32)
        if self._siblings == "one-hot":
            return np.tile(np.argsort(-law, kind="stable")[:count], (len(group), 1))
        if self._siblings == "iid":
            races = [self._noise.rows(start + depth, Purpose.DRAFT, rank)[group] for rank in range(count)]
            return np.stack([np.argmax(law + race, 1) for race in races], 1)
        key = (start, Purpose.DRAFT, depth) if self._rule == "block" else (start + depth, Purpose.DRAFT)
        return np.argsort(-(law + self._noise.rows(*key)[group]), 1, kind="stable")[:, :count]

    def _tree(self, prefix: Prefix, tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
        tree = DraftTree(tuple(int(t) for t in tokens), tuple(parents))
        if self._siblings == "one-hot" or len(tree) == 1:
            return tree
        return DraftTree(tree.tokens, tree.parents, self._laws(self._model.draft, prefix, tree), self._siblings)

    def _laws(self, row: Any, prefix: Prefix, tree: DraftTree) -> Any:
        raw = single(self._ops, [row((*PROMPT, *prefix, *path)) for path in prefixes(tree)])
        return self._sampler.probabilities(self._sampler.law(raw, tree))

    def _round(self, prefix: Prefix, tree: DraftTree, group: np.ndarray) -> Iterator[tuple[Prefix, np.ndarray]]:
        """What the seeds of a group emit."""
        start = len(PROMPT) + len(prefix)
        p = self._laws(self._model.target, prefix, tree)
        if self._rule == "block":
            thresholds, left = self._ops.to_host(*verify.block_thresholds(self._ops, p, tree))
            passed = [self._noise.coins(start, i)[group] < t for i, t in enumerate(thresholds)]
        else:
            keep_p, keep_q, left = self._ops.to_host(*verify.odds(self._ops, p, tree))
            passed = [np.ones(len(group), bool)]
            for node in range(1, len(tree)):
                parent = tree.parents[node]
                rank = tree.children[parent].index(node)
                coins = self._noise.coins(start + tree.depth[parent], rank)[group]
                passed.append(coins * keep_q[rank][parent] < keep_p[rank][parent])
        for pattern, part in split(np.stack(passed, 1)):
            taken = self._walk(tree, pattern)
            end = taken.path[-1] if taken.path else 0
            depth = 0 if self._rule == "block" else tree.depth[end]
            with np.errstate(divide="ignore"):
                law = np.log(np.array(left[end], np.float32))
            last = np.argmax(law + self._noise.rows(start + depth, Purpose.RESIDUAL)[group[part]], 1)
            for (token,), final in split(last[:, None]):
                yield (*taken.tokens(tree)[:-1], token), group[part][final]

    def _walk(self, tree: DraftTree, passed: Sequence[int]) -> Acceptance:
        nowhere = [0] * len(tree)
        if self._rule == "block":
            return accept.longest(tree, [bool(x) for x in passed], nowhere)
        return accept.try_children(tree, lambda node, rank: bool(passed[node]), nowhere)


def split(rows: np.ndarray) -> Iterator[tuple[Prefix, np.ndarray]]:
    """Distinct rows, and where each stands."""
    codes = rows.astype(np.int64) @ VOCAB ** np.arange(rows.shape[1])
    order = np.argsort(codes, kind="stable")
    borders = np.flatnonzero(np.diff(codes[order])) + 1
    for part in np.split(order, borders):
        yield tuple(int(x) for x in rows[part[0]]), part
