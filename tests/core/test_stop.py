"""STP: a text ends at the first reason, token by token, inside an accepted block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speclocal.core.decode import Round
from speclocal.core.interfaces import Acceptance, Ops, Origin
from speclocal.core.sampling import Sampling
from speclocal.core.stop import Stop
from speclocal.core.tree import DraftTree
from speclocal.drafters import none, scripted
from tests.toys import HashTarget, generate, text

VOCAB = 50
PROMPT = [3, 1, 4]
GREEDY = Sampling()


def plain(ops: Ops, count: int) -> list[int]:
    return text(generate(HashTarget(ops, VOCAB), none.Drafter(), PROMPT, GREEDY, count))


def oracle(ops: Ops, depth: int) -> scripted.Drafter:
    known = (*PROMPT, *plain(ops, 60))
    return scripted.Drafter(scripted.Settings("oracle", known, depth, vocab=VOCAB))


def run(ops: Ops, depth: int, count: int, **more: Any) -> tuple[HashTarget, list[Round]]:
    target = HashTarget(ops, VOCAB)
    return target, list(generate(target, oracle(ops, depth), PROMPT, GREEDY, count, **more))


def check_end_token(ops: Ops) -> None:
    """STP-01: the end token falls first, in the middle, last of a block, or is the target's own."""
    words = plain(ops, 40)
    for position in range(1, 14):
        end = words[position]
        expected = words[: words.index(end) + 1]
        for depth in (1, 4, 5, 8):
            target, rounds = run(ops, depth, 40, end_ids=[end])
            assert [t for r in rounds for t in r.tokens] == expected
            assert [r.finish for r in rounds] == [None] * (len(rounds) - 1) + ["stop"]
            assert target.cached == (*PROMPT, *expected[:-1]), "the last token stays out of the cache, later ones too"
            for r in rounds:
                assert len(r.origins) == len(r.tokens)


def test_end_token(ops: Ops) -> None:
    check_end_token(ops)


def check_limits(ops: Ops) -> None:
    """STP-03: exactly the limit, and the last round drafts no more than it needs."""
    words = plain(ops, 40)
    for count in (1, 2, 7, 8, 9, 10, 17):
        target, rounds = run(ops, 8, count)
        assert [t for r in rounds for t in r.tokens] == words[:count]
        assert rounds[-1].finish == "length"
        assert target.cached == (*PROMPT, *words[: count - 1])
        left = count
        for r in rounds:
            assert max(r.tree.depth) <= left - 1
            left -= len(r.tokens)


def test_limits(ops: Ops) -> None:
    check_limits(ops)


def test_no_tokens_no_work(ops: Ops) -> None:
    """STP-06: a limit of 0 touches no model."""
    target = HashTarget(ops, VOCAB)
    assert not list(generate(target, none.Drafter(), PROMPT, GREEDY, 0))
    assert target.passes == 0


def check_stop_strings(ops: Ops) -> None:
    """STP-02: the matcher sees each emitted token once, in order, and none after the match."""
    words = plain(ops, 40)
    for hit in range(12):
        seen: list[int] = []

        def matches(token: int, hit: int = hit, seen: list[int] = seen) -> bool:
            seen.append(token)
            return len(seen) == hit + 1

        target, rounds = run(ops, 5, 40, matches=matches)
        assert [t for r in rounds for t in r.tokens] == words[: hit + 1] == seen
        assert rounds[-1].finish == "stop"
        assert target.cached == (*PROMPT, *words[:hit])


def test_stop_strings(ops: Ops) -> None:
    check_stop_strings(ops)


TREE = DraftTree((9, 1, 2, 3), (-1, 0, 1, 2))
TAKEN = Acceptance((1, 2, 3), 4, Origin.BONUS)


CUTS: list[tuple[Callable[[], Stop], tuple[int, ...], Origin, str | None]] = [
    (lambda: Stop(9), (1, 2, 3, 4), Origin.BONUS, None),
    (lambda: Stop(4), (1, 2, 3, 4), Origin.BONUS, "length"),
    (lambda: Stop(3), (1, 2, 3), Origin.ACCEPTED, "length"),
    (lambda: Stop(1), (1,), Origin.ACCEPTED, "length"),
    (lambda: Stop(9, {1}), (1,), Origin.ACCEPTED, "stop"),
    (lambda: Stop(9, {2, 3}), (1, 2), Origin.ACCEPTED, "stop"),
    (lambda: Stop(9, {4}), (1, 2, 3, 4), Origin.BONUS, "stop"),
    (lambda: Stop(3, {3}), (1, 2, 3), Origin.ACCEPTED, "stop"),
    (lambda: Stop(9, {3}, lambda token: token == 2), (1, 2), Origin.ACCEPTED, "stop"),
]


def check_cuts(ops: Ops | None = None) -> None:
    """What is left of one block of three drafts and a bonus, and why."""
    for make, tokens, origin, reason in CUTS:
        asked = make()
        before = asked.left
        kept, why = asked.cut(TAKEN, TREE)
        assert (kept.tokens(TREE), kept.origin, why) == (tokens, origin, reason)
        assert before - asked.left == len(tokens), "only emitted tokens count"


def test_cuts() -> None:
    check_cuts()


def test_an_end_token_that_is_refused_ends_nothing(ops: Ops) -> None:
    """Drafted below or beside the path, it is neither emitted nor looked at."""
    words = plain(ops, 12)
    end = next(t for t in range(VOCAB) if t not in words)
    drafter = scripted.Drafter(plan=lambda tokens, limit: [[end], [end, end]])
    rounds = list(generate(HashTarget(ops, VOCAB), drafter, PROMPT, GREEDY, 12, end_ids=[end]))
    assert [t for r in rounds for t in r.tokens] == words
    assert rounds[-1].finish == "length"
