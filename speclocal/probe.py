"""The acceptance probe: which convention a drafter head was trained with, where its files do not tell or are wrong.

The target writes a text. Then the head is fed the target's states under each convention, and what it makes of every
next token is compared: a head that reads the wrong states, or turns them wrongly, finds the right token less likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from speclocal.assemble import Shop, assemble
from speclocal.core.growth import Beam
from speclocal.core.heads import FEATURE, EagleSpec, MedusaSpec, Overrides, Spec
from speclocal.core.interfaces import Array, Target
from speclocal.core.sampling import Sampling
from speclocal.drafters import HEADS, find, read_settings
from speclocal.engine import Engine, Load, Request
from speclocal.errors import ModelError, UsageError
from speclocal.heads import LABELS, HeadFiles, family_of, overrides, taps_of
from speclocal.loading import check_head_memory
from speclocal.sources import Progress

DEPTHS = 3
TOKENS = 100
"""Of each text."""
PROMPTS = ("Explain why the sky is blue.", "Write a short story about a lighthouse keeper and her dog.")
PLAIN_THETA = 10000.0
SURE, LEAST = 3.0, 0.02
"""Another convention is better if its log-probabilities are higher by so many standard errors, and so many nats."""

Step = Callable[[str, int, int], None]
"""Told what is tried, and how many of how many positions are done."""


@dataclass(frozen=True)
class Written:
    """A text of token ids, of which those from `start` on were written by the target."""

    ids: tuple[int, ...]
    start: int

    @property
    def positions(self) -> range:
        """Positions whose state says something of tokens the target wrote."""
        return range(max(self.start - 2, 0), len(self.ids) - 1 - DEPTHS)


@dataclass(frozen=True)
class Trial:
    """A convention and how it did.

    name:      what differs from the files and the user's options.
    agreement: share of positions whose token the head holds for likeliest, 1, 2 and 3 tokens ahead.
    logs:      for each depth the log-probability of the right token at each position; None where the head has no such
               token.
    """

    name: str
    agreement: tuple[float, ...]
    logs: tuple[tuple[float | None, ...], ...]

    def mean(self, depth: int) -> float:
        """Mean log-probability in nats, of the tokens the head has."""
        found = [value for value in self.logs[depth] if value is not None]
        return fmean(found) if found else -math.inf


@dataclass(frozen=True)
class Report:
    """What the probe found. options: what to type after `-o` to get the best convention; {} if nothing is to change."""

    head: str
    positions: int
    trials: tuple[Trial, ...]
    options: Mapping[str, str]


def probe(
    settings: Load, notify: Callable[[str], None], progress: Progress | None = None, step: Step = lambda *_: None
) -> Report:
    """Load target and head and compare conventions. UsageError for a drafter without a head."""
    shop = Shop(settings, notify, progress)
    choice = shop.choose(settings)
    if choice.method not in HEADS:
        raise UsageError("the probe is for heads", got=choice.method, expected=f"one of {', '.join(HEADS)}")
    given = overrides(
        read_settings(find(choice.method).Settings, choice.method, {**choice.settings, **settings.options})
    )
    shop.both(choice)  # room for both is checked before one is fetched
    engine = assemble(
        replace(settings, drafter="none", draft_model=None, options={}, verify="coupled"), notify, progress
    )
    local = shop.fetch(choice) if choice.sources else shop.target()
    head = HeadFiles.read(shop.head(local), local.source)
    check_head_memory(head.folder, engine.target, settings, shop.backend)
    spec, _ = head.identify(engine.target, given)
    if family_of(spec) != choice.method:
        raise ModelError(f"this is {LABELS[family_of(spec)]} head", do=f"type {family_of(spec)}:{head.source}")
    return Bench(head, engine.target, shop.backend, texts(engine), step).search(given)


def texts(engine: Engine) -> list[Written]:
    """What the target says to some prompts, greedily."""
    found = []
    for prompt in PROMPTS:
        stream = engine.stream(Request(prompt, sampling=Sampling(min_tokens=TOKENS), max_tokens=TOKENS))
        for _ in stream:
            pass
        found.append(Written((*stream.prompt_ids, *stream.answer().token_ids), len(stream.prompt_ids)))
    return found


class Bench:
    """Tries conventions of one head on the same texts."""

    def __init__(
        self, head: HeadFiles, target: Target, backend: Any, texts: Sequence[Written], step: Step = lambda *_: None
    ):
        self._head, self._target, self._backend, self._step = head, target, backend, step
        self._texts = texts

    def search(self, given: Overrides) -> Report:
        """Try what differs in one thing at a time; what turns out better is kept for what follows."""
        spec, _ = self._head.identify(self._target, given)
        variants = list(_variants(spec, self._target.facts.layers))
        self._read(sorted({tap for one in [given, *(v.applied(given) for v in variants)] for tap in self._taps(one)}))
        best, now = self._try("as given", given), given
        trials, options = [best], {}
        for group in dict.fromkeys(variant.option for variant in variants):
            start, chosen = now, None
            for variant in (v for v in variants if v.option == group):
                trial = self._try(f"{variant.option}={variant.value}", variant.applied(start))
                trials.append(trial)
                if better(trial, best, variant.depths):
                    best, now, chosen = trial, variant.applied(start), variant
            if chosen:
                options[chosen.option] = chosen.value
        return Report(self._head.source, len(best.logs[0]), tuple(trials), options)

    def _taps(self, chosen: Overrides) -> tuple[int, ...]:
        return taps_of(self._head.identify(self._target, chosen)[0])

    def _read(self, points: Sequence[int]) -> None:
        """The states of all texts, of every layer that some convention reads: [n, E, D] for each text."""
        self._points = list(points)
        self._states = []
        for text in self._texts:
            self._target.tap(())  # where points change, the cache is emptied and all states are made again
            self._target.tap(self._points)
            self._states.append(self._target.prefill(text.ids).taps)

    def _try(self, name: str, chosen: Overrides) -> Trial:
        spec, names = self._head.identify(self._target, chosen)
        module = self._backend.load_head(self._head.folder, spec, names, self._target)
        ops = self._target.ops
        columns = ops.array([self._points.index(tap) for tap in taps_of(spec)])
        ids = getattr(module, "ids", None)
        place = None if ids is None else {token: i for i, token in enumerate(ops.to_host(ids)[0])}
        total = sum(len(text.positions) for text in self._texts)
        hits: list[list[bool]] = [[] for _ in range(DEPTHS)]
        logs: list[list[float | None]] = [[] for _ in range(DEPTHS)]
        done = 0
        for text, states in zip(self._texts, self._states, strict=True):
            for at, rows in guesses(spec, module, ops, text, states[:, columns]):
                right = text.ids[at + 2 : at + 2 + rows.shape[0]]
                known = [token if place is None else place.get(token) for token in right]
                chosen = rows[ops.arange(len(known)), ops.array([column or 0 for column in known])]
                best, found = ops.to_host(ops.xp.argmax(rows, -1), chosen - ops.xp.logsumexp(rows, -1))
                for depth, column in enumerate(known):
                    hits[depth].append(best[depth] == column)
                    logs[depth].append(None if column is None else found[depth])
                done += 1
                self._step(name, done, total)
        depths = [depth for depth in range(DEPTHS) if hits[depth]]
        return Trial(name, tuple(fmean(hits[d]) for d in depths), tuple(tuple(logs[d]) for d in depths))


def guesses(spec: Spec, module: Any, ops: Any, text: Written, states: Array) -> Iterator[tuple[int, Array]]:
    """For each position i what the head makes of tokens i + 2, i + 3, ...: logits [depths, Vd].

    Between them it is fed the right tokens, so that every depth is judged on its own.
    """
    xp, ids = ops.xp, text.ids
    if isinstance(spec, MedusaSpec):
        for at in text.positions:
            yield at, module.predict(states[at, 0])[:DEPTHS]
        return
    zero, one = ops.arange(1) * 0, ops.arange(1) * 0 + 1
    module.truncate(0)
    fed = 0
    for at in text.positions:
        new = ids[fed + 1 : at + 2], states[fed : at + 1]
        fed = at + 1
        if spec.family == "p_eagle":
            yield at, module.extend(*new, DEPTHS - 1)
            continue
        rows = [module.extend(*new)]
        for depth in range(1, DEPTHS):
            seen = xp.stack([one] * depth, -1)
            rows.append(module.step(Beam(ops.array([ids[at + 1 + depth]]), zero, depth, seen)))
        yield at, xp.concat(rows)


@dataclass(frozen=True)
class _Variant:
    """One thing that may be otherwise: the option that says so, and the depths that tell."""

    option: str
    value: str
    change: Mapping[str, Any]
    depths: tuple[int, ...]

    def applied(self, chosen: Overrides) -> Overrides:
        return replace(chosen, **self.change)


def _variants(spec: Spec, layers: int) -> Iterator[_Variant]:
    if not isinstance(spec, EagleSpec):
        return
    every = tuple(range(DEPTHS))
    # The first guess says most of how true states are read, all later ones of what is fed back; P-EAGLE feeds nothing.
    first, later = (every, every) if spec.family == "p_eagle" else ((0,), every[1:])
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in spec.taps)
        if FEATURE not in spec.taps and min(taps) >= 0 and max(taps) <= layers:
            yield _Variant("taps", ",".join(map(str, taps)), {"taps": taps}, first)
    if spec.rope_theta != PLAIN_THETA:
        yield _Variant("theta", f"{PLAIN_THETA:g}", {"rope_theta": PLAIN_THETA}, first)
    if spec.family != "eagle":
        other = not spec.norm_before_residual
        yield _Variant("residual", _yes(other), {"norm_before_residual": other}, first)
    if spec.family == "eagle3":
        other = not spec.norm_output
        yield _Variant("norm_output", _yes(other), {"norm_output": other}, later)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def better(one: Trial, other: Trial, depths: Sequence[int]) -> bool:
    """Whether `one` finds the right tokens clearly likelier than `other` at these depths, position by position."""
    gains = [
        a - b
        for depth in depths
        for a, b in zip(one.logs[depth], other.logs[depth], strict=True)
        if a is not None and b is not None
    ]
    if len(gains) < 2:
        return False
    error = stdev(gains) / math.sqrt(len(gains))
    return fmean(gains) > max(LEAST, SURE * error)
