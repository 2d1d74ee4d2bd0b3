"""Rounds of the loop become text: what to show as each ends, and the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from speclocal.core.decode import Round
from speclocal.core.interfaces import Origin
from speclocal.core.sampling import Sampling
from speclocal.core.stats import Stats
from speclocal.text import StopStrings, Text


@dataclass(frozen=True)
class Piece:
    """Text that became visible, all of one origin."""

    text: str
    origin: Origin


@dataclass(frozen=True)
class Step:
    """What one round adds to the screen. `rejected` is the drafted text the target refused, "" if none."""

    pieces: tuple[Piece, ...]
    rejected: str


@dataclass(frozen=True)
class Answer:
    """A finished (or interrupted) generation; `text`, `token_ids`, `origins` and the counts agree.

    finish_reason: `stop`, `length` or `interrupted`.
    caveat: in which way the text is not lossless; "" for none (see `Header`). notices: what turned out on the way.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    stats: Stats
    seed: int
    caveat: str = ""
    notices: tuple[str, ...] = ()


class Stream(Iterator[Step]):
    """One generation. Iterate to get steps as rounds end; `answer()` is valid at any time, also after an interrupt.

    judge: what to say of the counts of a generation, if anything; asked once.
    """

    def __init__(
        self,
        text: Text,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stops: Sequence[str],
        start: Callable[[Callable[[int], bool]], Iterator[Round]],
        cached: Callable[[], int],
        caveat: str = "",
        judge: Callable[[Stats], tuple[str, ...]] = lambda stats: (),
    ):
        self.prompt_ids = tuple(prompt_ids)
        self._text, self._sampling, self._cached = text, sampling, cached
        self._detokenizer, self._stops = text.detokenizer(), StopStrings(stops)
        # Only stop strings need the text before the loop goes on; without them it is decoded while the device works.
        self._early = bool(stops)
        self._rounds = start(self._push if stops else lambda token: False)
        self._stats = Stats()
        self._caveat, self._judge = caveat, judge
        self._notices: tuple[str, ...] | None = None
        self._finish = "interrupted"
        self._ids: list[int] = []
        self._origins: list[Origin] = []
        self._spans: list[int] = []
        self._shown = ""
        self._length = 0
        self._stopped = False
        self._texts: list[str] = []
        self._ready = ""
        self._waiting: deque[tuple[str, Origin]] = deque()

    def _push(self, token: int) -> bool:
        """Decode one more emitted token; True once the text holds a stop string."""
        self._spans.append(self._length)
        text = self._detokenizer.push(token)
        self._length += len(text)
        self._texts.append(text)
        safe, self._stopped = self._stops.push(text)
        self._ready += safe
        return self._stopped

    def __next__(self) -> Step:
        round = next(self._rounds, None)
        if round is None:
            if not self._stats.rounds:
                self._finish = "length"
            raise StopIteration
        if not self._early:
            for token in round.tokens:
                self._push(token)
        self._stats.add(round)
        self._ids.extend(round.tokens)
        self._origins.extend(round.origins)
        self._waiting.extend(zip(self._texts, round.origins, strict=True))
        self._texts.clear()
        if round.finish:
            self._end(round.finish)
        return Step(self._release(), self._rejected(round))

    def _end(self, finish: str) -> None:
        self._finish = finish
        if self._stopped:
            # Tokens that only spell the stop string are no part of the answer.
            kept = len(self._shown) + len(self._ready)
            while self._ids and self._spans[-1] >= kept:
                for column in (self._ids, self._origins, self._spans):
                    column.pop()
            self._stats.tokens = len(self._ids)
            return
        rest = self._detokenizer.flush()
        if rest:
            self._waiting.append((rest, self._origins[-1]))
        self._ready += self._stops.push(rest)[0] + self._stops.flush()

    def _release(self) -> tuple[Piece, ...]:
        """Text that may be shown now, cut where the origin changes."""
        pieces: list[Piece] = []
        ready, self._ready = self._ready, ""
        self._shown += ready
        while ready:
            text, origin = self._waiting.popleft()
            taken, left = text[: len(ready)], text[len(ready) :]
            ready = ready[len(taken) :]
            if left:
                self._waiting.appendleft((left, origin))
            if pieces and pieces[-1].origin == origin:
                pieces[-1] = Piece(pieces[-1].text + taken, origin)
            elif taken:
                pieces.append(Piece(taken, origin))
        return tuple(pieces)

    def _rejected(self, round: Round) -> str:
        """The drafted text the target refused: the first refused branch."""
        node, tokens = round.path[-1] if round.path else 0, []
        while round.tree.children[node]:
            node = round.tree.children[node][0]
            tokens.append(round.tree.tokens[node])
        return self._text.decode(tokens) if tokens else ""

    def answer(self) -> Answer:
        """The answer so far."""
        if self._notices is None:
            self._notices = self._judge(self._stats)
        return Answer(
            # What was held back, in case it began a stop string, belongs to an answer that was cut short.
            text=self._text.decode(self._ids) if self._finish == "interrupted" else self._shown,
            token_ids=tuple(self._ids),
            origins=tuple(self._origins),
            finish_reason=self._finish,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self._cached(),
            stats=self._stats,
            seed=self._sampling.seed,
            caveat=self._caveat,
            notices=self._notices,
        )
