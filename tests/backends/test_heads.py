"""Heads compute what public implementations computed, and every convention that could be got wrong shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from speclocal.core.growth import Beam
from speclocal.errors import ModelError
from tests.backends.bench_heads import EAGLE, MEDUSA, P_EAGLE, Bench, flip, host, off, ones, states
from tests.core.golden_heads import HEADS, arrays

TOLERANCE = 1e-4
SHOWS = 100 * TOLERANCE
"""Every wrong convention changes some logit by more."""


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory) -> Bench:
    return Bench(lab, tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize("name", EAGLE)
def test_logits(bench, name):
    assert off(bench.head(name), name) <= TOLERANCE


@pytest.mark.parametrize("name", MEDUSA)
def test_medusa_logits(bench, name):
    target, heads, held = bench.target(name), bench.head(name), arrays(name)
    expected = held["prompt.medusa_logits_all_positions"]
    got = [heads.predict(target.ops.array(row.tolist())) for row in held["target.last_hidden_normed"]]
    assert np.abs(np.stack([host(row) for row in got], 1) - expected).max() <= TOLERANCE
    assert heads.width == expected.shape[-1]


def test_medusa_heads_that_share_a_matrix(bench):
    """The layout where the matrix of head 0 serves all: equal to heads that hold a copy each."""
    feature = bench.target("medusa1").ops.array(arrays("medusa1")["target.last_hidden_normed"][3].tolist())
    copied = bench.build("medusa1", spoil=lambda held: held | {key: held[FIRST] for key in held if "output" in key})
    shared = bench.build(
        "medusa1",
        flip(shared_output=True),
        lambda held: {key: t for key, t in held.items() if key == FIRST or "output" not in key},
    )
    assert np.abs(host(shared.predict(feature)) - host(copied.predict(feature))).max() <= TOLERANCE
    assert np.abs(host(shared.predict(feature)) - host(bench.head("medusa1").predict(feature))).max() > SHOWS


FIRST = "heads.0.output.weight"


def halves_swapped(held):
    """The feature where the embedding belongs."""
    return held | {"fc.weight": np.roll(held["fc.weight"], held["fc.weight"].shape[1] // 2, 1)}


SPOILT_SPECS = {
    "the target's rope base": ("eagle3", flip(rope_theta=500000.0)),
    "no rope scaling": ("eagle3-speculators", flip(rope_scaling=None)),
    "residual normed": ("eagle3", flip(norm_before_residual=True)),
    "residual not normed": ("eagle3-speculators", flip(norm_before_residual=False)),
    "normed output fed back": ("eagle3", flip(norm_output=True)),
    "raw output fed back": ("eagle31-speculators", flip(norm_output=False)),
    "raw output fed back, two layers": ("eagle31-fcnorm", flip(norm_output=False)),
    "no norm before fc": ("eagle31-speculators", flip(norm_before_fc=False)),
    "no norm of each tap": ("eagle31-fcnorm", flip(fc_norm=False)),
    "no norm of queries and keys": ("eagle31-fcnorm", flip(qk_norm=False)),
    "second layer left out": ("eagle31-fcnorm", flip(layers=1)),
    "the target's embedding": (P_EAGLE, flip(own_embedding=False)),
    "another mask token": (P_EAGLE, flip(mask_token=3)),
}
SPOILT_WEIGHTS = {
    "norm of the embedding": ("eagle3", ones("layers.0.input_layernorm.weight")),
    "norm of the hidden": ("eagle3", ones("layers.0.hidden_norm.weight")),
    "norm after attention": ("eagle3", ones("layers.0.post_attention_layernorm.weight")),
    "norm of the second layer": ("eagle31-fcnorm", ones("layers.1.input_layernorm.weight")),
    "final norm": ("eagle3", ones("norm.weight")),
    "bias of fc": ("eagle1", lambda held: {key: t for key, t in held.items() if key != "fc.bias"}),
    "order in fc": ("eagle1", halves_swapped),
    "mask row": (P_EAGLE, lambda held: held | {"mask_hidden": 0 * held["mask_hidden"]}),
}


@pytest.mark.parametrize("what", SPOILT_SPECS)
def test_a_wrong_convention_shows(bench, what):
    name, change = SPOILT_SPECS[what]
    assert off(bench.build(name, change), name) > SHOWS


@pytest.mark.parametrize("what", SPOILT_WEIGHTS)
def test_weights_are_used(bench, what):
    name, spoil = SPOILT_WEIGHTS[what]
    assert off(bench.build(name, spoil=lambda held: held), name) <= TOLERANCE
    assert off(bench.build(name, spoil=spoil), name) > SHOWS


def kept_rows(head):
    """What was drafted counts as true rows."""
    head._cache.length += head._cache.drafted


WRONG_USE = {
    "positions": {"beam": lambda beam: replace(beam, depth=beam.depth + 1)},
    "parents": {"beam": lambda beam: replace(beam, parents=beam.parents * 0)},
    "mask": {"beam": lambda beam: replace(beam, seen=beam.seen * 0 + 1)},
    "tokens": {"shift": 1},
    "context forgotten": {"between": lambda head: head.truncate(0)},
    "drafted rows kept": {"between": kept_rows},
}


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@pytest.mark.parametrize("what", WRONG_USE)
def test_a_wrong_use_shows(bench, name, what):
    assert off(bench.head(name), name, **WRONG_USE[what]) > SHOWS


@pytest.mark.parametrize("name", ["eagle3-speculators", P_EAGLE])
def test_any_portions(bench, name):
    """Rows fed one by one, in portions, or all at once after a longer text was cut back."""
    head, held = bench.head(name), arrays(name)
    tokens, rows = held["case1.round0.tokens_shifted"].tolist(), held["case1.round0.aux_in"]
    expected = held["case1.round0.prefix_logits_step0"]
    singly = [host(head.extend([token], states(head, row[None])))[0] for token, row in zip(tokens, rows, strict=True)]
    assert np.abs(np.stack(singly) - expected).max() <= TOLERANCE
    head.truncate(len(tokens) + 5)
    assert head.rows == len(tokens)
    head.truncate(4)
    assert head.rows == 4
    for first, last in ((4, 9), (9, 15)):
        got = host(head.extend(tokens[first:last], states(head, rows[first:last])))
        assert np.abs(got[0] - expected[last - 1]).max() <= TOLERANCE


@pytest.mark.parametrize("name", ["eagle31-fcnorm", P_EAGLE])
def test_long_texts(bench, lab, name):
    """Texts of several chunks and buffers: as if fed in small portions. Mask rows only follow the last one."""
    head, n = bench.head(name), lab.CHUNK + 77
    random = np.random.default_rng(0)
    tokens = random.integers(0, 128, n).tolist()
    rows = states(head, random.standard_normal((n, 64 * len(head.spec.taps))).astype(np.float32))
    masks = 3 if name == P_EAGLE else 0
    for first in range(0, n, 31):
        expected = host(head.extend(tokens[first : first + 31], rows[first : first + 31], masks))
    head.truncate(0)
    assert np.abs(host(head.extend(tokens, rows, masks)) - expected).max() <= TOLERANCE
    head.truncate(0)
    spoilt = [tokens[0] + 1, *tokens[1:]]
    assert np.abs(host(head.extend(spoilt, rows, masks)) - expected).max() > TOLERANCE


@pytest.mark.parametrize("name", ["eagle1", "eagle31-fcnorm"])
def test_wide_levels(bench, name):
    """A level of 40 nodes, in one call or in two of 20: siblings do not see each other."""
    head, held = bench.head(name), arrays(name)
    array, key = head.ops.array, "case0.round0.features_in" if name == "eagle1" else "case0.round0.aux_in"
    rows = states(head, held[key])

    def level(tokens):
        head.truncate(0)
        head.extend([7] * len(held[key]), rows)
        k = len(tokens)
        return host(head.step(Beam(array(tokens), array([0] * k), 1, array(np.eye(k, dtype=int).tolist()))))

    tokens = list(range(40))
    assert np.abs(level(tokens) - np.concatenate([level(tokens[:20]), level(tokens[20:])])).max() <= TOLERANCE
    assert np.abs(level(tokens)[0] - level(tokens[1:])[0]).max() > SHOWS


def test_steps_copy_no_buffer(bench, lab):
    """A drafted chain makes no array as large as a buffer of the head, unless the buffer is full."""
    head, target = bench.head("eagle31-speculators"), bench.target("eagle31-speculators")
    array, argmax = head.ops.array, head.ops.xp.argmax
    largest = {}
    for n in (2000, 2048):
        head.truncate(0)
        rows = states(head, np.random.default_rng(0).standard_normal((n, 192)).astype(np.float32))
        logits = head.extend([5] * n, rows)
        host(logits)
        with lab.allocations(target) as made:
            for depth in range(1, 6):
                beam = Beam(argmax(logits, -1), array([0]), depth, array([[1] * depth]))
                logits = head.step(beam)
            host(logits)
        largest[n] = max(made)
    buffer = 2048 * head.spec.kv_heads * head.spec.head_dim * 4
    assert largest[2000] < buffer <= largest[2048]


def test_masks_are_for_p_eagle(bench):
    head, held = bench.head("eagle3"), arrays("eagle3")
    with pytest.raises(ValueError, match="P-EAGLE"):
        head.extend([1], states(head, held["case0.round0.features_in"][:1]), 2)


def test_a_table_of_floats_is_refused(bench):
    def cast(held):
        return held | {"d2t": held["d2t"].astype(np.float32)}

    with pytest.raises(ModelError, match="destroys its numbers"):
        bench.build("eagle3", spoil=cast)


def test_every_golden_folder_is_tested():
    assert {folder.name for folder in HEADS.iterdir() if folder.is_dir()} == {*EAGLE, *MEDUSA}
