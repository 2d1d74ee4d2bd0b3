"""Drafters that read the target, with random heads: they never change the text (greedy, coupled) or its law."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest

from speclocal.core import growth
from speclocal.core.interfaces import Limit
from speclocal.core.sampling import Sampler, Sampling
from speclocal.drafters.eagle import Reader
from tests.backends.play import GREEDY, acceptance, host, ids, play, tokens_of
from tests.backends.random_heads import NAMES, SPECS, attach
from tests.core.gtest import p_value

KINDS = ["llama", "gemma2", "gpt_oss"]
WARM = {"temperature": 30.0, "seed": 5}
"""Noise decides: what random heads and the target draw with the same noise often agrees."""


def text_of(lab, kind, name, how, prompt, n, sampling=GREEDY, **more):
    target = lab.new(kind)
    return play(target, attach(lab, target, name, how), prompt, n, sampling, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "how"), NAMES)
def test_greedy_text_is_the_frameworks(lab, plain, kind, name, how):
    prompt = ids(9, seed=1)
    expected = plain(kind, prompt, 24)
    rounds = text_of(lab, kind, name, how, prompt, 24)
    assert tokens_of(rounds) == expected
    assert any(len(r.tree) > 2 for r in rounds)


@pytest.mark.parametrize(("name", "how"), NAMES)
@pytest.mark.parametrize("setting", [WARM, {**WARM, "top_p": 0.9}, {**WARM, "repetition_penalty": 1.3}], ids=str)
def test_coupled_text_is_that_of_plain_decoding(lab, name, how, setting):
    prompt, sampling = ids(8, seed=3), Sampling(**setting)
    target = lab.new("llama")
    expected = tokens_of(play(target, attach(lab, target, "eagle3", "chain", depth=0), prompt, 24, sampling))
    rounds = text_of(lab, "llama", name, how, prompt, 24, sampling)
    assert tokens_of(rounds) == expected
    if how == "wide":
        assert acceptance(rounds) > 0.02, "with shared noise even a random head is right now and then"


@pytest.mark.parametrize(("name", "how"), NAMES)
def test_one_sync_a_round(lab, name, how):
    for sampling in (GREEDY, Sampling(**WARM)):
        target = lab.new("llama")
        calls = 0
        to_host = target.ops.to_host

        def counted(*arrays):
            nonlocal calls
            calls += 1
            return to_host(*arrays)  # noqa: B023

        target.ops = replace(target.ops, to_host=counted, support=None)
        made = attach(lab, target, name, how)
        calls = 0  # a head may be looked at when it is loaded
        rounds = play(target, made, ids(6), 20, sampling)
        assert calls == len(rounds)


@pytest.mark.parametrize(("name", "how"), [n for n in NAMES if n[1] in ("chain", "tree")])
def test_turns_draft_as_a_fresh_head_would(lab, name, how):
    """The head's rows are those of the text, whatever came before: later turns, edits, shorter texts, interruptions."""
    target = lab.new("llama")
    made = attach(lab, target, name, how)
    first = ids(20, seed=1)
    turn = first + tokens_of(play(target, made, first, 9)) + ids(5, seed=2)
    edited = turn[:17] + ids(8, seed=3)
    for prompt in (turn, edited, edited[:9], turn, first):
        rounds = play(target, made, prompt, 7)
        fresh = lab.new("llama")
        expected = play(fresh, attach(lab, fresh, name, how), prompt, 7)
        assert [list(r.tree.tokens) for r in rounds] == [list(r.tree.tokens) for r in expected]
        assert tokens_of(rounds) == tokens_of(expected)


def test_rows_of_another_text_are_caught(lab):
    def stale(self, tokens, scores, sampler):
        original(self, tokens, scores, sampler)
        self.head.truncate = lambda rows: None

    original = Reader.begin
    with (
        mock.patch.object(Reader, "begin", stale),
        pytest.raises((AssertionError, IndexError, ValueError, RuntimeError)),
    ):
        test_turns_draft_as_a_fresh_head_would(lab, "eagle3", "chain")


def first_tokens(lab, name, rule, count, read):
    """Tokens drafted first over many seeds, and the law the drafter says it drew them from."""
    prompt, counts, q = ids(6), Counter(), None
    target = lab.new("llama")
    made = attach(lab, target, name, "chain", depth=2)
    scores = target.prefill(prompt[:-1])
    for seed in range(count):
        sampler = Sampler(target.ops, Sampling(temperature=8.0, seed=seed), target.vocab, prompt, rule=rule)
        made.begin(prompt, scores, sampler)
        made._reader.head.truncate(0)
        made._reader._fed = prompt[:1]
        tree = made.draft(Limit(2, 2))
        counts[read(tree)] += 1
        q = host(target, tree.q)[0] if q is None else q
    return counts, q


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3 lent", "p_eagle"])
def test_q_is_the_law_of_the_drafts(lab, name, rule):
    """Reduced vocabularies included: nothing outside the map has weight, and draws follow q."""
    counts, q = first_tokens(lab, name, rule, 300, lambda tree: tree.tokens[1])
    assert q.sum() == pytest.approx(1, abs=1e-5)
    borrowed = set(ids(6)) if name == "eagle3 lent" else set()
    assert (q > 0).sum() <= SPECS[name].draft_vocab + len(borrowed)
    law = {token: float(w) for token, w in enumerate(q) if w > 0}
    assert set(counts) <= set(law)
    assert p_value(counts, law) > 1e-3
    tokens = sorted(law)
    wrong = {token: law[other] for token, other in zip(tokens, [*tokens[1:], tokens[0]], strict=True)}
    assert p_value(counts, wrong) < 1e-3, "the test must see another law"


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["eagle", "eagle3", "eagle3 full", "eagle3.1", "p_eagle", "medusa"])
def test_uncoupled_rules_answer(lab, name, rule):
    rounds = text_of(lab, "llama", name, "chain", ids(6), 40, Sampling(temperature=30.0, seed=2), rule=rule)
    assert len(tokens_of(rounds)) == 40
    assert acceptance(rounds) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_only_spends_the_budget(lab, temperature):
    """Whatever nodes are chosen, the text is the same; choosing the least confident ones costs acceptance at most."""
    prompt, sampling = ids(8), Sampling(temperature=temperature, seed=4)
    expected = tokens_of(text_of(lab, "llama", "eagle3", "tree", prompt, 30, sampling))
    choose = growth.choose

    def upside_down(ops, root, tokens, scores, parents, nodes, depth):
        return choose(ops, root, tokens, scores * 0 - ops.arange(scores.shape[0]), parents, nodes, depth)

    with mock.patch.object(growth, "choose", upside_down):
        rounds = text_of(lab, "llama", "eagle3", "tree", prompt, 30, sampling)
    assert tokens_of(rounds) == expected


def test_trees_hang_together(lab):
    """Parents before children, no deeper than asked, as many nodes as asked, siblings distinct."""
    for name, how in NAMES:
        rounds = text_of(lab, "llama", name, how, ids(7), 12, Sampling(**WARM))
        for round in rounds:
            tree = round.tree
            assert all(0 <= p < i for i, p in enumerate(tree.parents) if i)
            for kids in tree.children:
                assert len({tree.tokens[k] for k in kids}) == len(kids), (name, how)
            if how == "tree":
                assert max(tree.depth) <= 3
                assert len(tree) <= 11
