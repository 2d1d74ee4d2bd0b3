"""Rejection sampling with a head and a lookup in turns follows the target's law.

On one backend: the mixture is made above them, and their noise and rules are tested elsewhere.
"""

from __future__ import annotations

from collections import Counter
from unittest import mock

import numpy as np
import pytest

from speclocal.core.interfaces import Limit
from speclocal.core.sampling import Sampling
from speclocal.drafters import combined
from tests.core.gtest import p_value
from tests.toys import LawDrafter, TableTarget, chain, full, generate, hashed, mixed

pytest.importorskip("torch")

from tests.backends import tiny_torch

BACKENDS = ("torch",)
VOCAB, LENGTH, DRAWS, SURE = 5, 3, 600, 1e-3
START = (0, 4, 1, 0, 4)
TARGET = hashed(VOCAB, "combined", 1.0)
HEAD = mixed(TARGET, hashed(VOCAB, "combined draft", 1.0), 0.3)


def exact_law():
    """{(first, second): probability}."""

    def law(*answer):
        weights = np.exp(TARGET((*START, *answer)))
        return weights / weights.sum()

    return {(a, b): law()[a] * law(a)[b] for a in range(VOCAB) for b in range(VOCAB)}


def draws(ops, siblings, shape):
    """Counts of the first two tokens over seeds, and how many rounds were drafted by each."""
    every = (p for n in range(LENGTH + 1) for p in np.ndindex(*(VOCAB,) * n))
    target = TableTarget(ops, {p: TARGET((*START, *p)) for p in every}, len(START))
    counts, by = Counter(), Counter()
    made = combined.Drafter(LawHead(HEAD, shape, siblings), "ngram", combined.Settings(expect=0.0, depth=2))
    for seed in range(DRAWS):
        sampling, text = Sampling(temperature=1.0, seed=seed), []
        for round in generate(target, made, START, sampling, LENGTH, rule="rejection", limit=made.limit):
            by["lookup" if round.tree.q is None and len(round.tree) > 1 else "head"] += 1
            text += round.tokens
        counts[tuple(text[:2])] += 1
    return counts, by


class LawHead(LawDrafter):
    """Draws from its own law as a head does."""

    limit = Limit(2, 8)


@pytest.mark.parametrize(("siblings", "shape"), [("iid", chain(2)), ("without-replacement", full(2, 1))])
def test_rejection_keeps_the_law(siblings, shape):
    counts, by = draws(tiny_torch.new("llama").ops, siblings, shape)
    assert min(by["lookup"], by["head"]) > DRAWS / 10
    assert p_value(counts, exact_law()) > SURE


def test_choosing_by_what_was_drawn_is_seen():
    """The broken variant: the head's tree only where it drew what the lookup found, so that q is not what was drawn."""

    def peeking(self, limit):
        found, guessed = self._lookup.draft(limit), self._head.draft(limit)
        agree = len(found) > 1 and len(guessed) > 1 and found.tokens[1] == guessed.tokens[1]
        return guessed if agree or len(found) == 1 else found

    with mock.patch.object(combined.Drafter, "draft", peeking):
        counts, by = draws(tiny_torch.new("llama").ops, "iid", chain(2))
    assert min(by["lookup"], by["head"]) > DRAWS / 10
    assert p_value(counts, exact_law()) < SURE
