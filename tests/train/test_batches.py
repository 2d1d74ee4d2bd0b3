"""Batches: every text once an epoch, none too large, rows that are those of their texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speclocal.train import batches as module
from speclocal.train.batches import Reader, plan, split
from speclocal.train.states import Stored
from speclocal.train.store import Store
from tests.train.fakes import HIDDEN, TAPS, add, open_store, states_of


def lengths(count: int = 300) -> list[int]:
    return np.random.default_rng(0).integers(5, 90, count).tolist()


@pytest.mark.parametrize("rows", [1, 64, 256, 10**6])
def test_every_text_once_and_no_batch_too_large(rows: int) -> None:
    sizes, numbers = lengths(), list(range(3, 280))
    for epoch in range(3):
        made = plan(sizes, numbers, rows, seed=0, epoch=epoch)
        assert sorted(i for batch in made for i in batch) == numbers
        assert all(len(batch) == 1 or len(batch) * max(sizes[i] for i in batch) <= rows for batch in made)


def test_order_is_decided_by_seed_and_epoch() -> None:
    sizes, numbers = lengths(), list(range(300))
    made = {(seed, epoch): plan(sizes, numbers, 256, seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert made[0, 0] == plan(sizes, numbers, 256, 0, 0)
    assert len({str(batches) for batches in made.values()}) == 4


def test_little_padding() -> None:
    sizes, numbers = lengths(), list(range(300))
    made = plan(sizes, numbers, 512, 0, 0)
    padded = sum(len(batch) * max(sizes[i] for i in batch) for batch in made)
    assert padded < 1.15 * sum(sizes)


def test_nothing_to_plan() -> None:
    assert plan([], [], 256, 0, 0) == []


def test_held_out_texts_are_no_others() -> None:
    train, held = split(100, 0.1, 0)
    assert (len(train), len(held)) == (90, 10)
    assert sorted(train + held) == list(range(100))
    assert split(100, 0.1, 0) == (train, held) != split(100, 0.1, 1)
    assert split(100, 0.0, 0) == (list(range(100)), [])
    assert [len(part) for part in split(2, 0.01, 0)] == [1, 1]
    assert split(1, 0.5, 0) == ([0], [])
    assert split(0, 0.5, 0) == ([], [])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(tmp_path)
    add(made, 0, (5, 6, 7, 8, 9), own=3)
    add(made, 1, (10, 11), own=1)
    add(made, 2, (12, 13, 14), own=0)
    return made


def rows_are_theirs(store: Store, longest: int) -> None:
    numbers = [2, 0, 1]
    rows = Reader(store, Stored(store), longest).rows(numbers)
    size = min(max(len(store.texts[i].ids) - 1 for i in numbers), longest)
    assert rows.tokens.shape == rows.best.shape == rows.own.shape == (3, size)
    assert rows.states.shape == (3, size, len(TAPS), HIDDEN)
    assert (rows.tokens.dtype, rows.states.dtype, rows.own.dtype) == (np.int32, np.float16, np.bool_)
    real = 0
    for b, i in enumerate(numbers):
        text = store.texts[i]
        n = min(len(text.ids) - 1, longest)
        for r in range(n):
            assert rows.tokens[b, r] == text.ids[r + 1]
            assert np.array_equal(rows.states[b, r], states_of(text.ids)[r])
            assert rows.best[b, r] == 100 * i + r
            assert rows.own[b, r] == (r + 1 >= text.own), "whether the target wrote the token after the row"
        assert (rows.tokens[b, n:] == -1).all()
        assert (rows.best[b, n:] == -1).all()
        assert not rows.own[b, n:].any()
        assert not rows.states[b, n:].any()
        real += n
    assert rows.real == real


@pytest.mark.parametrize("longest", [1, 3, 100])
def test_rows(store: Store, longest: int) -> None:
    rows_are_theirs(store, longest)


def off_by_one(original: Any) -> Any:
    def rows(self: Any, numbers: Any) -> Any:
        made = original(self, numbers)
        made.own[:] = np.roll(made.own, 1, 1)
        return made

    return rows


def neighbours_states(original: Any) -> Any:
    def rows(self: Any, numbers: Any) -> Any:
        made = original(self, numbers)
        made.states[:] = made.states[::-1].copy()
        return made

    return rows


@pytest.mark.parametrize("spoil", [off_by_one, neighbours_states])
def test_other_rows_are_caught(store: Store, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(module.Reader, "rows", spoil(module.Reader.rows))
    with pytest.raises(AssertionError):
        rows_are_theirs(store, 100)
