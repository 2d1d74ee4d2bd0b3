"""How much may be drafted."""

from __future__ import annotations

import pytest

from speclocal.core.budget import Budget
from speclocal.core.interfaces import Acceptance, Limit, Origin
from speclocal.core.tree import DraftTree

DRAFT = DraftTree.chain(0, [1, 2])
HIT = Acceptance((1,), 5, Origin.RECOVERED)
MISS = Acceptance((), 5, Origin.RECOVERED)
NONE = DraftTree.chain(0)


@pytest.mark.parametrize(("left", "depth"), [(100, 8), (9, 8), (8, 7), (2, 1)])
def test_the_target_adds_one_token_itself(left: int, depth: int) -> None:
    """A draft is never longer than what may still be emitted, less the target's own token."""
    assert Budget(Limit(8, 20)).now(left) == Limit(depth, 20)


def test_the_last_token_needs_no_draft() -> None:
    assert Budget(Limit(8, 20)).now(1) == Limit(0, 0)


def test_no_limit_means_no_draft() -> None:
    """PRF-05: a draft length of 0 is plain decoding."""
    assert Budget(Limit(0, 0)).now(100) == Limit(0, 0)


def pauses(budget: Budget, outcome: Acceptance, rounds: int) -> list[int]:
    """Rounds without drafting between drafted rounds."""
    out, resting = [], 0
    for _ in range(rounds):
        if budget.now(100).depth:
            out.append(resting)
            resting = 0
            budget.learn(DRAFT, outcome)
        else:
            resting += 1
            budget.learn(NONE, Acceptance((), 5, Origin.PLAIN))
    return out


def test_misses_are_backed_off() -> None:
    assert pauses(Budget(Limit(4, 4), misses=2, pause=2, longest=8), MISS, 60) == [0, 0, 2, 4, 8, 8, 8, 8, 8]


def test_by_default_drafting_never_pauses() -> None:
    assert pauses(Budget(Limit(4, 4)), MISS, 50) == [0] * 50


def test_accepted_drafts_never_pause() -> None:
    assert pauses(Budget(Limit(4, 4), misses=1), HIT, 50) == [0] * 50


def test_a_hit_forgets_the_misses() -> None:
    budget = Budget(Limit(4, 4), misses=2, pause=2)
    assert pauses(budget, MISS, 5) == [0, 0, 2]
    assert budget.now(100).depth == 0
    while not budget.now(100).depth:
        pass
    budget.learn(DRAFT, HIT)
    assert pauses(budget, MISS, 5) == [0, 0, 2]


def test_rounds_without_a_draft_are_no_misses() -> None:
    budget = Budget(Limit(4, 4), misses=1)
    for _ in range(5):
        budget.learn(NONE, Acceptance((), 5, Origin.PLAIN))
        assert budget.now(100) == Limit(4, 4)
