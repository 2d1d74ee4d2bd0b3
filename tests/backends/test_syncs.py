"""One synchronisation a round: the host waits for the device once, and passes that start early leave no trace."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from speclocal.core.pending import Pending
from speclocal.core.sampling import Sampling
from speclocal.drafters import draft_model
from tests.backends import test_cache
from tests.backends.play import DRAFTERS, SHAPES, Shaped, drafter, ids, play, tokens_of

SETTINGS = {
    "greedy": {},
    "coupled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2},
}


def count(target, waits):
    """Note every wait for the device in `waits`.

    Without `support`, as where arrays lie on a device: a look at a value costs as much as the walk's own.
    """
    to_host = target.ops.to_host

    def counted(*arrays):
        waits.append(len(arrays))
        return to_host(*arrays)

    target.ops = replace(target.ops, to_host=counted, support=None)


@pytest.mark.parametrize("name", ["none", "ngram", "oracle", "mixed", "tree"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_one_sync_a_round(lab, plain, name, setting, rule):
    prompt = ids(6, seed=2)
    text = prompt + plain("gemma2", prompt, 40)
    target, waits = lab.new("gemma2"), []
    count(target, waits)
    made = Shaped(SHAPES["full"], text) if name == "tree" else drafter(name, lab, "gemma2", text)
    rounds = play(target, made, prompt, 40, Sampling(**SETTINGS[setting]), rule=rule)
    assert len(rounds) > 5
    assert len(waits) == len(rounds)


def drafted_on_the_device(lab, setting, rule, confidence=0.0):
    """Waits of target and draft model together, and the rounds, while a chain is drafted by a model."""
    target, made, waits = lab.new("gemma2"), drafter("draft chain", lab, "gemma2"), []
    made.settings = replace(made.settings, confidence=confidence)
    count(target, waits)
    count(made.model, waits)
    rounds = play(target, made, ids(6, seed=2), 40, Sampling(**SETTINGS[setting]), rule=rule)
    assert len(rounds) > 5
    assert sum(len(r.tree) > 3 for r in rounds) > 5, "chains of several levels"
    assert 0 < sum(len(r.path) for r in rounds) < sum(len(r.tree) - 1 for r in rounds), "some kept, some refused"
    return waits, rounds


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s != "penalties"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_one_sync_a_round_with_a_model_that_drafts(lab, setting, rule):
    """A draft goes from level to level on the device; its ids come to the host with the verdict."""
    waits, rounds = drafted_on_the_device(lab, setting, rule)
    assert len(waits) == len(rounds)


def fetched_when_made(self, ops, array, values=None):
    ready(self, ops, array, ops.to_host(array)[0] if values is None else values)


def unsettled(self, tree, taken, scores):
    """Commits without saying what the fed tokens are."""
    self._fed = None
    commit(self, tree, taken, scores)


ready, commit = Pending.__init__, draft_model.Drafter.commit


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(Pending, "__init__", fetched_when_made), (draft_model.Drafter, "commit", unsettled)],
    ids=["fetched when made", "not settled"],
)
def test_another_sync_is_seen(lab, owner, name, wrong):
    with mock.patch.object(owner, name, wrong):
        waits, rounds = drafted_on_the_device(lab, "coupled", "coupled")
    assert len(waits) > len(rounds)


@pytest.mark.parametrize(("setting", "confidence"), [("penalties", 0.0), ("coupled", 1e-6)])
def test_what_needs_the_host_at_every_level(lab, setting, confidence):
    """Penalties and a least confidence depend on the drafted tokens: more waits, and the text is plain's as ever."""
    waits, rounds = drafted_on_the_device(lab, setting, "coupled", confidence)
    assert len(waits) > 2 * len(rounds)
    made = drafter("none", lab, "gemma2")
    plainly = play(lab.new("gemma2"), made, ids(6, seed=2), 40, Sampling(**SETTINGS[setting]))
    assert tokens_of(rounds) == tokens_of(plainly)


def early(lab):
    """The laboratory with targets whose passes are submitted before a round is shown."""

    def new(*args, **changes):
        target = lab.new(*args, **changes)
        if target.ops.submit is None:
            target.ops = replace(target.ops, submit=lambda *arrays: None)
        return target

    return SimpleNamespace(new=new, plain=lab.plain)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interrupted_with_a_pass_under_way(lab, name, temperature):
    """What was drafted and scored for a round that never came is forgotten."""
    test_cache.test_interrupted_then_continued(early(lab), name, temperature)


@pytest.mark.parametrize("failing", ["score", "commit"])
def test_an_error_with_a_pass_under_way(lab, plain, failing, monkeypatch):
    test_cache.test_an_error_in_the_middle_of_a_round(early(lab), plain, failing, monkeypatch)


@pytest.mark.parametrize("name", ["draft chain", "draft tree", "ngram"])
def test_turns_with_passes_under_way(lab, plain, name):
    test_cache.test_turns_equal_a_fresh_target(early(lab), plain, name)


def test_a_target_that_trusts_its_cache_is_seen(lab):
    """The broken variant: what the last text left is taken for the beginning of the next."""

    def new(*args, **changes):
        target = early(lab).new(*args, **changes)
        prefill = target.prefill
        target.prefill = lambda tokens, progress=None: prefill(
            [*target.cached[: len(tokens)], *tokens[len(target.cached) :]], progress
        )
        return target

    with pytest.raises(AssertionError):
        test_cache.test_interrupted_then_continued(SimpleNamespace(new=new, plain=lab.plain), "draft chain", 0.0)
