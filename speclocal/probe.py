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


def texts(engine: Engine) -> list[list[int]]:
    """Prompts with what the target says to them, greedily."""
    found = []
    for prompt in PROMPTS:
        stream = engine.stream(Request(prompt, sampling=Sampling(min_tokens=TOKENS), max_tokens=TOKENS))
        for _ in stream:
            pass
        found.append([*stream.prompt_ids, *stream.answer().token_ids])
    return found


class Bench:
    """Tries conventions of one head on the same texts. texts: token ids; what the target added is compared."""

    def __init__(
        self,
        head: HeadFiles,
        target: Target,
        backend: Any,
        texts: Sequence[Sequence[int]],
        step: Step = lambda *_: None,
    ):
        self._head, self._target, self._backend, self._step = head, target, backend, step
        self._texts = [list(text) for text in texts]

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
            self._states.append(self._target.prefill(text).taps)

    def _try(self, name: str, chosen: Overrides) -> Trial:
        spec, names = self._head.identify(self._target, chosen)
        module = self._backend.load_head(self._head.folder, spec, names, self._target)
        ops = self._target.ops
        columns = ops.array([self._points.index(tap) for tap in taps_of(spec)])
        ids = getattr(module, "ids", None)
        place = None if ids is None else {token: i for i, token in enumerate(ops.to_host(ids)[0])}
        total = sum(len(text) - 1 - DEPTHS for text in self._texts)
        hits: list[list[bool]] = [[] for _ in range(DEPTHS)]
        logs: list[list[float | None]] = [[] for _ in range(DEPTHS)]
        done = 0
        for text, states in zip(self._texts, self._states, strict=True):
            for at, rows in guesses(spec, module, ops, text, states[:, columns]):
                best, sums, rows = ops.to_host(ops.xp.argmax(rows, -1), ops.xp.logsumexp(rows, -1), rows)
                for depth, row in enumerate(rows):
                    token = text[at + 2 + depth]
                    column = token if place is None else place.get(token)
                    hits[depth].append(best[depth] == column)
                    logs[depth].append(None if column is None else row[column] - sums[depth])
                done += 1
                self._step(name, done, total)
        depths = [depth for depth in range(DEPTHS) if hits[depth]]
        return Trial(name, tuple(fmean(hits[d]) for d in depths), tuple(tuple(logs[d]) for d in depths))


def guesses(spec: Spec, module: Any, ops: Any, text: Sequence[int], states: Array) -> Iterator[tuple[int, Array]]:
    """For each position i what the head makes of tokens i + 2, i + 3, ...: logits [depths, Vd].

    Between them it is fed the right tokens, so that every depth is judged on its own.
    """
    xp = ops.xp
    zero, one = ops.arange(1) * 0, ops.arange(1) * 0 + 1
    for at in range(len(text) - 1 - DEPTHS):
        if isinstance(spec, MedusaSpec):
            yield at, module.predict(states[at, 0])[:DEPTHS]
            continue
        if spec.family == "p_eagle":
            yield at, module.extend(text[at + 1 : at + 2], states[at : at + 1], DEPTHS - 1)
            continue
        rows = [module.extend(text[at + 1 : at + 2], states[at : at + 1])]
        for depth in range(1, DEPTHS):
            seen = xp.stack([one] * depth, -1)
            rows.append(module.step(Beam(ops.array([text[at + 1 + depth]]), zero, depth, seen)))
        yield at, xp.concat(rows)


@dataclass(frozen=True)
class _Variant:
    """One thing that may be otherwise: the option that says so, and the depths that tell."""

    option: str
    value: str
    change: Mapping[str, Any]
    depths: tuple[int, ...] = (0,)

    def applied(self, chosen: Overrides) -> Overrides:
        return replace(chosen, **self.change)


def _variants(spec: Spec, layers: int) -> Iterator[_Variant]:
    if not isinstance(spec, EagleSpec):
        return
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in spec.taps)
        if FEATURE not in spec.taps and min(taps) >= 0 and max(taps) <= layers:
            yield _Variant("taps", ",".join(map(str, taps)), {"taps": taps})
    if spec.rope_theta != PLAIN_THETA:
        yield _Variant("theta", f"{PLAIN_THETA:g}", {"rope_theta": PLAIN_THETA})
    if spec.family != "eagle":
        other = not spec.norm_before_residual
        yield _Variant("residual", "yes" if other else "no", {"norm_before_residual": other})
    if spec.family == "eagle3":
        other = not spec.norm_output
        # The first guess comes before anything is fed back.
        yield _Variant("norm_output", "yes" if other else "no", {"norm_output": other}, tuple(range(1, DEPTHS)))


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
