"""The table of a small draft vocabulary: offsets, checked before the first draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from speclocal.core.heads import EagleSpec, check_map
from speclocal.errors import ModelError
from tests.core.golden_heads import head_file, table
from tests.core.test_heads import EAGLE3

V, VD = 96, 32
SPEC = replace(EAGLE3, vocab=V, draft_vocab=VD)
IDS = sorted(random.Random(0).sample(range(V), VD))
OFFSETS = [id - i for i, id in enumerate(IDS)]
MARKED = [id in IDS for id in range(V)]
FULL = replace(EAGLE3, vocab=V, draft_vocab=V, mapped=False)


def changed(i: int, offset: int) -> list[int]:
    return [*OFFSETS[:i], offset, *OFFSETS[i + 1 :]]


@pytest.mark.parametrize("marks", [None, MARKED], ids=["without t2d", "with t2d"])
def test_offsets_become_ids(marks: list[bool] | None) -> None:
    assert check_map(OFFSETS, "I64", SPEC, marks) == tuple(IDS)


@pytest.mark.parametrize(
    "name",
    ["eagle3", "eagle3-narrow", "eagle3-specforge", "eagle3-speculators", "eagle31-fcnorm", "peagle-speculators"],
)
def test_golden_tables_are_what_their_marks_say(name: str) -> None:
    spec, _ = head_file(name).identify()
    assert isinstance(spec, EagleSpec)
    marks = table(name, "t2d")
    assert check_map(table(name, "d2t"), "I64", spec, marks) == tuple(i for i, mark in enumerate(marks) if mark)  # type: ignore[arg-type]
    assert check_map(table(name, "d2t"), "I64", spec) == tuple(i for i, mark in enumerate(marks) if mark)


@pytest.mark.parametrize("marks", [None, MARKED], ids=["without t2d", "with t2d"])
@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        (IDS, "holds target ids, not offsets"),
        ([0] * VD, "all offsets are 0, which would draft the first 32 ids of 96"),
        (None, "it is missing"),
        (OFFSETS[:-1], "size, got 31, expected 32"),
        ([*OFFSETS, OFFSETS[-1]], "size, got 33, expected 32"),
        (changed(VD - 1, V), f"outside the vocabulary, got {V + VD - 1} for draft id {VD - 1}"),
        (changed(0, -1), "outside the vocabulary, got -1 for draft id 0"),
        (changed(7, OFFSETS[6] - 1), "do not ascend, got .* at draft id 7"),
        (OFFSETS[::-1], "do not ascend"),
    ],
)
def test_other_tables_are_refused(offsets: list[int] | None, words: str, marks: list[bool] | None) -> None:
    with pytest.raises(ModelError, match=words):
        check_map(offsets, "I64", SPEC, marks)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "I8"])
def test_a_cast_table_is_refused(dtype: str) -> None:
    with pytest.raises(ModelError, match=f"a cast to this type destroys its numbers, got {dtype}"):
        check_map(OFFSETS, dtype, SPEC)


def test_marks_that_differ_are_refused() -> None:
    marks = list(MARKED)
    free = marks.index(False)
    marks[free], marks[IDS[3]] = True, False
    for other in (marks, MARKED[:-1], [*MARKED, False]):
        with pytest.raises(ModelError, match="t2d marks other ids"):
            check_map(OFFSETS, "I64", SPEC, other)


LOW = list(range(0, 2 * VD, 2))
"""Ids that are offsets as well: nothing falls out of the vocabulary. No two of them are neighbours."""


def test_small_ids_in_place_of_offsets_are_told_apart() -> None:
    spec = replace(SPEC, vocab=128)
    marks = [id in LOW for id in range(128)]
    with pytest.raises(ModelError, match="holds target ids"):
        check_map(LOW, "I64", spec, marks)
    wide = replace(SPEC, vocab=96)
    with pytest.raises(ModelError, match="holds target ids"):
        check_map(LOW, "I64", wide)
    # Of a large vocabulary few ids are neighbours by chance: the marks alone decide.
    large = replace(SPEC, vocab=100_000)
    assert check_map(LOW, "I64", large) == tuple(3 * i for i in range(VD))


def test_offsets_of_a_vocabulary_without_neighbours_are_believed_with_their_marks() -> None:
    ids = [3 * i for i in range(VD)]
    marks = [id in ids for id in range(V)]
    assert check_map([2 * i for i in range(VD)], "I64", SPEC, marks) == tuple(ids)


@pytest.mark.parametrize("offsets", [None, [0] * V], ids=["missing", "zeros"])
def test_a_whole_vocabulary_needs_no_table(offsets: list[int] | None) -> None:
    assert check_map(offsets, "I64", FULL, [True] * V) == tuple(range(V))
    with pytest.raises(ModelError, match="outside the vocabulary"):
        check_map([1] * V, "I64", FULL)


def test_one_id_is_its_own_offset() -> None:
    assert check_map([5], "I64", replace(SPEC, draft_vocab=1), [i == 5 for i in range(V)]) == (5,)


WRONG: list[Callable[[list[int]], tuple[int, ...]]] = [tuple, lambda offsets: tuple(range(len(offsets)))]


@pytest.mark.parametrize("wrong", WRONG, ids=["read as ids", "first ids"])
def test_a_wrong_reading_is_seen(wrong: Callable[[list[int]], tuple[int, ...]]) -> None:
    assert wrong(OFFSETS) != tuple(IDS)
    assert wrong(OFFSETS) != check_map(OFFSETS, "I64", SPEC)
