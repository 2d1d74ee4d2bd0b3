"""The target writes texts: questions of its own and their answers, or answers to given prompts; many at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from speclocal.core.interfaces import Array, Batch, Ops, Scores
from speclocal.train.jobs import Job, Turns
from speclocal.train.store import Store, as_stored

REFILL = 12
"""Free slots are filled so many at a time: one pass over several prompts costs little more than one over one."""
REPEATS, REPEATED = 3, 24
"""A text loops when its last REPEATED tokens or more are a piece written REPEATS times or more."""
PERIOD = 48
"""Longest piece that is looked for."""


@dataclass(frozen=True)
class Limits:
    """How texts are written.

    answer, question: most tokens. shortest: tokens a question must have. slots: texts at once. question_temperature:
    of questions; tokens less likely than `min_p` times the likeliest are not drawn. answer_temperatures: of answers, in
    turn. seed: of all draws.
    """

    answer: int = 256
    question: int = 256
    shortest: int = 3
    slots: int = 96
    question_temperature: float = 1.0
    answer_temperatures: tuple[float, ...] = (0.0, 0.7)
    min_p: float = 0.05
    seed: int = 0


@dataclass
class _Text:
    """A text on its way."""

    job: Job
    slot: int
    ids: list[int]
    own: int
    phase: Literal["question", "answer"]
    begun: int
    forced: list[int]
    temperature: float
    draws: random.Random
    states: list[np.ndarray] = field(default_factory=list)
    best: list[np.ndarray] = field(default_factory=list)


class Writer:
    """Runs a batch of texts until all jobs are done.

    batch: where the target computes, with the taps the store wants. to_numpy: of the backend. progress: is told
    the tokens written so far. slots: of the batch.
    """

    def __init__(
        self,
        ops: Ops,
        batch: Batch,
        to_numpy: Callable[[Array], np.ndarray],
        turns: Turns,
        limits: Limits,
        store: Store,
        progress: Callable[[int], None],
        slots: int,
    ):
        self._ops, self._batch, self._to_numpy = ops, batch, to_numpy
        self._turns, self._limits, self._store, self._progress = turns, limits, store, progress
        self._texts: list[_Text | None] = [None] * slots
        self._waiting: list[Job] = []
        self._asked = {question for text in store.texts if (question := turns.asked(text.ids))}
        self.tokens = 0

    @property
    def active(self) -> int:
        """Texts on their way, or about to be."""
        return sum(text is not None for text in self._texts) + len(self._waiting)

    def run(self, jobs: Iterator[Job], enough: Callable[[], bool]) -> None:
        """Until there are no more jobs, or `enough` says that no new ones are wanted."""
        self._take(jobs, enough, len(self._texts))
        while self._waiting or any(self._texts):
            free = [slot for slot, text in enumerate(self._texts) if text is None]
            if self._waiting and (len(free) >= min(REFILL, len(self._texts)) or len(free) == len(self._texts)):
                self._keep(sorted(range(len(self._texts)), key=self._length))
                self._begin([slot for slot, text in enumerate(self._texts) if text is None])
                self._take(jobs, enough, REFILL)
                continue
            if not self._waiting and len(free) > len(self._texts) // 4:
                self._keep([slot for slot in range(len(self._texts)) if slot not in free])
            self._step()
            self._take(jobs, enough, REFILL)

    def _take(self, jobs: Iterator[Job], enough: Callable[[], bool], count: int) -> None:
        """Jobs to wait for free slots, if none are waiting."""
        if self._waiting:
            return
        while len(self._waiting) < count and not enough() and (job := next(jobs, None)) is not None:
            self._waiting.append(job)

    def _begin(self, free: list[int]) -> None:
        jobs = self._waiting[: min(len(free), REFILL)]
        slots, self._waiting = free[: len(jobs)], self._waiting[len(jobs) :]
        scores = self._batch.read(slots, [job.ids for job in jobs])
        for slot, job in zip(slots, jobs, strict=True):
            self._texts[slot] = _Text(
                job,
                slot,
                list(job.ids),
                len(job.ids),
                "question" if job.asks else "answer",
                len(job.ids) - job.given,
                [],
                self._limits.question_temperature if job.asks else self._temperature(job),
                random.Random(f"{self._limits.seed} {job.number}"),
            )
        self._advance([text for slot in slots if (text := self._texts[slot])], scores, range(len(jobs)))

    def _step(self) -> None:
        tokens = [0 if text is None else text.ids[-1] for text in self._texts]
        scores = self._batch.step(self._ops.array(tokens))
        rows = [slot for slot, text in enumerate(self._texts) if text is not None]
        self._advance([text for text in self._texts if text is not None], scores, rows)

    def _advance(self, texts: list[_Text], scores: Scores, rows: Sequence[int]) -> None:
        """Take the next token of each text, whose scores stand in `rows`."""
        best, drawn = self._draw(scores.logits, texts, rows)
        taps = self._to_numpy(scores.taps)
        for text, row in zip(texts, rows, strict=True):
            fresh = len(text.ids) - sum(map(len, text.states))
            text.states.append(as_stored(taps[row, :fresh]))
            # Of a prompt only the last row's choice is known; its other rows carry no loss.
            text.best.append(np.array([*[-1] * (fresh - 1), best[row]], np.int32))
            self.tokens += 1
            if text.forced:
                text.ids.append(text.forced.pop(0))
            else:
                text.ids.append(drawn[row])
                self._look(text, drawn[row])
        self._progress(self.tokens)

    def _draw(self, logits: Array, texts: list[_Text], rows: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """The likeliest token of every row, and the token drawn for each of `rows`."""
        ops, xp = self._ops, self._ops.xp
        best = xp.argmax(logits, -1)
        warm = [(row, text) for row, text in zip(rows, texts, strict=True) if text.temperature > 0]
        if not warm:
            (chosen,) = ops.to_host(best)
            return chosen, {row: chosen[row] for row in rows}
        heat = ops.array([[1 / text.temperature] for _, text in warm])
        p = xp.softmax(logits[ops.array([row for row, _ in warm])] * heat, -1)
        p = xp.where(p >= self._limits.min_p * ops.top(p, 1)[0], p, 0.0)
        mass = xp.cumsum(p, -1)
        u = ops.array([[text.draws.random()] for _, text in warm])
        picked = (mass < u * mass[:, -1:]).sum(-1)
        chosen, found = ops.to_host(best, picked)
        drawn = {row: chosen[row] for row in rows}
        drawn.update({row: token for (row, _), token in zip(warm, found, strict=True)})
        return chosen, drawn

    def _look(self, text: _Text, token: int) -> None:
        """What the last token means for a text: it goes on, its question ends, or it is finished."""
        limits, turns = self._limits, self._turns
        written = len(text.ids) - text.begun
        if text.phase == "question":
            if token in turns.ends or token == turns.after[0]:
                question = tuple(text.ids[text.begun : -1])
                if len(question) < limits.shortest or question in self._asked:
                    return self._drop(text, "short" if len(question) < limits.shortest else "asked before")
                self._asked.add(question)
                text.ids[-1] = turns.after[0]
                self._answer(text, turns.after[1:])
            elif loops(text.ids[text.begun :]):
                self._drop(text, "repetition")
            elif written >= limits.question:
                self._answer(text, turns.after)
            return
        if token in turns.ends or written >= limits.answer or loops(text.ids[text.begun :]):
            self._finish(text)

    def _answer(self, text: _Text, forced: Sequence[int]) -> None:
        """The question is complete; the template's tokens up to the answer come next."""
        text.forced, text.phase = list(forced), "answer"
        text.begun = len(text.ids) + len(forced)
        text.temperature = self._temperature(text.job)

    def _temperature(self, job: Job) -> float:
        """Of an answer: another one for the same prompt's next turn, and for the next prompt."""
        temperatures = self._limits.answer_temperatures
        return temperatures[(job.number + job.turn) % len(temperatures)]

    def _finish(self, text: _Text) -> None:
        self._store.add(text.job.number, text.ids, text.own, np.concatenate(text.states), np.concatenate(text.best))
        self._leave(text)

    def _drop(self, text: _Text, why: str) -> None:
        self._store.drop(text.job.number, why)
        self._leave(text)

    def _leave(self, text: _Text) -> None:
        self._texts[text.slot] = None
        self._batch.clear([text.slot])

    def _keep(self, slots: list[int]) -> None:
        """Only these slots from now on, in this order: sorted by length they cost least, and no more than are used."""
        self._batch.keep(slots)
        self._texts = [self._texts[slot] for slot in slots]
        for slot, text in enumerate(self._texts):
            if text is not None:
                text.slot = slot

    def _length(self, slot: int) -> int:
        text = self._texts[slot]
        return 0 if text is None else len(text.ids)


def loops(ids: Sequence[int]) -> bool:
    """Whether a text ends in a piece of up to PERIOD tokens that is written over and over."""
    for period in range(1, min(PERIOD, len(ids) // REPEATS) + 1):
        span = max(period * REPEATS, REPEATED)
        if len(ids) >= span and ids[-1] == ids[-1 - period] and ids[-span:-period] == ids[-span + period :]:
            return True
    return False


def describe(limits: Limits) -> dict[str, Any]:
    """What of the limits decides about the texts."""
    return {name: value for name, value in vars(limits).items() if name != "slots"}
