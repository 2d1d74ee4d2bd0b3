"""When a stream decodes text: after the next pass was submitted, unless a stop string may end the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from speclocal.core.decode import Round
from speclocal.core.interfaces import Ops, Origin
from speclocal.core.sampling import Sampling
from speclocal.core.stats import Seconds
from speclocal.core.tree import DraftTree
from speclocal.stream import Stream

ROUNDS = ((1, 2), (3,), (4, 5, 6))
LETTERS = " abcdef"


def told(stops: tuple[str, ...]) -> tuple[list[str], Stream]:
    """What happened in which order, and the stream, of three rounds that spell "abcdef"."""
    seen: list[str] = []

    def push(token: int) -> str:
        seen.append(LETTERS[token])
        return LETTERS[token]

    def start(matches: Callable[[int], bool]) -> Iterator[Round]:
        for tokens in ROUNDS:
            found = any(matches(token) for token in tokens)
            finish = "stop" if found else "length" if tokens == ROUNDS[-1] else None
            seen.append("submit" if not finish else "end")
            tree = DraftTree.chain(0)
            yield Round(tokens, (Origin.PLAIN,) * len(tokens), tree, (), Seconds(), finish)

    text: Any = SimpleNamespace(
        detokenizer=lambda: SimpleNamespace(push=push, flush=lambda: ""),
        decode=lambda ids: "".join(LETTERS[i] for i in ids),
    )
    return seen, Stream(text, [0], Sampling(), stops, start, lambda: 0)


def check_decoding(ops: Ops | None = None) -> None:
    """Without stop strings the loop never waits for text; with them it must. Steps and answer are the same."""
    seen, stream = told(())
    plain = [[p.text for p in step.pieces] for step in stream]
    assert seen == ["submit", "a", "b", "submit", "c", "end", "d", "e", "f"]
    assert plain == [["ab"], ["c"], ["def"]]
    answer = stream.answer()
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("abcdef", (1, 2, 3, 4, 5, 6), "length")
    seen, stream = told(("zz",))
    assert [[p.text for p in step.pieces] for step in stream] == plain
    assert seen == ["a", "b", "submit", "c", "submit", "d", "e", "f", "end"]
    assert stream.answer() == answer


def test_decoding() -> None:
    check_decoding()


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_interrupted(stops: tuple[str, ...]) -> None:
    """The answer so far is that of the rounds that arrived."""
    _, stream = told(stops)
    next(stream)
    answer = stream.answer()
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("ab", (1, 2), "interrupted")
