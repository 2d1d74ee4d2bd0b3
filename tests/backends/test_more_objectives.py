"""Objectives of Medusa heads and draft models: losses of public trainers, or computed here by their formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from speclocal.train.calibrate import Hits, calibrate
from speclocal.train.material import Outcome, Rows
from speclocal.train.objectives import draft_model, medusa
from speclocal.train.published import write
from tests.backends.bench_heads import Bench
from tests.backends.golden_training import (
    SHOWS,
    TOLERANCE,
    material,
    near,
    off,
    shifted,
    states_of,
    to_numpy,
    trained,
    with_feature,
)
from tests.core.golden_heads import HEADS, target_folder


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory) -> Bench:
    return Bench(lab, tmp_path_factory.mktemp("more"))


class Heads:
    """The golden Medusa-1 loss: five heads with output matrices of their own over two texts."""

    def __init__(self, bench: Bench, place: Any):
        self.target, self.spec = bench.target("medusa1"), bench.spec("medusa1")
        self.params, _ = trained(bench, "medusa1", place)
        held = load_file(HEADS / "medusa1" / "train.safetensors")
        self.wanted = json.loads((HEADS / "medusa1" / "train.json").read_text())["medusa1_heads_only"]
        ids, labels = held["input_ids"].astype(np.int32), held["labels"]
        states = states_of(self.target, ids, ())
        best = to_numpy(self.target.unembed(self.target.ops.array(states[:, :, -1]))).argmax(-1)
        self.rows = Rows(shifted(ids, -1, -1), states, best, shifted(labels, -1, -100) >= 0)

    def objective(self, **settings: Any) -> medusa.Objective:
        made = medusa.Settings(**{"heads": 5, "layout": "original", **settings})
        return medusa.Objective(made, self.spec, material(self.target, "medusa1", ()))

    def loss(self, change: Callable[[Rows], Rows] = lambda rows: rows, **settings: Any) -> Outcome:
        return self.objective(**settings).loss(self.params, change(self.rows), 0.0)


@pytest.fixture(scope="module")
def heads(bench, tmp_path_factory) -> Heads:
    return Heads(bench, tmp_path_factory.mktemp("medusa"))


def test_medusa(heads):
    assert near(float(heads.loss().total), heads.wanted)


def test_medusa_with_what_is_wrong(heads):
    assert off(heads.loss(decay=0.9).total, heads.wanted) > SHOWS
    assert off(heads.loss(lambda rows: replace(rows, tokens=shifted(rows.tokens, 1, 0))).total, heads.wanted) > SHOWS
    assert off(heads.loss(lambda rows: replace(rows, own=np.ones_like(rows.own))).total, heads.wanted) > SHOWS
    assert off(heads.loss(loss_vocab=100).total, heads.wanted) > SHOWS


def test_medusa_over_a_part_of_the_vocabulary(heads):
    """Equal to the softmax over those columns alone, computed here; acceptance is that of the whole rows."""
    counts = np.arange(128)
    objective = medusa.Objective(
        medusa.Settings(heads=5, layout="original", loss_vocab=90),
        heads.spec,
        material(heads.target, "medusa1", (), counts=counts),
    )
    outcome = objective.loss(heads.params, heads.rows, 0.0)
    kept = np.arange(38, 128)
    expected = 0.0
    for h in range(5):
        z = logits_of(heads, h)
        losses, right = [], []
        for b, i in np.argwhere(shifted(heads.rows.own, -h - 1, False)):
            label, best = heads.rows.tokens[b, i + 1 + h], heads.rows.best[b, i + 1 + h]
            if label in kept:
                losses.append(np.log(np.exp(z[b, i][kept]).sum()) - z[b, i][label])
                right.append(kept[z[b, i][kept].argmax()] == best)
        expected += 0.2 * 0.8 ** (h + 1) * np.mean(losses)
        assert to_numpy(outcome.hits[h]).tolist() == right
    assert off(outcome.total, float(expected)) <= 10 * TOLERANCE


def logits_of(heads: Heads, h: int) -> np.ndarray:
    """[B, S, V] of head h by the reference formula."""
    x = heads.rows.states[:, :, -1].astype(np.float64)
    held = {key: to_numpy(value).astype(np.float64) for key, value in heads.params.items()}
    y = x @ held[f"heads.{h}.blocks.0.weight"].T + held[f"heads.{h}.blocks.0.bias"]
    return (x + y / (1 + np.exp(-y))) @ held[f"heads.{h}.output.weight"].T


def test_ranks_of_medusa_heads(heads):
    """What the tree is calibrated with: counts of each rank, over rows whose label the target wrote."""
    counted = Hits(5)
    heads.objective().count(heads.params, heads.rows, counted)
    for h in range(5):
        z = logits_of(heads, h)
        ranks = [
            int((z[b, i] > z[b, i][heads.rows.best[b, i + 1 + h]]).sum())
            for b, i in np.argwhere(shifted(heads.rows.own, -h - 1, False))
        ]
        assert counted.rows[h] == len(ranks)
        assert counted.hits[h].tolist() == [ranks.count(r) for r in range(10)]


def test_calibration():
    """Against every tree of that size over two heads and two ranks."""
    hits, rows = np.array([[60, 25], [30, 20]]), np.array([100, 90])
    share = hits / rows[:, None]
    chance = {(0,): share[0, 0], (1,): share[0, 1]}
    chance |= {(a, b): share[0, a] * share[1, b] for a in range(2) for b in range(2)}
    order = calibrate(hits, rows, 6)
    assert list(order) == sorted(chance, key=lambda path: -chance[path])
    assert order[:3] == calibrate(hits, rows, 3) == ((0,), (1,), (0, 0))
    assert calibrate(hits * [[1], [0]], rows, 6) == ((0,), (1,))
    assert calibrate(hits, np.array([100, 30]), 3) != calibrate(hits, rows, 3), "the real count matters"


class Distilled:
    """The golden target of `eagle1` (four layers) and a draft model of some of its layers."""

    def __init__(self, bench: Bench):
        self.name = "eagle1"
        self.target = bench.target(self.name)
        config = json.loads((target_folder(self.name) / "config.json").read_text())
        ids = np.random.default_rng(5).integers(0, 128, (2, 9)).astype(np.int32)
        states = states_of(self.target, ids, ())
        self.feature = states[:, :, -1]
        logits = to_numpy(self.target.unembed(self.target.ops.array(self.feature)))
        own = np.ones_like(ids, bool)
        own[0, :3] = own[1, 6:] = False
        self.rows = Rows(shifted(ids, -1, -1), states, logits.argmax(-1), own, ids[:, 0])
        self.logits, self.ids = logits, ids
        self.material = material(self.target, self.name, (), config=config)

    def objective(self, **settings: Any) -> draft_model.Objective:
        return draft_model.make(draft_model.Settings(**settings), self.material)

    def loss(self, rows: Rows | None = None, params: Any = None, **settings: Any) -> Outcome:
        objective = self.objective(**settings)
        array = self.target.ops.array
        held = {name: array(value) for name, value in objective.initial(0).items()}
        return objective.loss(held | (params or {}), rows or self.rows, 0.0)


@pytest.fixture(scope="module")
def distilled(bench) -> Distilled:
    return Distilled(bench)


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Mean KL of laws given as logits [m, V]."""
    p, q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (p.astype(np.float64), q.astype(np.float64)))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def test_draft_model_of_all_layers_is_the_target(distilled):
    """All layers copied: the same law everywhere. The cross-entropy is then its entropy."""
    outcome = distilled.loss(layers=4)
    assert abs(float(outcome.total)) <= 1e-5
    z = distilled.logits[distilled.rows.own].astype(np.float64)
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    entropy = float(-(np.exp(logp) * logp).sum(-1).mean())
    assert off(distilled.loss(layers=4, divergence="cross_entropy").total, entropy) <= 1e-5
    assert all(to_numpy(hits).all() for hits in outcome.hits)


def test_draft_model(distilled, lab, tmp_path_factory):
    """Against the laws of a model written and loaded as any other, compared in numpy."""
    objective = distilled.objective(layers=2)
    tensors, config = objective.files(objective.initial(0))
    folder = tmp_path_factory.mktemp("draft")
    write(folder, tensors, config, "float32")
    model = lab.load(folder, dtype="float32", device="cpu")
    feature = states_of(model, distilled.ids, ())[:, :, -1]
    logits = to_numpy(model.unembed(model.ops.array(feature)))
    own = distilled.rows.own
    expected = divergence(distilled.logits[own], logits[own])
    outcome = distilled.loss(layers=2)
    assert off(outcome.total, expected) <= 1e-5
    assert to_numpy(outcome.hits[0]).tolist() == (logits.argmax(-1) == distilled.rows.best)[own].tolist()
    rows = distilled.rows
    assert off(distilled.loss(replace(rows, first=rows.first + 1), layers=2).total, expected) > SHOWS
    assert off(distilled.loss(replace(rows, own=np.ones_like(own)), layers=2).total, expected) > SHOWS
    feature_before = with_feature(rows.states, np.roll(rows.states[..., -1, :], 1, 1))
    assert off(distilled.loss(replace(rows, states=feature_before), layers=2).total, expected) > SHOWS
    assert off(distilled.loss(layers=3).total, expected) > SHOWS
    assert off(distilled.loss(layers=2, fresh=True).total, expected) > SHOWS
    kept = np.arange(48, 128)
    counted = own & (rows.best >= 48)
    distilled.material.counts[:48] = 0
    part = distilled.loss(layers=2, loss_vocab=80).total
    distilled.material.counts[:48] = 1
    assert off(part, divergence(distilled.logits[counted][:, kept], logits[counted][:, kept])) <= 1e-5


def test_layers_are_spaced():
    assert draft_model.spaced(30, 7) == [0, 5, 10, 14, 19, 24, 29]
    assert draft_model.spaced(4, 1) == [0]
    assert draft_model.spaced(4, 4) == [0, 1, 2, 3]
