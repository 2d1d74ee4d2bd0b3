"""The draft vocabulary as published heads store it."""

from __future__ import annotations

import numpy as np
import pytest

from speclocal.train.vocabulary import DraftVocabulary


def test_most_frequent_ids_in_ascending_order() -> None:
    counts = np.array([0, 9, 3, 3, 0, 12, 3])
    made = DraftVocabulary.of(counts, 3)
    assert made.ids.tolist() == [1, 2, 5], "of equally frequent ones the smaller"
    assert made.size == 7
    assert made.d2t.tolist() == [1, 1, 3]
    assert made.t2d.tolist() == [False, True, True, False, False, True, False]
    assert made.place.tolist() == [-1, 0, 1, -1, -1, 2, -1, -1]
    assert made.place[-1] == -1, "id -1 is in no vocabulary"


@pytest.mark.parametrize("size", [1, 40, 1000, 2000])
def test_tables_lead_there_and_back(size: int) -> None:
    counts = np.random.default_rng(0).integers(0, 50, 1000)
    made = DraftVocabulary.of(counts, size)
    assert len(made.ids) == min(size, 1000) == made.t2d.sum()
    assert (np.diff(made.ids) > 0).all()
    drafts = np.arange(len(made.ids))
    assert (drafts + made.d2t == made.ids).all()
    assert (made.place[made.ids] == drafts).all()
    assert np.array_equal(np.flatnonzero(made.t2d), made.ids)
    if size < 1000:
        assert counts[made.ids].min() >= counts[~made.t2d].max()
    assert (made.d2t.dtype, made.t2d.dtype) == (np.int64, np.bool_)
