"""Every objective can be trained: all its tensors have gradients, and they are slopes of the loss."""

from __future__ import annotations

import json
from importlib import import_module

import numpy as np
import pytest

from speclocal.train.material import Rows
from speclocal.train.objectives import draft_model, eagle3, medusa, p_eagle
from tests.backends.bench_heads import Bench
from tests.backends.golden_training import material, shifted, states_of, to_numpy
from tests.core.golden_heads import target_folder

NAME, TAPS = "eagle3", (2, 4, 5)
STEP = 3e-3
KINDS = {
    "eagle3": (eagle3, eagle3.Settings(steps=2, grow=0.0, draft_vocab=100)),
    "p-eagle": (p_eagle, p_eagle.Settings(depth=3, draft_vocab=100)),
    "p-eagle, whole table": (p_eagle, p_eagle.Settings(depth=3, draft_vocab=100, embedding=True)),
    "medusa": (medusa, medusa.Settings(heads=2, loss_vocab=120)),
    "medusa, own outputs": (medusa, medusa.Settings(heads=2, layout="original", loss_vocab=120)),
    "draft model": (draft_model, draft_model.Settings(layers=2, loss_vocab=120)),
}


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory) -> Bench:
    return Bench(lab, tmp_path_factory.mktemp("gradients"))


@pytest.fixture(scope="module")
def rows(bench) -> Rows:
    target = bench.target(NAME)
    ids = np.random.default_rng(3).integers(0, 128, (2, 10)).astype(np.int32)
    states = states_of(target, ids, TAPS)
    best = to_numpy(target.unembed(target.ops.array(states[:, :, -1]))).argmax(-1)
    own = np.ones(ids.shape, bool)
    own[:, :2] = own[1, 7:] = False
    return Rows(shifted(ids, -1, -1), states, best, own, ids[:, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(bench, lab, rows, kind):
    module, settings = KINDS[kind]
    target = bench.target(NAME)
    training = import_module(f"speclocal.backends.{lab.__name__.rpartition('_')[2]}.train")
    gradients = training.Gradients(target)
    config = json.loads((target_folder(NAME) / "config.json").read_text())
    objective = module.make(settings, material(target, NAME, TAPS, config=config, counts=np.arange(128) + 1))
    params = {name: gradients.array(value) for name, value in objective.initial(0).items()}

    def loss(held):
        outcome = objective.loss(held, rows, 0.5)
        return outcome.total, outcome

    before, grads = gradients.of(loss, params)
    slopes = {name: to_numpy(grad) for name, grad in grads.items()}
    assert [name for name, slope in slopes.items() if not np.abs(slope).max() > 0] == []
    length = np.sqrt(sum(float((slope**2).sum()) for slope in slopes.values()))
    ends = []
    for sign in (1, -1):
        moved = {name: params[name] + sign * STEP / length * grads[name] for name in params}
        ends.append(float(objective.loss(moved, rows, 0.5).total))
    assert (ends[0] - ends[1]) / (2 * STEP) == pytest.approx(length, rel=2e-2)
    assert float(to_numpy(before.total)) > ends[1]
    assert (ends[0] - ends[1]) / (2 * STEP) != pytest.approx(2 * length, rel=2e-2)
