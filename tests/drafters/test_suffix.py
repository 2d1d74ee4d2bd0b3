"""The suffix automaton against a naive search, and its cost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speclocal.drafters.suffix import RECOUNTED, SuffixAutomaton


def automaton(tokens: list[int]) -> SuffixAutomaton:
    text = SuffixAutomaton()
    for token in tokens:
        text.append(token)
    return text


def naive_longest(tokens: list[int]) -> int:
    """Length of the longest suffix that also ends earlier."""
    n = len(tokens)
    for length in range(n - 1, 0, -1):
        suffix = tokens[n - length :]
        if any(tokens[end - length : end] == suffix for end in range(length, n)):
            return length
    return 0


def naive_next(tokens: list[int], length: int) -> Counter[int]:
    """What followed earlier occurrences of the last `length` tokens, with counts."""
    n = len(tokens)
    suffix = tokens[n - length :]
    return Counter(tokens[end] for end in range(length, n) if tokens[end - length : end] == suffix)


@given(st.lists(st.integers(0, 3), max_size=60))
def test_longest_suffix_and_its_continuations(tokens: list[int]) -> None:
    text = automaton(tokens)
    longest = next((text.length[s] for s in text.matches(1)), 0)
    assert longest == naive_longest(tokens)
    for state in text.matches(3):
        expected = naive_next(tokens, text.length[state])
        assert set(text.next[state]) == set(expected)


@given(st.lists(st.integers(0, 4), max_size=40))
def test_counts_of_continuations(tokens: list[int]) -> None:
    """Exact as long as no suffix chain is longer than what is recounted per token."""
    text = automaton(tokens)
    chains = [sum(1 for _ in automaton(tokens[:i]).matches(99)) for i in range(len(tokens) + 1)]
    if max(chains, default=0) >= RECOUNTED:
        return
    for state in text.matches(99):
        followed = {token: text.count[onward] for token, onward in text.next[state].items()}
        expected = naive_next(tokens, text.length[state])
        assert all(followed[token] >= n for token, n in expected.items())


@pytest.mark.parametrize("kind", ["random", "repetitive", "constant", "words"])
def test_cost_per_token_does_not_grow(kind: str) -> None:
    """States and transitions stay linear in the text (at most 2n and 3n), so tokens cost O(1) amortised at 100k."""
    draw, n = random.Random(1), 100_000
    tokens = {
        "random": lambda: [draw.randrange(5000) for _ in range(n)],
        "repetitive": lambda: ([draw.randrange(50) for _ in range(100)] * (n // 100 + 1))[:n],
        "constant": lambda: [7] * n,
        "words": lambda: [int(draw.paretovariate(0.7)) % 30_000 for _ in range(n)],
    }[kind]()
    text = automaton(tokens)
    assert text.size == n
    assert len(text.length) <= 2 * n
    assert sum(map(len, text.next)) <= 3 * n


def test_latest_occurrence_is_known() -> None:
    text = automaton([1, 2, 3, 9, 1, 2, 4, 9, 1, 2])
    state = next(text.matches(1))
    assert text.length[state] == 3
    assert text.next[state].keys() == {4}
    shorter = [s for s in text.matches(5) if text.length[s] == 2]
    assert text.next[shorter[0]].keys() == {3, 4}
    assert text.last[text.next[shorter[0]][4]] == 6
