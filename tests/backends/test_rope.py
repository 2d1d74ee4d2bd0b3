"""Angles of the heads' ropes: against transformers' definitions, and the same on every backend."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest

from speclocal.core.growth import Beam
from speclocal.core.rope import frequencies
from tests.backends.bench_heads import Bench, flip, host, states
from tests.conftest import INSTALLED

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3, short": {**LLAMA3, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn, long": {**YARN, "original_max_position_embeddings": 4096},
    "yarn, ends as they are": {**YARN, "truncate": False, "beta_fast": 8, "beta_slow": 2},
    "yarn, factor given": {**YARN, "attention_factor": 0.7},
    "yarn, one mscale": {**YARN, "mscale": 0.7},
    "yarn, both mscales": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
}


def reference(d, theta, scaling):
    """transformers' radians a position and factor."""
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = {**(scaling or {"rope_type": "linear", "factor": 1.0}), "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * d, num_attention_heads=4, head_dim=d, rope_parameters=parameters, max_position_embeddings=16384
    )
    radians, factor = utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None)
    return radians.numpy(), factor


@pytest.mark.parametrize("what", SCALINGS)
@pytest.mark.parametrize("d", [16, 80, 128])
def test_frequencies(what, d):
    for theta in (10000.0, 500000.0):
        radians, factor = frequencies(d, theta, SCALINGS[what])
        expected, expected_factor = reference(d, theta, SCALINGS[what])
        assert np.abs(np.array(radians) / expected - 1).max() < 1e-6
        assert factor == pytest.approx(expected_factor)


def test_scalings_differ():
    """No kind is taken for another: angles or factor of any two differ. One mscale alone counts for nothing."""
    found = {what: frequencies(16, 10000.0, scaling) for what, scaling in SCALINGS.items()}
    assert found["yarn, one mscale"] == found["yarn"]
    assert len({(*radians, factor) for radians, factor in found.values()}) == len(SCALINGS) - 1


def test_llama3_without_a_middle():
    """Equal limits leave nothing to mix."""
    scaling = {**LLAMA3, "high_freq_factor": 1.0, "original_max_position_embeddings": 64}
    radians, _ = frequencies(16, 10000.0, scaling)
    plain, _ = frequencies(16, 10000.0, None)
    assert {round(a / b, 6) for a, b in zip(radians, plain, strict=True)} == {1.0, 0.125}


@pytest.fixture(scope="module")
def benches(tmp_path_factory):
    if len(INSTALLED) < 2:
        pytest.skip("needs two backends")
    return [Bench(import_module(f"tests.backends.tiny_{name}"), tmp_path_factory.mktemp(name)) for name in INSTALLED]


@pytest.mark.parametrize("what", SCALINGS)
def test_heads_turn_alike(benches, what):
    """300 rows and a level of a tree give the same logits on every backend, and others than with a plain rope."""
    random = np.random.default_rng(1)
    rows = random.standard_normal((300, 192)).astype(np.float32)
    tokens = random.integers(0, 128, 300).tolist()
    found = []
    for scaling in (SCALINGS[what], None):
        for bench in benches:
            head = bench.build("eagle3", flip(rope_scaling=scaling))
            array = head.ops.array
            first = host(head.extend(tokens, states(head, rows)))
            beam = Beam(array([3, 7]), array([0, 0]), 1, array([[1, 0], [0, 1]]))
            found.append(np.concatenate([first, host(head.step(beam))]))
    scaled, plain = found[: len(benches)], found[len(benches)]
    assert all(np.abs(a - b).max() < 1e-3 for a, b in pairwise(scaled))
    assert (np.abs(scaled[0] - plain).max() > 1e-2) == (what != "plain")
