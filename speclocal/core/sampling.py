"""The law tokens are drawn from: one function of logits and token history, for plain decoding and verification alike.

Order of the steps, fixed here: unknown ids masked, logit bias, repetition / presence / frequency penalties, minimum
length, temperature, top-k, top-p, min-p. Tokens that tie with the last one a filter keeps are kept too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from speclocal.core.noise import Noise, Purpose
from speclocal.errors import UsageError

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array, Ops
    from speclocal.core.tree import DraftTree


COLDEST = 1e-5
"""Below it, logits / temperature would leave float32; 0 is greedy decoding."""
MOST = 1e6
"""Largest bias and penalty, for the same reason."""


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampler; every value is checked when the object is made (UsageError names field and range).

    temperature: 0 is greedy decoding.          top_k: 0 keeps all.     top_p: 1 keeps all.     min_p: 0 keeps all.
    repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or answer; 1 is off.
    presence_penalty, frequency_penalty: subtracted once / per occurrence, for tokens of the answer; 0 is off.
    logit_bias: token id -> added to its logit.  min_tokens: no end token before so many tokens.
    seed: every random number is a function of (seed, position, purpose, token).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        inf = math.inf
        _check("temperature", self.temperature, 0.0, inf, "a number from 0 up")
        if 0 < self.temperature < COLDEST:
            raise UsageError(
                "impossible temperature", got=self.temperature, expected=f"0 (greedy), or {COLDEST} or more"
            )
        _check("top_k", self.top_k, 0, inf, "a whole number from 0 (off) up", whole=True)
        _check("top_p", self.top_p, 0.0, 1.0, "a number above 0 and up to 1", open_low=True)
        _check("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _check("repetition_penalty", self.repetition_penalty, 1 / MOST, MOST, "a number above 0, at most 1e6")
        _check("presence_penalty", self.presence_penalty, -MOST, MOST, "a number from -1e6 to 1e6")
        _check("frequency_penalty", self.frequency_penalty, -MOST, MOST, "a number from -1e6 to 1e6")
        _check("min_tokens", self.min_tokens, 0, inf, "a whole number from 0 up", whole=True)
        _check("seed", self.seed, 0, 2**64 - 1, "a whole number from 0 to 2^64-1", whole=True)
        for token, bias in self.logit_bias.items():
            _check("logit_bias token", token, 0, inf, "a token id", whole=True)
            _check(f"logit_bias of token {token}", bias, -MOST, MOST, "a number from -1e6 to 1e6")

    @property
    def greedy(self) -> bool:
        """True if the law is a point mass on the argmax (ties to the lowest id)."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """True if the law depends on which tokens came before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check(
    name: str, value: Any, low: float, high: float, expected: str, *, whole: bool = False, open_low: bool = False
) -> None:
    kinds = (int,) if whole else (int, float)
    ok = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= value <= high or (open_low and value == low):
        raise UsageError(f"impossible {name}", got=repr(value), expected=expected)


@dataclass(frozen=True)
class Law:
    """Laws of N nodes.

    scores: [N, V] float32, log-probabilities up to a constant per row; at temperature 0 the processed logits.
    floor:  [N, 1] or None; tokens that score below it are outside the support. Kept apart, because cutting a whole row
            costs more than finding the few tokens that are left.
    """

    scores: Array
    floor: Array | None = None


class Sampler:
    """A `Sampling` at work on one text: keeps the history and the noise, turns raw logits into laws.

    `rule` is the acceptance rule, which decides how noise is keyed.
    """

    def __init__(
        self,
        ops: Ops,
        sampling: Sampling,
        width: int,
        prompt: Sequence[int],
        *,
        unknown: Iterable[int] = (),
        end_ids: Iterable[int] = (),
        rule: str = "coupled",
        stream: int = 0,
    ):
        self.ops, self.sampling, self.width, self.rule = ops, sampling, width, rule
        self.noise = Noise(ops, sampling.seed, width, stream)
        self.position = len(prompt)
        """Absolute index of the token that the root of the next tree will produce."""
        self._generated = 0
        self._seen: dict[int, int] = dict.fromkeys(prompt, 0)
        self._end_ids = sorted(i for i in set(end_ids) if i < width)
        self._row = self._additive_row(set(unknown))

    def _additive_row(self, unknown: set[int]) -> Array | None:
        bias = self.sampling.logit_bias
        outside = [i for i in bias if i >= self.width or i in unknown]
        if outside:
            raise UsageError(
                "logit bias for a token the model does not have", got=outside[0], expected=f"ids below {self.width}"
            )
        if not bias and not unknown:
            return None
        row = self.ops.arange(self.width) * 0.0
        added = {**dict.fromkeys(unknown, -math.inf), **bias}
        row[self.ops.array(list(added))] = self.ops.array([float(value) for value in added.values()])
        return row

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens became part of the text."""
        for t in tokens:
            self._seen[t] = self._seen.get(t, 0) + 1
        self._generated += len(tokens)
        self.position += len(tokens)
        self.noise.forget(self.position)

    def law(self, logits: Array, tree: DraftTree, start: int = 0) -> Law:
        """Laws of the nodes `start..N-1` of a tree that hangs below the committed text.

        logits: [N - start, V] float32 raw logits of those nodes. Row i is processed exactly as plain decoding would
        with the history of that node: the text plus the node's own path.
        """
        s = self.sampling
        x = logits if self._row is None else logits + self._row
        if s.penalised:
            x = self._penalise(x, tree, start)
        if self._generated < s.min_tokens:
            x = self._forbid_end(x, tree, start)
        if s.greedy:
            return Law(x)
        if s.temperature != 1:
            x = x / s.temperature
        return Law(x, self._floor(x))

    def full(self, law: Law) -> Array:
        """Scores [N, V] with -inf outside the support."""
        return law.scores if law.floor is None else self.ops.xp.where(law.scores < law.floor, -math.inf, law.scores)

    def probabilities(self, law: Law) -> Array:
        """Normalised law [N, V]; at temperature 0 a point mass on the first argmax."""
        xp = self.ops.xp
        if not self.sampling.greedy:
            return xp.softmax(self.full(law), -1)
        best = xp.argmax(law.scores, -1)
        return xp.where(self.ops.arange(law.scores.shape[-1])[None, :] == best[:, None], 1.0, 0.0)

    def race(
        self, law: Law, depths: Sequence[int] | Array, purpose: Purpose, deepest: int | None = None
    ) -> tuple[Array, Array | None]:
        """Law + noise of the position `depths[i]` tokens on, per row: the argmax of a row is a draw from its law.

        depths may be a device array if `deepest` bounds it (not with the block rule).

        Returns scores [N, K] and the tokens [K] of their columns, None for all of them: where most tokens are cut off,
        noise is made for the others only. At temperature 0 there is no noise.
        """
        if self.sampling.greedy:
            return law.scores, None
        tokens = None
        if law.floor is not None and self.ops.support:
            tokens = self.ops.support(law.scores, law.floor)
            law = Law(law.scores[:, tokens], law.floor)
        scores = self.full(law)
        if self.rule == "block":
            # Bottom-up rules decide positions again in later rounds: the round's first position is the key.
            noise = {d: self.noise.block(self.position, d, purpose, tokens) for d in set(depths)}
            return scores + self.ops.xp.concat([noise[d] for d in depths]), tokens
        first = min(depths) if deepest is None else 0
        count = (max(depths) if deepest is None else deepest) - first + 1
        if tokens is not None:
            made = self.noise.at(range(self.position + first, self.position + first + count), purpose, tokens)
        else:
            made = self.noise.rows(self.position + first, count, purpose)
        if deepest is not None:
            return scores + made[depths], tokens
        rows = [d - first for d in depths]
        if count > 1 and rows != list(range(count)):
            made = made[self.ops.array(rows)]
        return scores + made, tokens

    def _penalise(self, x: Array, tree: DraftTree, start: int) -> Array:
        s, ops = self.sampling, self.ops
        ids, counts = list(self._seen), list(self._seen.values())
        rows, tokens, patched = [], [], []
        for node in range(max(start, 1), len(tree)):
            for token, n in Counter(tree.tokens[i] for i in tree.path(node)).items():
                rows.append(node - start)
                tokens.append(token)
                patched.append(self._seen.get(token, 0) + n)

        def penalty(raw: Array, seen: list[int]) -> Array:
            shrunk = ops.xp.where(raw > 0, raw / s.repetition_penalty, raw * s.repetition_penalty)
            return shrunk - ops.array([s.frequency_penalty * n + (s.presence_penalty if n else 0.0) for n in seen])

        logits, x = x, x + 0.0  # a copy: the raw logits stay as the model gave them
        if ids:
            columns = ops.array(ids)
            x[:, columns] = penalty(logits[:, columns], counts)
        if rows:
            # A path token is penalised from its raw logit, once: not on top of what the text's penalty wrote.
            at = ops.array(rows), ops.array(tokens)
            x[at] = penalty(logits[at], patched)
        return x

    def _forbid_end(self, x: Array, tree: DraftTree, start: int) -> Array:
        left = self.sampling.min_tokens - self._generated
        early = [n - start for n in range(start, len(tree)) if tree.depth[n] < left]
        if early and self._end_ids:
            x = x + 0.0
            rows = [r for r in early for _ in self._end_ids]
            x[self.ops.array(rows), self.ops.array(self._end_ids * len(early))] = -math.inf
        return x

    def _floor(self, x: Array) -> Array | None:
        """Score of the last token that top-k, top-p and min-p keep, [N, 1]; None if they keep all."""
        s, xp, ops, width = self.sampling, self.ops.xp, self.ops, x.shape[-1]
        floors = []
        best = None
        if 0 < s.top_k < width:
            best, _ = ops.top(x, s.top_k)
            floors.append(best[:, -1:])
            if s.top_p < 1:
                # Top-p counts the mass of what top-k left.
                floors.append(self._nucleus_floor(best, xp.logsumexp(best, -1)))
        elif s.top_p < 1:
            floors.append(self._nucleus(x))
        if s.min_p > 0:
            if best is None:
                best, _ = ops.top(x, 1)
            floors.append(best[:, :1] + math.log(s.min_p))
        if not floors:
            return None
        floor = floors[0]
        for other in floors[1:]:
            floor = xp.where(other > floor, other, floor)
        return floor

    def _nucleus_floor(self, best: Array, total: Array) -> Array:
        """Score of the last token of the nucleus, [N, 1].

        best: [N, k] the k best scores, descending; total: [N] logsumexp of the scores the law is normalised over.
        """
        xp, ops = self.ops.xp, self.ops
        mass = xp.exp(best - total[:, None])
        before = xp.cumsum(mass, -1) - mass
        last = xp.sum(xp.where(before < self.sampling.top_p, 1, 0), -1) - 1
        return best[ops.arange(best.shape[0]), last][:, None]

    def _nucleus(self, x: Array) -> Array:
        """Score of the last token of the nucleus of each row, [N, 1].

        A nucleus is mostly few tokens; where looking costs nothing, only rows that need it are sorted further down.
        """
        xp, ops, width = self.ops.xp, self.ops, x.shape[-1]
        total = xp.logsumexp(x, -1)
        floor, open_rows = None, list(range(x.shape[0]))
        for k in (64, 1024, width) if ops.support else (width,):
            if floor is None:
                best, their = ops.top(x, min(k, width))[0], total
                floor = self._nucleus_floor(best, their)
            else:
                rows = ops.array(open_rows)
                best, their = ops.top(x[rows], min(k, width))[0], total[rows]
                floor[rows] = self._nucleus_floor(best, their)
            if k >= width:
                break
            (mass,) = ops.to_host(xp.sum(xp.exp(best - their[:, None]), -1))
            open_rows = [row for row, m in zip(open_rows, mass, strict=True) if m < self.sampling.top_p]
            if not open_rows:
                break
        return floor
