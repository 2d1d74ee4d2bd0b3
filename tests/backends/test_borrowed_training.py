"""EAGLE-3 heads that keep the target's output rows, and heads that begin with those of another one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from speclocal.errors import ModelError
from speclocal.train.objectives import eagle3
from speclocal.train.objectives.eagle3 import OUTPUT
from speclocal.train.published import write
from tests.backends.bench_heads import Bench
from tests.backends.golden_training import SHOWS, material, near, off, to_numpy
from tests.backends.test_objectives import Ttt
from tests.backends.test_trained_files import OTHERS, USUAL, Trained


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory) -> Bench:
    return Bench(lab, tmp_path_factory.mktemp("borrowed"))


@pytest.fixture(scope="module")
def ttt(bench, tmp_path_factory) -> Ttt:
    return Ttt(bench, tmp_path_factory.mktemp("ttt"))


def loss(ttt, vocabulary, params, output):
    settings = eagle3.Settings(steps=3, grow=0.0, output=output)
    made = eagle3.Objective(settings, ttt.spec, material(ttt.target, "eagle3", ttt.spec.taps), vocabulary)
    return float(made.loss(params, ttt.rows(), 0.5).total)


def test_batches_are_learnt_with_columns_of_their_own_tokens(ttt):
    """As with a head that has them all, whose rows are the target's."""
    held = material(ttt.target, "eagle3", ttt.spec.taps)
    body = {name: value for name, value in ttt.params.items() if name != OUTPUT}
    got = loss(ttt, ttt.vocabulary, body, "target")
    wide = ttt.vocabulary.wider(ttt.rows().tokens)
    assert len(wide.ids) > len(ttt.vocabulary.ids), "the texts must hold tokens from outside"
    assert near(got, loss(ttt, wide, {**body, OUTPUT: held.output_rows(wide.ids)}, "own"))
    narrow = {**body, OUTPUT: held.output_rows(ttt.vocabulary.ids)}
    assert off(got, loss(ttt, ttt.vocabulary, narrow, "own")) > SHOWS, "without those columns it is another loss"


def test_wider(ttt):
    narrow = ttt.vocabulary
    wide = narrow.wider(np.array([[-1, int(narrow.ids[0]), *range(20)], [-1] * 22]))
    kept = len(narrow.ids)
    assert wide.ids[:kept].tolist() == narrow.ids.tolist()
    assert wide.ids[kept:].tolist() == [i for i in range(20) if i not in narrow.ids]
    assert all(wide.place[id] == column for column, id in enumerate(wide.ids))


@pytest.mark.parametrize("output", ["own", "target"])
def test_rows_of_the_file(bench, tmp_path, output):
    """Those of the target are not trained, and the file holds them all the same, as every engine wants it."""
    made = Trained(bench, "eagle3", eagle3, eagle3.Settings(draft_vocab=60, output=output), USUAL, tmp_path)
    assert (OUTPUT in made.held) == (output == "own")
    rows = to_numpy(made.material.output_rows(made.objective._vocabulary.ids.tolist()))
    same = np.abs(made.tensors[OUTPUT] - rows).max() < 1e-6
    assert same == (output == "target")


def begun(bench, made, taps, place, **changes):
    """The first tensors of another training that begins with what one has written."""
    write(place, made.tensors, made.config, "float32")
    settings = replace(made.objective.settings, start=str(place), **changes)
    objective = eagle3.make(settings, replace(made.material, taps=(*taps, made.material.taps[-1])))
    return objective, objective.initial(0)


def test_begins_with_a_head(bench, tmp_path):
    made = Trained(bench, "eagle3", eagle3, eagle3.Settings(draft_vocab=60), USUAL, tmp_path)
    _objective, first = begun(bench, made, USUAL, tmp_path / "head")
    assert set(first) == set(made.held)
    assert all(np.allclose(first[name], made.held[name], atol=1e-6) for name in first)
    folded = made.objective.fold(made.held)
    assert not np.allclose(folded["fc.weight"], first["fc.weight"]), "training divides the states by their sizes"


def test_begins_with_a_head_of_another_vocabulary(bench, tmp_path):
    """Rows go by token: what that head lacked is the target's."""
    made = Trained(bench, "eagle3", eagle3, eagle3.Settings(draft_vocab=60), USUAL, tmp_path)
    objective, first = begun(bench, made, USUAL, tmp_path / "head", draft_vocab=90)
    old, new = made.objective._vocabulary, objective._vocabulary
    rows = to_numpy(made.material.output_rows(new.ids.tolist()))
    for column, id in enumerate(new.ids):
        expected = made.held[OUTPUT][old.place[id]] if old.place[id] >= 0 else rows[column]
        assert np.allclose(first[OUTPUT][column], expected, atol=1e-6)


def test_begins_with_no_other_kind_of_head(bench, tmp_path):
    made = Trained(bench, "eagle3", eagle3, eagle3.Settings(draft_vocab=60), USUAL, tmp_path)
    with pytest.raises(ModelError, match="no head to begin with"):
        begun(bench, made, OTHERS[:3], tmp_path / "head")
