"""Coupled sampling: the text of a seed is the same with every drafter, tree and draft length as without (T3)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from speclocal.core.noise import Purpose, words
from speclocal.core.sampling import Sampling
from tests.backends import checks
from tests.backends.kinds import VOCAB
from tests.backends.play import (
    DRAFTERS,
    SHAPES,
    Shaped,
    acceptance,
    accepted_length,
    drafter,
    ids,
    play,
    tokens_of,
)

SETTINGS = {
    "cold": {"temperature": 0.3},
    "one": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.2, "top_p": 0.7},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "all filters": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
    },
    "bias": {"temperature": 1.0, "logit_bias": {3: 4.0, 5: -100.0, 9: 2.0}},
    "min tokens": {"temperature": 1.0, "min_tokens": 12},
}
END = (3, 11, 40, 41)


def sampled(lab, prompt, sampling, name="none", text=(), n=24, kind="llama", depth=4, **more):
    made = drafter(name, lab, kind, text, depth)
    return play(lab.new(kind), made, prompt, n, sampling, **more)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_same_seed_same_text(lab, name, setting):
    for seed in (1, 2):
        sampling = Sampling(**SETTINGS[setting], seed=seed)
        prompt = ids(8, seed)
        ends = END if setting == "min tokens" else ()
        expected = tokens_of(sampled(lab, prompt, sampling, end_ids=ends))
        rounds = sampled(lab, prompt, sampling, name, prompt + expected, end_ids=ends)
        assert tokens_of(rounds) == expected
        if name == "oracle":
            assert accepted_length(rounds) > 2.5
        if setting == "bias":
            assert 5 not in expected
        if ends:
            assert len(expected) >= 12
            assert not set(expected[:11]) & set(END)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe", "smollm3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_tree_shape_does_not_matter(lab, kind, shape):
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=5)
    prompt = ids(12)
    expected = tokens_of(sampled(lab, prompt, sampling, kind=kind, n=40))
    rounds = play(lab.new(kind), Shaped(SHAPES[shape], prompt + expected, 0.7), prompt, 40, sampling)
    assert tokens_of(rounds) == expected
    assert accepted_length(rounds) > 1.3


@pytest.mark.parametrize("name", DRAFTERS)
def test_draft_length_does_not_matter(lab, name):
    sampling = Sampling(temperature=1.0, seed=9)
    prompt = ids(5)
    expected = tokens_of(sampled(lab, prompt, sampling))
    for depth in range(1, 9):
        assert tokens_of(sampled(lab, prompt, sampling, name, prompt + expected, depth=depth)) == expected


@pytest.mark.parametrize("name", ["none", "draft chain", "ngram"])
def test_seeds(lab, name):
    """The same seed gives the same text each time, ten seeds ten texts (SMP-07)."""
    prompt = ids(6)
    texts = [tuple(tokens_of(sampled(lab, prompt, Sampling(temperature=1.5, seed=s), name, n=10))) for s in [42] * 3]
    assert len(set(texts)) == 1
    texts = [
        tuple(tokens_of(sampled(lab, prompt, Sampling(temperature=1.5, seed=s), name, n=10))) for s in range(1, 11)
    ]
    assert len(set(texts)) == 10


def test_text_is_the_argmax_of_logits_and_published_noise(lab):
    """Recomputed here in double precision from the untouched model and the noise's definition."""
    prompt, seed, temperature = ids(6), 77, 0.9
    made = tokens_of(sampled(lab, prompt, Sampling(temperature=temperature, seed=seed), "draft tree", n=25))
    rows = lab.logits("llama", prompt + made)[len(prompt) - 1 : -1].astype(np.float64)
    for i, (row, token) in enumerate(zip(rows, made, strict=True)):
        scores = [x / temperature + gumbel(seed, len(prompt) + i, t) for t, x in enumerate(row)]
        assert token == int(np.argmax(scores)), f"token {i}"


def gumbel(seed, position, token):
    w0, w1 = words(seed, position, Purpose.TARGET, token)
    v = (w0 + (w1 + 0.5) / 2**32) / 2**32
    return -math.log(-math.log1p(-v))


@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.5])
def test_the_same_model_as_drafter_is_always_right(lab, temperature):
    """p equals q (SMP-04): shared noise makes both draw the same."""
    rounds = sampled(lab, ids(9), Sampling(temperature=temperature, seed=3), "twin", n=200)
    assert acceptance(rounds) > 0.99
    assert len(tokens_of(rounds)) == 200


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("setting", [{"min_p": 0.9}, {"logit_bias": {}}])
def test_filters_hold_at_every_position(lab, name, setting):
    """min-p 0.9 and a banned best token, checked against the untouched model (SMP-05)."""
    prompt = ids(7)
    if "logit_bias" in setting:
        setting = {"logit_bias": {int(lab.logits("llama", prompt)[-1].argmax()): -100.0}}
    sampling = Sampling(temperature=1.0, seed=4, **setting)
    expected = tokens_of(sampled(lab, prompt, sampling, n=20))
    made = tokens_of(sampled(lab, prompt, sampling, name, prompt + expected, n=20))
    rows = lab.logits("llama", prompt + made)[len(prompt) - 1 : -1]
    if "min_p" in setting:
        assert all(row[t] >= row.max() + math.log(0.9) - 1e-3 for row, t in zip(rows, made, strict=True))
    assert not set(made) & set(sampling.logit_bias)


@pytest.mark.parametrize(("wide", "narrow"), [(520, 512), (512, 520)])
@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("tree", ["", " tree"])
def test_padding_rows(lab, wide, narrow, temperature, tree):
    """Target and draft of other width, 500 ids known: the others are neither proposed nor emitted (TOK-01, TOK-03)."""
    known, prompt = 500, ids(6, vocab=500)
    sampling = Sampling(temperature=temperature, seed=6)
    unknown = range(known, wide)

    def run(name, **more):
        made = drafter(name, lab, "llama", vocab_size=narrow, raised=known)
        return play(lab.new("llama", vocab_size=wide, raised=known), made, prompt, 40, sampling, **more)

    free = tokens_of(run("none"))
    assert max(free) >= known, "the padding rows are raised, so that the mask matters"
    expected = tokens_of(run("none", unknown=unknown))
    rounds = run("draft" + tree, unknown=unknown)
    assert tokens_of(rounds) == expected
    assert max(expected) < known
    assert max(max(r.tree.tokens) for r in rounds) < known
    assert any(len(r.tree) > 2 for r in rounds)


def test_hostile_drafts_change_nothing(lab):
    """Many prompts, random trees of random tokens, both temperatures."""
    for seed in range(20):
        prompt = ids(2 + seed, seed)
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, seed=seed)
            expected = tokens_of(sampled(lab, prompt, sampling, n=12))
            shape = list(SHAPES.values())[seed % len(SHAPES)]
            made = Shaped(shape, ids(200, seed + 1), 0.5, VOCAB, seed)
            rounds = play(lab.new("llama"), made, prompt, 12, sampling)
            assert tokens_of(rounds) == expected
    checks.greedy_equals_generate(lab, "llama", drafter("none", lab, "llama"), prompt, lab.plain("llama", prompt, 12))
