"""Training objectives give the losses of public trainers, and every detail that could be got wrong shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from speclocal.train import eagle_body
from speclocal.train.law import Law
from speclocal.train.material import Outcome, Rows
from speclocal.train.objectives import eagle3, p_eagle
from tests.backends.bench_heads import Bench
from tests.backends.golden_training import (
    SHOWS,
    material,
    near,
    off,
    shifted,
    states_of,
    to_numpy,
    trained,
    with_feature,
)
from tests.core.golden_heads import HEADS, arrays, cases, target_folder


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory) -> Bench:
    return Bench(lab, tmp_path_factory.mktemp("objectives"))


class Ttt:
    """The golden EAGLE-3 loss: seven steps over two texts."""

    def __init__(self, bench: Bench, place: Any):
        self.bench, self.target = bench, bench.target("eagle3")
        self.spec = bench.spec("eagle3")
        self.params, self.vocabulary = trained(bench, "eagle3", place)
        self.held = load_file(HEADS / "eagle3" / "train_ttt.safetensors")
        self.wanted = json.loads((HEADS / "eagle3" / "train_ttt.json").read_text())
        self.states = states_of(self.target, self.held["input_ids"], self.spec.taps)

    def rows(self) -> Rows:
        """That trainer's mask of row i stands for the prediction from row i on: one row after the target's own."""
        ids = self.held["input_ids"].astype(np.int32)
        best = to_numpy(self.target.unembed(self.target.ops.array(self.states[:, :, -1]))).argmax(-1)
        return Rows(shifted(ids, -1, -1), self.states, best, shifted(self.held["loss_mask"].astype(bool), 1, False))

    def loss(self, change: Callable[[Rows], Rows] = lambda rows: rows, **settings: Any) -> Outcome:
        made = eagle3.Settings(**{"steps": 7, "grow": 0.0, "count": "all", **settings})
        objective = eagle3.Objective(made, self.spec, material(self.target, "eagle3", self.spec.taps), self.vocabulary)
        return objective.loss(self.params, change(self.rows()), 0.5)


@pytest.fixture(scope="module")
def ttt(bench, tmp_path_factory) -> Ttt:
    return Ttt(bench, tmp_path_factory.mktemp("ttt"))


def test_eagle3(ttt):
    outcome = ttt.loss()
    assert near(float(outcome.total), ttt.wanted["total"])
    assert all(map(near, map(float, outcome.losses), ttt.wanted["plosses"]))
    right = [int(to_numpy(hits).sum()) for hits in outcome.hits]
    counted = [int(ttt.held["loss_mask"][:, s:].sum()) for s in range(7)]
    assert right == [round(share * count) for share, count in zip(ttt.wanted["acces"], counted, strict=True)]


def another(rows: Rows, **changes: Any) -> Rows:
    return replace(rows, **changes)


BROKEN_ROWS = {
    "tokens not shifted": lambda rows: another(rows, tokens=shifted(rows.tokens, 1, 0)),
    "states of the row after": lambda rows: another(rows, states=np.roll(rows.states, -1, 1)),
    "law of the row itself": lambda rows: another(
        rows, own=shifted(rows.own, 1, False), states=with_feature(rows.states, np.roll(rows.states[..., -1, :], 1, 1))
    ),
    "mask shifted once more": lambda rows: another(rows, own=shifted(rows.own, -1, False)),
    "every row counts": lambda rows: another(rows, own=np.ones_like(rows.own)),
}


@pytest.mark.parametrize("how", BROKEN_ROWS)
def test_eagle3_with_other_rows(ttt, how):
    assert off(ttt.loss(BROKEN_ROWS[how]).total, ttt.wanted["total"]) > SHOWS


@pytest.mark.parametrize(
    "changed", [{"decay": 0.9}, {"skip_outside": False}, {"divergence": "kl"}, {"count": "counted"}], ids=str
)
def test_eagle3_with_other_settings(ttt, changed):
    assert off(ttt.loss(**changed).total, ttt.wanted["total"]) > SHOWS


def test_eagle3_without_the_keys_of_earlier_steps(ttt, monkeypatch):
    """Each step sees the true rows and itself only."""
    real = eagle_body.EagleBody.step

    def forgetful(self, w, emb, hidden, rope, kept, bias):
        for each in kept:
            del each.keys[1:], each.values[1:]
        return real(self, w, emb, hidden, rope, kept, bias)

    monkeypatch.setattr(eagle_body.EagleBody, "step", forgetful)
    broken = ttt.loss()
    assert near(float(broken.losses[1]), ttt.wanted["plosses"][1])
    assert off(broken.total, ttt.wanted["total"]) > SHOWS


def test_eagle3_with_positions_that_stand_still(ttt, monkeypatch):
    real = eagle_body.EagleBody.rope
    monkeypatch.setattr(eagle_body.EagleBody, "rope", lambda self, positions: real(self, positions - positions.min()))
    assert off(ttt.loss().total, ttt.wanted["total"]) > SHOWS


class Documents:
    """A golden loss of `speculators`: texts packed into one row, told apart by a mask; positions from 1."""

    def __init__(self, bench: Bench, name: str, place: Any):
        self.bench, self.name, self.target = bench, name, bench.target(name)
        self.spec = bench.spec(name)
        self.params, self.vocabulary = trained(bench, name, place)
        held = arrays(name)
        self.tokens = held["train.input_ids"].astype(np.int32)
        self.states = held["train.hidden_states"]
        self.positions = held["train.position_ids"]
        documents = held["train.document_ids"][0]
        size = len(documents)
        self.seen = np.tril(np.ones((size, size), bool))[None] & (documents[:, None] == documents)[None]
        norm = load_file(target_folder(name) / "model.safetensors")["model.norm.weight"]
        last = held["train.verifier_last_hidden_states"][0]
        self.feature = last / np.sqrt((last * last).mean(-1, keepdims=True) + self.spec.eps) * norm
        self.material = material(self.target, name, self.spec.taps)

    def law(self) -> Law:
        """That trainer stores the row's target beside it: row i is to predict what `feature` i says."""
        ops = self.target.ops
        logits = ops.array(self.feature) @ self.material.output_rows(self.vocabulary.ids).T
        best = to_numpy(logits).argmax(-1).astype(np.int32)
        count = len(best)
        place, weight = np.arange(count)[None], np.ones(count, np.float32)
        return Law(ops.xp.softmax(logits, -1), None, place, weight, best, self.material)

    def loss(self, seen: np.ndarray | None = None, positions: np.ndarray | None = None, **settings: Any) -> Outcome:
        made = eagle3.Settings(**{"steps": 3, "grow": 0.0, "divergence": "kl", "decay": 1.0, **settings})
        objective = eagle3.Objective(made, self.spec, self.material, self.vocabulary)
        return objective.unrolled(
            self.params,
            self.tokens,
            self.target.ops.array(self.states),
            self.law(),
            self.seen if seen is None else seen,
            made.steps,
            self.positions if positions is None else positions,
        )


@pytest.fixture(scope="module", params=["eagle3-speculators", "eagle31-speculators"])
def documents(request, bench, tmp_path_factory) -> Documents:
    return Documents(bench, request.param, tmp_path_factory.mktemp("documents"))


@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_eagle3_of_packed_texts(documents, decay):
    wanted = cases(documents.name)["meta"][f"ttt_loss_decay_{decay}"]
    outcome = documents.loss(decay=decay)
    assert near(float(outcome.total), wanted["total"])
    weighted = [decay**s * float(loss) for s, loss in enumerate(outcome.losses)]
    assert all(map(near, weighted, wanted["per_step"]))


def test_eagle3_of_packed_texts_that_see_each_other(documents):
    wanted = cases(documents.name)["meta"]["ttt_loss_decay_1.0"]["total"]
    seen = np.tril(np.ones_like(documents.seen[0]))[None]
    assert off(documents.loss(seen=seen).total, wanted) > SHOWS
    assert off(documents.loss(positions=2 * documents.positions).total, wanted) > SHOWS
    assert off(documents.loss(divergence="cross_entropy").total, wanted) > SHOWS
    assert off(documents.loss(decay=0.8).total, wanted) > SHOWS


@pytest.fixture(scope="module")
def parallel(bench, tmp_path_factory) -> Documents:
    return Documents(bench, "peagle-speculators", tmp_path_factory.mktemp("parallel"))


def parallel_loss(parallel: Documents, anchor=None, depth=None, true=None, **settings: Any) -> Outcome:
    held = arrays(parallel.name)
    extra = held["train.cod_depth"] > 0
    sample = p_eagle.Sample(
        held["train.cod_anchor"][extra] if anchor is None else anchor,
        held["train.cod_depth"][extra] if depth is None else depth,
    )
    made = p_eagle.Settings(**{"depth": 4, "divergence": "kl", "embedding": True, **settings})
    return p_eagle.Objective(made, parallel.spec, parallel.material, parallel.vocabulary).over(
        parallel.params,
        parallel.tokens,
        parallel.target.ops.array(parallel.states),
        parallel.law(),
        sample,
        parallel.seen[0] if true is None else true,
        parallel.positions[0],
    )


def test_p_eagle(parallel):
    """Rows behind row -1 of that sampling see no true row and belong to the last text, as they do there."""
    wanted = cases(parallel.name)["meta"]["cod_loss"]
    assert near(float(parallel_loss(parallel).total), wanted)


def test_p_eagle_with_what_is_wrong(parallel, monkeypatch):
    wanted = cases(parallel.name)["meta"]["cod_loss"]
    held = arrays(parallel.name)
    extra = held["train.cod_depth"] > 0
    anchor, depth = held["train.cod_anchor"][extra], held["train.cod_depth"][extra]
    size = len(parallel.tokens[0])
    assert off(parallel_loss(parallel, anchor=np.minimum(anchor + 1, size - depth - 1)).total, wanted) > SHOWS
    assert off(parallel_loss(parallel, true=np.tril(np.ones((size, size), bool))).total, wanted) > SHOWS
    assert off(parallel_loss(parallel, depth=np.minimum(depth, 2)).total, wanted) > SHOWS
    assert off(parallel_loss(parallel, divergence="cross_entropy").total, wanted) > SHOWS
    real = p_eagle.Sample.seen

    def without_shallower(self, true):
        """A row sees true rows and itself: none of those before it behind the same row."""
        seen = real(self, true)
        seen[:, size:, size:] &= np.eye(len(self.depth), dtype=bool)
        return seen

    monkeypatch.setattr(p_eagle.Sample, "seen", without_shallower)
    assert off(parallel_loss(parallel).total, wanted) > SHOWS


def test_sample_of_depths():
    """Nested, of the wanted sizes, within the text; the same for the same seed, and another for another."""
    settings = p_eagle.Settings(depth=5, ratio=0.7, least=0.3)
    sample = p_eagle.Sample.draw(100, settings, 3)
    before = set(range(100))
    for d in range(1, 5):
        anchors = sample.anchor[sample.depth == d].tolist()
        assert len(anchors) == round(max(0.7**d, 0.3) * (100 - d))
        assert set(anchors) <= before
        assert max(anchors) + d < 100
        before = set(anchors)
    again, other = (p_eagle.Sample.draw(100, settings, seed) for seed in (3, 4))
    assert again.anchor.tolist() == sample.anchor.tolist() != other.anchor.tolist()
    assert not len(p_eagle.Sample.draw(1, settings, 0).depth)
