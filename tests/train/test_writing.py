"""Writing texts with a scripted target: what is stored is what it said, and its states are its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speclocal.core.interfaces import Scores
from speclocal.train.jobs import Job
from speclocal.train.store import Store, Written
from speclocal.train.writing import REPEATED, Limits, Writer, loops
from tests.train.fakes import ASSISTANT, END, LINE, OPS, TURNS, USER, VOCAB, Batch, law, open_store, states_of

LIMITS = Limits(answer=20, question=12, shortest=2, slots=5)


def own(count: int, first: int = 0) -> Iterator[Job]:
    """Questions of the target's own; every other one after an opener."""
    for number in range(first, count):
        opener = (4 + number % 7, 11 + number % 5) if number % 2 else ()
        yield Job(number, (USER, *opener), asks=True, given=len(opener))


def given(count: int, first: int = 0) -> Iterator[Job]:
    for number in range(first, count):
        yield Job(number, (USER, *range(4, 5 + number % 9), *TURNS.after), asks=False)


def write(
    store: Store,
    jobs: Iterator[Job],
    limits: Limits = LIMITS,
    slots: int | None = None,
    enough: Callable[[Writer], bool] = lambda writer: False,
    law: Callable[[Sequence[int]], np.ndarray] = law,
    batch: Any = Batch,
) -> Writer:
    slots = slots or limits.slots
    told: list[int] = []
    writer = Writer(OPS, batch(slots, law), np.asarray, TURNS, limits, store, told.append, slots)
    writer.run((job for job in jobs if job.number not in store.jobs), lambda: enough(writer))
    assert told == sorted(told)
    assert not told or told[-1] == writer.tokens
    return writer


def by_job(store: Store) -> dict[int, Written]:
    return dict(zip(_numbers(store), store.texts, strict=True))


def _numbers(store: Store) -> list[int]:
    """Jobs of the texts, in the order of the file."""
    lines = map(json.loads, (store.folder / "texts.jsonl").read_text().splitlines())
    return [line["job"] for line in lines if "ids" in line]


def states_are_own(store: Store) -> None:
    states, best = store.states(), store.best()
    for text in store.texts:
        rows = slice(text.row, text.row + len(text.ids) - 1)
        assert np.array_equal(states[rows], states_of(text.ids))
        likeliest = [int(law(text.ids[: n + 1]).argmax()) for n in range(len(text.ids) - 1)]
        asked = text.own - 1
        assert best[rows].tolist() == [-1] * asked + likeliest[asked:]


def test_questions_then_the_template_then_answers(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, own(60), slots=16)
    assert len(store.texts) + sum(store.dropped.values()) == 60 == len(store.jobs)
    assert len(store.texts) > 20
    for number, text in by_job(store).items():
        opener = 2 if number % 2 else 0
        assert text.own == 1 + opener
        question = TURNS.asked(text.ids)
        assert question is not None
        assert LIMITS.shortest <= len(question) <= LIMITS.question
        assert END not in question
        answer = text.ids[1 + len(question) + len(TURNS.after) :]
        assert 1 <= len(answer) <= LIMITS.answer
        assert END not in answer[:-1]
        ended = answer[-1] == END
        assert ended or len(answer) == LIMITS.answer or loops(answer)
        if number % len(LIMITS.answer_temperatures) == 0:
            begun = len(text.ids) - len(answer)
            for n in range(begun, len(text.ids)):
                assert text.ids[n] == law(text.ids[:n]).argmax(), "temperature 0 takes the likeliest"
    states_are_own(store)


def test_questions_cut_at_their_longest_are_answered_too(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, own(12), replace(LIMITS, question=3))
    asked = [len(TURNS.asked(text.ids) or ()) for text in store.texts]
    assert 3 in asked
    assert max(asked) <= 3
    states_are_own(store)


def test_given_prompts_are_answered(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, given(20))
    assert len(store.texts) == 20, "nothing is left out of answers"
    for number, text in by_job(store).items():
        prompt = next(islice(given(20), number, None)).ids
        assert text.ids[: text.own] == prompt
        assert len(text.ids) > len(prompt)
    states_are_own(store)


def texts_of(folder: Path, slots: int, jobs: Callable[[int], Iterator[Job]] = own, **changes: Any) -> dict[int, Any]:
    store = open_store(folder)
    write(store, jobs(30), replace(LIMITS, slots=slots, **changes))
    return {number: text.ids for number, text in by_job(store).items()}


@pytest.mark.parametrize("jobs", [own, given])
def test_texts_do_not_depend_on_the_number_of_slots(tmp_path: Path, jobs: Any) -> None:
    found = [texts_of(tmp_path / f"{slots}", slots, jobs) for slots in (1, 4, 16, 30)]
    assert found[0] == found[1] == found[2] == found[3]
    assert texts_of(tmp_path / "other", 4, jobs, seed=1) != found[0]


def one_source_of_chance(original: Any) -> Any:
    """All texts draw from the same numbers, so that a text's depend on its neighbours."""
    shared = random.Random(0)

    def draw(self: Writer, logits: Any, texts: list[Any], rows: Any) -> Any:
        for text in texts:
            text.draws = shared
        return original(self, logits, texts, rows)

    return draw


def test_shared_chance_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "_draw", one_source_of_chance(Writer._draw))
    with pytest.raises(AssertionError):
        test_texts_do_not_depend_on_the_number_of_slots(tmp_path, own)


class Neighbour(Batch):
    """Gives every row the taps of the row after it."""

    def step(self, tokens: np.ndarray) -> Scores:
        scores = super().step(tokens)
        return Scores(scores.logits, np.roll(scores.taps, 1, 0))


class Unsorted(Batch):
    """Stays as it was when slots are put in another order."""

    def keep(self, slots: Sequence[int]) -> None:
        self.texts = [self.texts[slot] for slot in sorted(slots)]


@pytest.mark.parametrize("batch", [Neighbour, Unsorted])
def test_a_neighbours_states_are_caught(tmp_path: Path, batch: Any) -> None:
    with pytest.raises(AssertionError):
        states_are_own(write(open_store(tmp_path), own(60), slots=16, batch=batch)._store)


def test_enough_is_respected(tmp_path: Path) -> None:
    """However many are left out, there are exactly as many texts as are wanted."""
    for wanted in (1, 3, 17, 40):
        for slots in (1, 5, 16):
            store = open_store(tmp_path / f"{wanted} {slots}")

            def enough(writer: Writer, store: Store = store, wanted: int = wanted) -> bool:
                return len(store.texts) + writer.active >= wanted

            write(store, own(10**6), slots=min(slots, wanted), enough=enough)
            assert len(store.texts) == wanted, (wanted, slots)


def test_forgetting_those_that_wait_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writer, "active", property(lambda self: sum(text is not None for text in self._texts)))
    with pytest.raises(AssertionError):
        test_enough_is_respected(tmp_path)


class StopError(Exception):
    pass


class Dying(Batch):
    """Ends after some passes, as a killed process does."""

    left = 40

    def step(self, tokens: np.ndarray) -> Scores:
        self.left -= 1
        if not self.left:
            raise StopError
        return super().step(tokens)


def test_resumed_texts_are_those_of_one_run(tmp_path: Path) -> None:
    whole = open_store(tmp_path / "whole")
    write(whole, own(80))
    ends = 0
    for _ in range(30):
        store = open_store(tmp_path / "cut")
        before = len(store.jobs)
        try:
            write(store, own(80), slots=16, batch=Dying)
            break
        except StopError:
            ends += 1
            assert len(store.jobs) >= before
    assert ends > 1
    assert len(set(_numbers(store))) == len(_numbers(store)), "no job twice"
    assert by_job(store).keys() == by_job(whole).keys()
    assert all(by_job(store)[job].ids == text.ids for job, text in by_job(whole).items())
    states_are_own(store)


def certain(*script: int) -> Callable[[Sequence[int]], np.ndarray]:
    """A target that says these tokens after its first one, then only the last of them."""

    def law(ids: Sequence[int]) -> np.ndarray:
        logits = np.full(VOCAB, -50.0)
        logits[script[min(len(ids) - 1, len(script) - 1)]] = 50.0
        return logits

    return law


@pytest.mark.parametrize(
    ("script", "why"),
    [((9, END), "short"), ((END,), "short"), ((9, 9, 9, 9), "repetition"), ((9, 10, 11, 12, END), "asked before")],
)
def test_filters(tmp_path: Path, script: tuple[int, ...], why: str) -> None:
    limits = replace(LIMITS, question=60)
    jobs = [Job(number, (USER,), asks=True) for number in range(3)]
    store = open_store(tmp_path)
    write(store, iter(jobs), limits, law=certain(*script))
    kept = 1 if why == "asked before" else 0
    assert (len(store.texts), store.dropped) == (kept, {why: 3 - kept})
    assert open_store(tmp_path).jobs == {0, 1, 2}
    if why == "asked before":
        del store  # it holds the folder
        again = open_store(tmp_path)
        write(again, iter([Job(3, (USER,), asks=True)]), limits, law=certain(*script))
        assert again.dropped == {why: 3}, "also after a resume"


def test_what_ends_an_answer(tmp_path: Path) -> None:
    """Its end token, its longest, or a loop; the end token is stored."""
    limits = replace(LIMITS, answer=40)
    prompt = Job(0, (USER,), asks=False)
    for script, wanted in (
        ((9, 10, END), (9, 10, END)),
        (tuple(range(4, 24)) * 3, (tuple(range(4, 24)) * 3)[:40]),
        ((9,), (9,) * REPEATED),
    ):
        store = open_store(tmp_path / f"{len(script)}")
        write(store, iter([prompt]), limits, law=certain(*script))
        assert store.texts[0].ids == (USER, *wanted)


def test_forced_tokens_end_nothing(tmp_path: Path) -> None:
    """A template may close a turn with a token that ends answers."""
    turns = replace(TURNS, after=(END, ASSISTANT, END))
    store = open_store(tmp_path)
    batch = Batch(1, certain(9, 10, END, END, END, 11, 12, END))
    writer = Writer(OPS, batch, np.asarray, turns, LIMITS, store, lambda tokens: None, 1)
    writer.run(iter([Job(0, (USER,), asks=True)]), lambda: False)
    assert store.texts[0].ids == (USER, 9, 10, END, ASSISTANT, END, 11, 12, END)


def test_the_same_prompt_gets_every_temperature(tmp_path: Path) -> None:
    ids = (USER, 5, *TURNS.after)
    jobs = [Job(number, ids, asks=False, turn=number // 2) for number in range(4)]
    store = open_store(tmp_path)
    writer = write(store, iter(jobs))
    assert [writer._temperature(job) for job in jobs] == [0.0, 0.7, 0.7, 0.0]


def test_fewer_slots_at_the_end(tmp_path: Path) -> None:
    """The last texts are not computed beside empty slots."""
    store = open_store(tmp_path)
    batch = Batch(16)
    writer = Writer(OPS, batch, np.asarray, TURNS, LIMITS, store, lambda tokens: None, 16)
    writer.run(own(48), lambda: False)
    assert batch.widths[0] > 8
    assert batch.widths[-1] <= 2
    assert np.diff(batch.widths).max(initial=0) <= 0


def test_drawn_as_often_as_the_law_says(tmp_path: Path) -> None:
    """Tokens below min_p of the likeliest never; the others by their share."""
    p = np.full(VOCAB, 1e-12)
    p[[5, 6, 7, 8]] = 0.5, 0.3, 0.19, 0.01
    limits = replace(LIMITS, answer=1, answer_temperatures=(1.0,), min_p=0.05)
    store = open_store(tmp_path)
    write(store, given(3000), limits, slots=64, law=lambda ids: np.log(p))
    got = np.bincount([text.ids[-1] for text in store.texts], minlength=VOCAB) / 3000
    wanted = np.where(p >= 0.05 * 0.5, p, 0) / 0.99
    assert np.abs(got - wanted).max() < 5 * np.sqrt(0.25 / 3000)
    assert got[8] == 0
    assert got[[5, 6, 7]].sum() == 1


def test_numbers_of_jobs_may_have_gaps(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, (Job(7 * n, (USER, 5 + n, LINE), asks=False) for n in islice(count(), 6)))
    assert store.jobs == {0, 7, 14, 21, 28, 35}
