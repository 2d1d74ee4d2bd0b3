"""Hidden states a target hands to heads, and its embedding and output layer, against what heads were trained on."""

from __future__ import annotations

import numpy as np
import pytest

from speclocal.core.head_spec import FEATURE
from speclocal.core.tree import DraftTree
from tests.backends.bench_heads import CHAINS, EAGLE, MEDUSA, P_EAGLE, TREES, Bench, host
from tests.core.golden_heads import arrays

TOLERANCE = 1e-4
SHOWS = 100 * TOLERANCE


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory) -> Bench:
    return Bench(lab, tmp_path_factory.mktemp("heads"))


def expected_taps(name):
    """Tokens and the states the head of this folder reads, [n, E D]."""
    held = arrays(name)
    if name == "eagle1":  # holds the states of its prompts only
        return held["case3.round0.tokens_with_root"][:-1].tolist(), held["case3.round0.features_in"]
    key = "target.aux_concat" if "target.aux_concat" in held else "target.last_hidden_normed"
    return held["target.input_ids"].tolist(), held[key]


def points_of(bench, name):
    return bench.spec(name).taps if name in EAGLE else (FEATURE,)


def tapped(target, tokens, points):
    """States of a prompt, [n, E D]."""
    target.tap(points)
    target.prefill([])
    taps = host(target.prefill(tokens).taps)
    assert taps.shape[:2] == (len(tokens), len(points))
    return taps.reshape(len(tokens), -1)


@pytest.mark.parametrize("name", [*EAGLE, *MEDUSA])
def test_states_of_a_prompt(bench, name):
    tokens, expected = expected_taps(name)
    got = tapped(bench.target(name), tokens, points_of(bench, name))
    assert np.abs(got - expected).max() <= TOLERANCE


@pytest.mark.parametrize("name", [*TREES[3:], *CHAINS, P_EAGLE])
@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shift_of_the_layers_shows(bench, name, shift):
    tokens, expected = expected_taps(name)
    layers = bench.target(name).facts.layers
    points = [point + shift if point + shift <= layers else FEATURE for point in bench.spec(name).taps]
    assert np.abs(tapped(bench.target(name), tokens, points) - expected).max() > SHOWS


def test_last_layer_is_not_the_feature(bench):
    """Point L is before the final norm."""
    held = arrays("eagle31-speculators")
    target = bench.target("eagle31-speculators")
    tokens, layers = held["target.input_ids"].tolist(), target.facts.layers
    before = tapped(target, tokens, (layers,))
    assert np.abs(before - held["target.final_hidden_prenorm"]).max() <= TOLERANCE
    assert np.abs(tapped(target, tokens, (FEATURE,)) - before).max() > SHOWS


def test_order_and_repeats(bench):
    """Points come in the order they are asked for; several may belong to one layer."""
    target = bench.target("eagle3")
    tokens = expected_taps("eagle3")[0]
    wide = tapped(target, tokens, (FEATURE, 5, 0, 1)).reshape(len(tokens), 4, -1)
    for column, point in enumerate((FEATURE, 5, 0, 1)):
        assert np.abs(tapped(target, tokens, (point,)) - wide[:, column]).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
def test_embedding_and_output_layer(bench, name):
    """Point 0 is what `embed` gives; the feature through `unembed` gives the logits."""
    target, held = bench.target(name), arrays(name)
    tokens = held["target.input_ids"].tolist()
    assert np.abs(tapped(target, tokens, (0,)) - host(target.embed(target.ops.array(tokens)))).max() <= TOLERANCE
    target.tap((FEATURE,))
    target.prefill([])
    features = target.prefill(tokens).taps[:, 0]
    assert np.abs(host(target.unembed(features)) - held["target.logits"]).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["eagle2", "eagle31-speculators"])
def test_states_of_a_tree(bench, name):
    """Every node has the states it would have at the end of its own path."""
    target, points = bench.target(name), bench.spec(name).taps
    prompt = expected_taps(name)[0]
    tapped(target, prompt, points)
    tree = DraftTree((3, 7, 7, 9, 40), (-1, 0, 1, 0, 3))
    taps = host(target.score(tree).taps)
    for node in range(len(tree)):
        path = [tree.tokens[0], *(tree.tokens[i] for i in tree.path(node))]
        target.prefill([])
        expected = host(target.prefill(prompt + path).taps)[-1]
        assert np.abs(taps[node] - expected).max() <= TOLERANCE, node
    assert np.abs(taps[1] - taps[2]).max() > SHOWS


def test_a_prompt_that_is_known_in_part(bench):
    """States cover the new tokens and the last known one, whose next token may be another now."""
    target = bench.target("eagle3")
    tokens, expected = expected_taps("eagle3")
    target.tap(bench.spec("eagle3").taps)
    target.prefill([])
    target.prefill([*tokens[:8], 1, 2])
    got = host(target.prefill(tokens).taps).reshape(-1, expected.shape[1])
    assert len(got) == len(tokens) - 7
    assert np.abs(got - expected[7:]).max() <= TOLERANCE


def test_other_points_empty_the_cache(bench):
    target = bench.target("eagle3")
    target.tap((2,))
    target.prefill([1, 2, 3])
    target.tap((2,))
    assert list(target.cached) == [1, 2, 3]
    target.tap((3,))
    assert list(target.cached) == []


def test_no_points_no_states(bench):
    target = bench.target("eagle3")
    target.tap(())
    assert target.prefill([4, 5, 6]).taps is None
    assert target.score(DraftTree.chain(7)).taps is None


def test_states_leave_the_logits_alone(bench):
    """A tapped target scores as the golden one does."""
    target, held = bench.target("eagle3"), arrays("eagle3")
    tokens = held["target.input_ids"].tolist()
    for points in ((), (0, 3, FEATURE)):
        target.tap(points)
        target.prefill([])
        got = host(target.score(DraftTree.chain(tokens[0], tokens[1:])).logits)
        assert np.abs(got - held["target.logits"]).max() <= TOLERANCE
