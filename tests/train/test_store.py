"""Stored texts: whatever cut the files, what is read is what was written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from speclocal.errors import ModelError, UsageError
from speclocal.train import store as module
from speclocal.train.store import ABOUT, BEST, LINES, STATES, Store
from tests.train.fakes import HIDDEN, TAPS, add, open_store, states_of

TEXTS = {0: (5, 6, 7), 3: (8, 9), 1: (10, 11, 12, 13, 14), 7: (15, 16)}
ROW = 2 * len(TAPS) * HIDDEN


def fill(folder: Path) -> Path:
    store = open_store(folder)
    for job, ids in TEXTS.items():
        add(store, job, ids)
        if job == 3:
            store.drop(2, "short")
    return folder


def agrees(store: Store) -> None:
    """Every text that is there has its own states and choices."""
    states, best = store.states(), store.best()
    wanted = list(TEXTS.items())[: len(store.texts)]
    for text, (job, ids) in zip(store.texts, wanted, strict=True):
        assert text.ids == ids
        rows = slice(text.row, text.row + len(ids) - 1)
        assert np.array_equal(states[rows], states_of(ids))
        assert best[rows].tolist() == [100 * job + n for n in range(len(ids) - 1)]
        assert job in store.jobs
    assert store.rows == sum(len(text.ids) - 1 for text in store.texts) == len(states) == len(best)


def cut(folder: Path, name: str, size: int) -> None:
    os.truncate(folder / name, size)


def test_texts_come_back_as_they_were_written(tmp_path: Path) -> None:
    store = open_store(fill(tmp_path))
    agrees(store)
    assert len(store.texts) == len(TEXTS)
    assert store.jobs == {*TEXTS, 2}
    assert store.dropped == {"short": 1}
    line = json.loads((tmp_path / LINES).read_text().splitlines()[1])
    assert line == {"job": 3, "ids": [8, 9], "own": 1, "row": 2}


@pytest.mark.parametrize("name", [LINES, STATES, BEST])
def test_cut_anywhere_and_gone_on(tmp_path: Path, name: str) -> None:
    """Of each file, every length it may have been left with."""
    whole = fill(tmp_path / "whole")
    for size in range((whole / name).stat().st_size):
        folder = tmp_path / f"{size}"
        shutil.copytree(whole, folder)
        cut(folder, name, size)
        store = open_store(folder)
        agrees(store)
        for job, ids in list(TEXTS.items())[len(store.texts) :]:
            add(store, job, ids)
        agrees(store)
        again = open_store(folder)
        agrees(again)
        assert len(again.texts) == len(TEXTS)


def test_rows_without_a_line_are_cut_off(tmp_path: Path) -> None:
    """Killed between the states and the line that speaks of them."""
    fill(tmp_path)
    for name in (STATES, BEST):
        with (tmp_path / name).open("ab") as file:
            file.write(b"\x3c" * 50)
    store = open_store(tmp_path)
    agrees(store)
    add(store, 9, (20, 21, 22))
    again = open_store(tmp_path)
    assert np.array_equal(again.states()[-2:], states_of((20, 21, 22)))
    assert again.best()[-2:].tolist() == [900, 901]


def zeros_for_lost_rows(self: Store) -> int:
    """As if missing ends of files were filled with zeros."""
    return 10**9


def test_believing_lines_without_rows_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Store, "_held_rows", zeros_for_lost_rows)
    fill(tmp_path)
    cut(tmp_path, STATES, 2 * ROW)
    store = open_store(tmp_path)
    add(store, 8, (20, 21))
    with pytest.raises(AssertionError):
        agrees(open_store(tmp_path))


def test_opening_changes_nothing(tmp_path: Path) -> None:
    """So a folder can be read while another process writes to it."""
    fill(tmp_path)
    with (tmp_path / STATES).open("ab") as file:
        file.write(b"half a text")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    store = open_store(tmp_path)
    assert (store.states().shape, store.best().shape) == ((8, len(TAPS), HIDDEN), (8,))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    open_store(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_read_while_another_writes(tmp_path: Path) -> None:
    writer = open_store(tmp_path)
    for count, (job, ids) in enumerate(TEXTS.items(), 1):
        add(writer, job, ids)
        reader = open_store(tmp_path)
        agrees(reader)
        assert len(reader.texts) == count


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"about": {"target": "other"}}, "target"),
        ({"about": {"seed": 1}}, "seed"),
        ({"about": {"more": 1}}, "more"),
        ({"taps": (0, -1)}, "taps"),
        ({"hidden": 2}, "hidden"),
        ({"keep": False}, "states"),
    ],
    ids=str,
)
def test_written_otherwise_is_refused_by_name(tmp_path: Path, changes: dict, named: str) -> None:
    fill(tmp_path)
    with pytest.raises(UsageError, match=f"written otherwise: {named}"):
        open_store(tmp_path, **changes)
    agrees(open_store(tmp_path))


def test_texts_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path, keep=False)
    store.add(0, (5, 6, 7), 1, np.zeros((2, len(TAPS), HIDDEN)), np.array([1, 2]))
    again = open_store(tmp_path, keep=False)
    assert [text.ids for text in again.texts] == [(5, 6, 7)]
    assert again.best().tolist() == [1, 2]
    assert not (tmp_path / STATES).exists()


def test_an_empty_store_has_no_rows(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert (store.states().shape, store.best().shape) == ((0, len(TAPS), HIDDEN), (0,))


def broken_line(folder: Path) -> None:
    lines = (folder / LINES).read_text().splitlines(keepends=True)
    (folder / LINES).write_text("".join([lines[0], "{oh\n", *lines[2:]]))


def missing_line(folder: Path) -> None:
    lines = (folder / LINES).read_text().splitlines(keepends=True)
    (folder / LINES).write_text("".join([lines[0], *lines[2:]]))


def no_about(folder: Path) -> None:
    (folder / ABOUT).unlink()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(broken_line, "line 2 of"), (missing_line, "line 3 of"), (no_about, "about.json is missing")],
)
def test_spoilt_by_hand_is_an_error(tmp_path: Path, spoil: Callable[[Path], None], says: str) -> None:
    """Nothing is cut off that a crash cannot have caused."""
    spoil(fill(tmp_path))
    before = (tmp_path / STATES).read_bytes()
    with pytest.raises(ModelError, match=says):
        open_store(tmp_path)
    assert (tmp_path / STATES).read_bytes() == before


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    add(first, 0, (1, 2))
    with pytest.raises(UsageError, match="another training is writing in"):
        add(second, 1, (3, 4))
    del first
    third = open_store(tmp_path)
    add(third, 1, (3, 4))
    assert len(open_store(tmp_path).texts) == 2
