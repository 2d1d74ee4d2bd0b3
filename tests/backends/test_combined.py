"""A head and a lookup in turns: the text is the target's own, and the head's context is the whole text."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from speclocal.core.pending import Pending
from speclocal.core.sampling import Sampling
from speclocal.drafters import combined
from speclocal.drafters.eagle import Reader
from speclocal.errors import UsageError
from tests.backends.golden_models import FAMILY, golden_head, golden_target, open_engine, prompts, say
from tests.backends.play import GREEDY, host, ids, play, tokens_of
from tests.backends.random_heads import attach

KIND = "gemma2"
WARM = Sampling(temperature=30.0, seed=5)
"""Noise decides, so that random heads hit now and then."""
EAGER = combined.Settings(expect=0.5, depth=4, nodes=8)
HEADS = [
    ("eagle3", "tree"),
    ("eagle3.1", "chain"),
    ("p_eagle", "tree"),
    ("medusa", "fixed"),
]
PROMPT = [*ids(7, seed=1), *ids(7, seed=1)[:4]]


def pair(lab, name="eagle3", how="tree", settings=EAGER):
    """A target, and a random head with a lookup beside it."""
    target = lab.new(KIND)
    return target, combined.Drafter(attach(lab, target, name, how), "ngram", settings)


def kinds(rounds):
    """How many rounds the head drafted, and how many the lookup."""
    drafted = [isinstance(r.tree.tokens, Pending) for r in rounds if len(r.tree) > 1]
    return drafted.count(True), drafted.count(False)


@pytest.mark.parametrize(("name", "how"), HEADS)
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_text_is_that_of_plain_decoding(lab, plain, name, how, sampling):
    target, made = pair(lab, name, how)
    rounds = play(target, made, PROMPT, 32, sampling)
    assert min(kinds(rounds)) > 0, "both must draft"
    assert made.name == f"{name.split()[0]}+ngram"
    if sampling.greedy:
        assert tokens_of(rounds) == plain(KIND, PROMPT, 32)
    else:
        none = attach(lab, lab.new(KIND), "eagle3", "chain", depth=0)
        assert tokens_of(rounds) == tokens_of(play(lab.new(KIND, taps=(0, 1, 2)), none, PROMPT, 32, sampling))


@pytest.mark.parametrize(("name", "how"), HEADS)
def test_one_sync_a_round(lab, name, how):
    for sampling in (GREEDY, WARM):
        target, made = pair(lab, name, how)
        waits, to_host = [], target.ops.to_host

        def counted(*arrays):
            waits.append(len(arrays))  # noqa: B023
            return to_host(*arrays)  # noqa: B023

        target.ops = replace(target.ops, to_host=counted, support=None)
        rounds = play(target, made, PROMPT, 24, sampling)
        assert len(waits) == len(rounds)


# ---- the head's context


CLOSE = 1e-3
"""Logits of 50, by rows fed one by one or all at once."""


def heads_logits(lab, name):
    """For each round the head drafted: the text it drafted for, how many rounds it had missed, its logits."""
    target, made = pair(lab, name, "chain")
    seen, feed = [], Reader.feed

    def noted(self, sampler, masks=0):
        missed = len(self._new)
        logits = feed(self, sampler, masks)
        seen.append((len(target.cached) + 1, missed, host(target, logits)))
        return logits

    with mock.patch.object(Reader, "feed", noted):
        rounds = play(target, made, PROMPT, 40, watch=lambda text, round: None)
    text = [*PROMPT, *tokens_of(rounds)]
    return [(text[:n], missed, logits) for n, missed, logits in seen]


def in_step(lab, name):
    found = heads_logits(lab, name)
    assert len(found) > 5
    assert max(missed for _, missed, _ in found) > 2, "rounds drafted by the lookup come in between"
    for text, _, logits in found:
        target = lab.new(KIND)
        head = attach(lab, target, name, "chain")._reader.head
        whole = head.extend(text[1:], target.prefill(text[:-1]).taps, len(logits) - 1)
        assert np.abs(logits - host(target, whole)).max() < CLOSE


@pytest.mark.parametrize("name", ["eagle3", "p_eagle"])
def test_the_head_knows_what_the_lookup_drafted(lab, name):
    in_step(lab, name)


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_drafts_are_those_of_a_fresh_head(lab, name):
    """After rounds of the lookup the head drafts what a head drafts that begins with this text."""
    target, made = pair(lab, name)
    text, last, after = list(PROMPT), "", 0
    for round in play(target, made, PROMPT, 40):
        now = "head" if isinstance(round.tree.tokens, Pending) else "lookup"
        if (last, now) == ("lookup", "head") and len(round.tree) > 1:
            fresh = lab.new(KIND)
            (first, *_) = play(fresh, attach(lab, fresh, name, "tree"), text, 40 - len(text) + len(PROMPT))
            assert list(round.tree.tokens) == list(first.tree.tokens)
            after += 1
        text += round.tokens
        last = now
    assert after > 1


def unfed(self, tree, taken, scores):
    """Feeds the head with rounds it drafted itself."""
    if isinstance(tree.tokens, Pending):
        self._head.commit(tree, taken, scores)
    self._lookup.commit(tree, taken, scores)


def without_states(self, tree, taken, scores, sampler):
    """Notes the root's state for every token that was kept."""
    self._new.append(scores.taps[sampler.ops.array([0] * (1 + len(taken.path)))])
    self.tokens.extend(taken.tokens(tree))


@pytest.mark.parametrize(
    ("owner", "wrong"), [(combined.Drafter, unfed), (Reader, without_states)], ids=["not fed", "wrong states"]
)
def test_a_head_that_is_not_fed_is_seen(lab, owner, wrong):
    with mock.patch.object(owner, "commit", wrong), pytest.raises((AssertionError, ValueError, RuntimeError)):
        in_step(lab, "eagle3")


# ---- from a flag to an answer


@pytest.fixture
def heads(tmp_path):
    """name -> folders of target and head"""

    def make(name):
        return golden_target(name, tmp_path / f"target-{name}"), golden_head(name, tmp_path / f"head-{name}")

    return make


@pytest.mark.parametrize("name", ["eagle3", "medusa1"])
def test_an_engine_with_both(heads, backend_name, name):
    target, head = heads(name)
    family = FAMILY[name]
    drafter = f"{family.replace('_', '-')}:{head}+ngram"
    made = open_engine(target, drafter, backend_name, options={"topk": "3", "ngram.depth": "4", "ngram.expect": "0.2"})
    plain = open_engine(target, "none", backend_name)
    assert (made.header.drafter, made.header.head) == (f"{family}+ngram", f"{family}:{head}")
    assert made.header.lossless
    prompt = prompts(1)[0] * 2
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=3)):
        got, expected = (say(engine, prompt, 20, sampling) for engine in (made, plain))
        assert got.token_ids == expected.token_ids


def test_impossible_combinations(heads, backend_name):
    target, head = heads("eagle3")
    both = f"eagle3:{head}+ngram"
    for drafter, options, rule, what in (
        (both, {"topk": "1"}, "block", r"block verification.*\+ngram.*--verify rejection"),
        (both, {"ngram.size": "3"}, "coupled", r"the ngram drafter has no setting 'size'.*expect"),
        (both, {"min": "3"}, "coupled", r"min is no setting of the head.*-o ngram.min=3"),
        (both, {"ngram.expect": "-1"}, "coupled", r"expect.*-1"),
        (both, {"size": "3"}, "coupled", r"the eagle3 drafter has no setting 'size'"),
        (f"eagle3:{head}", {"ngram.depth": "3"}, "coupled", r"no setting 'ngram.depth'"),
        ("ngram+eagle3", {}, "coupled", r"no such combination.*eagle3:org/name\+ngram"),
    ):
        with pytest.raises(UsageError, match=what):
            open_engine(target, drafter, backend_name, options=options, verify=rule)


def test_chains_where_trees_are_not_exact(heads, backend_name):
    target, head = heads("eagle3")
    made = open_engine(target, "none", backend_name)
    made.target.trees = False
    made.set_drafter(f"eagle3:{head}+ngram", {"ngram.expect": "0"})
    assert made.drafter.settings.topk == 1
    got = say(made, prompts(1)[0] * 2, 20)
    assert max(got.stats.proposed_at) * len(got.stats.proposed_at) >= got.stats.drafted, "one node a depth"
