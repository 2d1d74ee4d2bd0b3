"""Rejection and block verification end to end: two tokens of a model of 8 words follow its exact law (SMP)."""

from __future__ import annotations

import math
from collections import Counter
from unittest import mock

import numpy as np
import pytest

from speclocal.core import verify
from speclocal.core.sampling import Sampling
from tests.backends.play import drafter
from tests.core.gtest import p_value
from tests.toys import generate

VOCAB = 8
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.5,
}
PROMPT = (1, 2, 3, 1, 2)
DRAWS = 1000
"""A seed; two seeds are tried, so that a case sees twice as many."""
SURE = 1e-3
CASES = [
    ("draft chain", "rejection"),
    ("draft tree", "rejection"),
    ("ngram", "rejection"),
    ("draft chain", "block"),
]


def exact_law(lab, setting):
    """{(first, second): probability}, enumerated from the untouched model."""
    law = {}
    first = filtered(lab.logits("llama", PROMPT, **SMALL, seed=lab.LAW_SEED)[-1], **setting)
    for a in range(VOCAB):
        second = filtered(lab.logits("llama", (*PROMPT, a), **SMALL, seed=lab.LAW_SEED)[-1], **setting)
        law |= {(a, b): float(first[a] * second[b]) for b in range(VOCAB)}
    return law


def filtered(logits, temperature=1.0, top_k=VOCAB, top_p=1.0, min_p=0.0):
    """The filters once more, in double precision."""
    p = np.exp(logits.astype(np.float64) / temperature)
    p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    floor = max(p[order[(before < top_p).sum() - 1]], min_p * p.max())
    p[p < floor] = 0
    return p / p.sum()


def draws(lab, name, rule, first_seed, count=DRAWS, **setting):
    """Counts of the first two tokens over seeds, and how much was drafted and accepted."""
    model = {**SMALL, "seed": lab.LAW_SEED}
    target = lab.new("llama", **model)
    noise = {"noise": 0.35} if name.startswith("draft") else {}
    made = drafter(name, lab, "llama", depth=2, vocab=VOCAB, **model, **noise)
    counts, drafted, accepted = Counter(), 0, 0
    for seed in range(first_seed, first_seed + count):
        text = []
        sampling = Sampling(seed=seed, **{"temperature": 1.0, **setting})
        for round in generate(target, made, PROMPT, sampling, 3, rule=rule, limit=made.limit):
            text += round.tokens
            drafted += len(round.tree) - 1
            accepted += len(round.path)
            if len(text) >= 2:
                break
        counts[tuple(text[:2])] += 1
    return counts, drafted, accepted


@pytest.mark.parametrize("first_seed", [0, 1_000_000])
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_two_tokens_follow_the_law(lab, name, rule, first_seed):
    counts, drafted, accepted = draws(lab, name, rule, first_seed)
    assert drafted >= DRAWS
    assert 0.05 * drafted < accepted < 0.95 * drafted, "drafts must be kept and refused"
    assert p_value(counts, exact_law(lab, {})) > SURE


@pytest.mark.parametrize("name", ["draft chain", "draft tree"])
@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.3},
        {"temperature": 1.7},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_the_ratio_uses_the_laws_that_were_drawn_from(lab, name, setting):
    counts, _, accepted = draws(lab, name, "rejection", 5000, DRAWS // 3, **setting)
    assert accepted
    assert p_value(counts, exact_law(lab, setting)) > SURE


def test_the_same_model_as_drafter(lab):
    """p equals q: all is accepted, and nothing is NaN (SMP-04)."""
    for name, rule in (("twin", "rejection"), ("twin", "block")):
        for temperature in (0.01, 0.7):
            counts, drafted, accepted = draws(lab, name, rule, 0, 100, temperature=temperature)
            assert accepted > 0.99 * drafted
            assert p_value(counts, exact_law(lab, {"temperature": temperature})) > SURE


def residual_is_p(ops, p, q):
    return p


def plain_product(ops, p, tree):
    """Keeps a prefix with its running ratio, and draws the last token as if that were block verification."""
    _, laws = verify_block_thresholds(ops, p, tree)
    w, kept = 1.0, [1.0]
    for i in range(1, len(tree)):
        w = min(1.0, w * float(p[i - 1, tree.tokens[i]] / tree.q[i - 1, tree.tokens[i]]))
        kept.append(w)
    return ops.array(kept), laws


verify_block_thresholds = verify.block_thresholds


@pytest.mark.parametrize(
    ("rule", "name", "wrong"),
    [("rejection", "residual", residual_is_p), ("block", "block_thresholds", plain_product)],
)
def test_a_broken_rule_is_seen(lab, rule, name, wrong):
    with mock.patch.object(verify, name, wrong):
        counts, _, _ = draws(lab, "draft chain", rule, 0, DRAWS // 2)
    assert p_value(counts, exact_law(lab, {})) < SURE


def test_the_test_sees_a_wrong_temperature(lab):
    counts, _, _ = draws(lab, "draft chain", "rejection", 0, DRAWS // 2)
    assert p_value(counts, exact_law(lab, {"temperature": 1.3})) < SURE
    assert math.isclose(sum(exact_law(lab, {}).values()), 1.0, abs_tol=1e-9)
