"""PRF-02: the figures, from plans whose outcome is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from speclocal.core.budget import Budget
from speclocal.core.decode import Round, decode
from speclocal.core.interfaces import Limit, Ops, Origin
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.stats import Seconds, Stats
from speclocal.core.stop import Stop
from speclocal.core.tree import DraftTree
from speclocal.drafters import none, scripted
from tests.toys import HashTarget, generate, text

VOCAB = 50
PROMPT = [3, 1, 4]
PLAN = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]


def known_plan(ops: Ops) -> tuple[list[int], scripted.Drafter]:
    """The plain text, and a drafter of 4 tokens a round of which the first 0,1,2,3,4,0,1,2,3,4 are right."""
    words = text(generate(HashTarget(ops, VOCAB), none.Drafter(), PROMPT, Sampling(), 60))
    kept = iter(PLAN)

    def plan(tokens: list[int], limit: object) -> list[list[int]]:
        done, right = len(tokens) - len(PROMPT), next(kept)
        draft = words[done : done + 4]
        return [draft[:right] + [(t + 1) % VOCAB for t in draft[right:]]]

    return words, scripted.Drafter(plan=plan)


def check_known_plan(ops: Ops) -> None:
    """10 rounds of 4 drafts; the text is ended inside the last, fully accepted block."""
    words, drafter = known_plan(ops)
    emitted = sum(PLAN) + len(PLAN) - 3
    seen = iter(range(1, 100))
    stats = Stats()
    target = HashTarget(ops, VOCAB)
    for r in generate(target, drafter, PROMPT, Sampling(), 60, matches=lambda token: next(seen) == emitted):
        stats.add(r)
    assert (stats.rounds, stats.drafted, stats.accepted, stats.tokens) == (10, 40, 20, emitted)
    assert stats.undrafted == 0
    assert stats.proposed_at == [10, 10, 10, 10]
    assert stats.accepted_at == [8, 6, 4, 2]
    assert target.cached == (*PROMPT, *words[: emitted - 1])
    figures = stats.as_dict()
    assert figures["acceptance_by_position"] == [0.8, 0.6, 0.4, 0.2]
    assert figures["acceptance"] == 0.5
    assert figures["mean_accepted_length"] == emitted / 10


def test_known_plan(ops: Ops) -> None:
    check_known_plan(ops)


def test_plain_rounds(ops: Ops) -> None:
    stats = Stats()
    for r in generate(HashTarget(ops, VOCAB), none.Drafter(), PROMPT, Sampling(), 5):
        stats.add(r)
        assert r.origins == (Origin.PLAIN,)
    assert (stats.tokens, stats.rounds, stats.undrafted, stats.drafted) == (5, 5, 5, 0)
    assert (stats.acceptance, stats.mean_accepted_length) == (0.0, 1.0)
    assert stats.as_dict()["acceptance_by_position"] == []


def test_nothing_ran() -> None:
    figures = Stats().as_dict()
    assert (figures["tokens_per_second"], figures["acceptance"], figures["mean_accepted_length"]) == (0.0, 0.0, 0.0)


def test_trees_count_nodes_but_positions_count_depths() -> None:
    """A depth counts once a round, however wide: its rate is that of keeping a token there."""
    tree = DraftTree((0, 1, 2, 3, 4), (-1, 0, 0, 1, 1))
    stats = Stats()
    stats.add(Round((1, 9), (Origin.ACCEPTED, Origin.RECOVERED), tree, (1,), Seconds(), None))
    assert (stats.drafted, stats.accepted) == (4, 1)
    assert (stats.proposed_at, stats.accepted_at) == ([1, 1], [1])
    assert stats.as_dict()["acceptance_by_position"] == [1.0, 0.0]


def test_prompt_time_is_apart() -> None:
    stats = Stats()
    tree = DraftTree.chain(0)
    stats.add(Round((1,), (Origin.PLAIN,), tree, (), Seconds(prefill=100.0, draft=0.1, verify=0.3, other=0.1), None))
    stats.add(Round((1,), (Origin.PLAIN,), tree, (), Seconds(draft=0.2, verify=0.2, other=0.1), None))
    assert stats.tokens_per_second == pytest.approx(2.0)
    assert stats.seconds.prefill == 100.0


class Clock:
    """Time that passes only where a test lets it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, taking so long."""

        def slow(*args: Any) -> Any:
            self.now += seconds
            return call(*args)

        return slow


def check_phases(ops: Ops) -> None:
    """Every second belongs to its phase and its round, whether or not passes start early; the consumer's to none."""
    for submit in (None, lambda *arrays: None):
        clock, target, drafter = Clock(), HashTarget(replace(ops, submit=submit), VOCAB), none.Drafter()
        sampler = Sampler(ops, Sampling(), VOCAB, PROMPT)
        for owner, name, seconds in (
            (target, "prefill", 16.0),
            (drafter, "draft", 1.0),
            (target, "score", 2.0),
            (sampler, "law", 4.0),
            (target, "commit", 8.0),
        ):
            setattr(owner, name, clock.after(seconds, getattr(owner, name)))
        stats, seen = Stats(), []
        for r in decode(target, drafter, sampler, PROMPT, Stop(3), Budget(Limit(0, 0)), clock=clock):
            clock.now += 100.0
            stats.add(r)
            seen.append(r.seconds)
        assert seen == [Seconds(16.0, 1.0, 6.0, 8.0), Seconds(0.0, 1.0, 6.0, 8.0), Seconds(0.0, 1.0, 6.0, 8.0)]
        assert stats.seconds == Seconds(prefill=16.0, draft=3.0, verify=18.0, other=24.0)


def test_clock_is_split_by_phase(ops: Ops) -> None:
    check_phases(ops)
