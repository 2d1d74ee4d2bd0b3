"""An incremental suffix automaton: which continuations followed the longest suffix of a text that occurred before.

Blumer et al. 1985. Each new token costs amortised O(1), whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Iterator

RECOUNTED = 16
"""Suffixes (longest first) whose occurrence counts are updated per token; bounds the cost in repetitive text."""


class SuffixAutomaton:
    """States stand for sets of substrings with the same ends. State 0 is the empty string.

    length: longest substring of the state.  link: state of its longest suffix that occurs elsewhere too.
    next: token -> state.  count: occurrences seen.  last: index of the latest occurrence's final token.
    """

    def __init__(self) -> None:
        self.length = [0]
        self.link = [-1]
        self.next: list[dict[int, int]] = [{}]
        self.count = [0]
        self.last = [-1]
        self._end = 0
        self.size = 0

    def _state(self, length: int, link: int, next: dict[int, int], count: int, last: int) -> int:
        self.length.append(length)
        self.link.append(link)
        self.next.append(next)
        self.count.append(count)
        self.last.append(last)
        return len(self.length) - 1

    def append(self, token: int) -> None:
        """Add one token to the text."""
        new = self._state(self.length[self._end] + 1, 0, {}, 0, -1)
        state = self._end
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._split(state, token)
        self._end = new
        for state in self._suffixes(new, RECOUNTED):
            self.count[state] += 1
            self.last[state] = self.size
        self.size += 1

    def _split(self, state: int, token: int) -> int:
        """The state of exactly `state`'s longest substring followed by `token`, cloned off a longer one if needed."""
        onward = self.next[state][token]
        length = self.length[state] + 1
        if self.length[onward] == length:
            return onward
        clone = self._state(length, self.link[onward], dict(self.next[onward]), self.count[onward], self.last[onward])
        while state >= 0 and self.next[state].get(token) == onward:
            self.next[state][token] = clone
            state = self.link[state]
        self.link[onward] = clone
        return clone

    def _suffixes(self, state: int, most: int) -> Iterator[int]:
        while state > 0 and most:
            yield state
            state = self.link[state]
            most -= 1

    def matches(self, most: int) -> Iterator[int]:
        """States of the suffixes of the text that also occurred before, longest first, at most `most`."""
        return self._suffixes(self.link[self._end], most) if self.size else iter(())
