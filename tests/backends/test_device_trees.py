"""Trees whose shape is known to the device only: the same scores, the same text, one synchronisation a round."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from speclocal.core.pending import Pending
from speclocal.core.sampling import Sampling
from speclocal.core.tree import DraftTree, Layout
from tests.backends import checks
from tests.backends.kinds import KINDS
from tests.backends.play import SHAPES, Shaped, accepted_length, host, ids, play, tokens_of, tree_of


def moved(ops, tree: DraftTree) -> DraftTree:
    """The same tree, as if it had grown on the device."""
    parents = ops.array(list(tree.parents))
    tokens = Pending(ops, ops.array(list(tree.tokens)))
    return DraftTree(tokens, Pending(ops, parents), layout=Layout.of(ops, parents, max(tree.depth) + 1))


class Moving(Shaped):
    """Drafts trees on the device."""

    def begin(self, tokens, scores, sampler) -> None:
        super().begin(tokens, scores, sampler)
        self._ops = sampler.ops

    def draft(self, limit):
        return moved(self._ops, super().draft(limit))


def forbidden(*arrays):
    raise AssertionError("a look from the host")


def scores_are_the_same(lab, kind, shape, length):
    prompt = ids(length, seed=length)
    tree = tree_of(SHAPES[shape], prompt[-1], seed=1)
    target = lab.new(kind)
    target.prefill(prompt[:-1])
    expected = host(target, target.score(tree).logits)
    there = moved(target.ops, tree)
    to_host = target.ops.to_host
    with mock.patch.object(target, "ops", replace(target.ops, to_host=forbidden)):
        logits = target.score(there).logits
    (got,) = to_host(logits)
    checks.close(np.array(got), expected, f"{kind}, {shape}, {length}")
    there.tokens.settle(tree.tokens)
    there.parents.settle(tree.parents)
    path = tree.path(len(tree) - 1)
    target.commit(path)
    text = prompt[:-1] + [tree.tokens[i] for i in (0, *path)]
    assert list(target.cached) == text
    checks.close(checks.next_logits(target, 5), lab.logits(kind, [*text, 5])[-1], "step after the commit")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["full", "ragged"])
@pytest.mark.parametrize("length", [3, 40])
def test_scores_are_the_same(lab, kind, shape, length):
    scores_are_the_same(lab, kind, shape, length)


def test_a_layout_of_other_parents_is_caught(lab):
    original = Layout.of.__func__

    def wrong(cls, ops, parents, deepest):
        made = original(cls, ops, parents, deepest)
        return replace(made, seen=made.seen * 0 + 1)

    scores_are_the_same(lab, "llama", "full", 20)
    with mock.patch.object(Layout, "of", classmethod(wrong)), pytest.raises(AssertionError):
        scores_are_the_same(lab, "llama", "full", 20)


def test_layouts(ops):
    for shape in SHAPES.values():
        tree = tree_of(shape, 1)
        layout = Layout.of(ops, ops.array(list(tree.parents)), max(tree.depth) + 2)
        depth, seen = ops.to_host(layout.depth, layout.seen)
        assert tuple(depth) == tree.depth
        assert [sum(bit << j for j, bit in enumerate(row)) for row in seen] == list(tree.ancestors)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_p": 0.9}])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_text_is_the_same(lab, kind, settings, rule):
    sampling, prompt = Sampling(**settings), ids(6, seed=2)
    expected = tokens_of(play(lab.new(kind), Shaped(((),), [], luck=0.0), prompt, 30, sampling))
    rounds = {}
    for made in (Shaped, Moving):
        target = lab.new(kind)
        calls = []
        to_host = target.ops.to_host
        target.ops = replace(target.ops, to_host=lambda *a, f=to_host, c=calls: (c.append(1), f(*a))[1], support=None)
        rounds[made] = play(target, made(SHAPES["full"], prompt + expected, 0.8), prompt, 30, sampling, rule=rule)
        if rule == "coupled" or sampling.greedy:
            assert len(calls) == len(rounds[made]), "one look a round"
    assert tokens_of(rounds[Moving]) == tokens_of(rounds[Shaped])
    if rule == "coupled" or sampling.greedy:
        assert tokens_of(rounds[Moving]) == expected
        assert accepted_length(rounds[Moving]) > 1.3
