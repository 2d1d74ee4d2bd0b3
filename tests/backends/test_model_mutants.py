"""One mistake at a time in backend, drafter or walk: each must fail the check that is there for it."""

from __future__ import annotations

from unittest import mock

import pytest

from speclocal.core import verify
from speclocal.core.interfaces import Acceptance, Origin
from speclocal.drafters import draft_model
from speclocal.errors import ModelError
from tests.backends import checks
from tests.backends.play import acceptance, accepted_length, drafter, ids, play, tokens_of
from tests.backends.test_cache import draft_model_rolls_back

CHECKS = {
    "node index as position": [
        lambda lab: checks.tree_equals_single_steps(lab, "llama", "full", 20),
        lambda lab: checks.tree_equals_single_steps(lab, "gemma2", "wide", 20),
    ],
    "siblings visible": [
        lambda lab: checks.tree_equals_single_steps(lab, "llama", "full", 20),
        lambda lab: checks.tree_equals_single_steps(lab, "gpt_oss", "ragged", 3),
    ],
    "ancestors missing": [
        lambda lab: checks.tree_equals_single_steps(lab, "llama", "ragged", 20),
        lambda lab: checks.tree_equals_single_steps(lab, "llama", "chain", 20),
        lambda lab: checks.levels_equal_one_pass(lab, "llama") or checks.prompt_in_chunks(lab, "llama", 20),
    ],
    "window ignored": [
        lambda lab: checks.tree_equals_single_steps(lab, "mistral", "chain", 40),
        lambda lab: checks.tree_equals_single_steps(lab, "gemma3_text", "full", 40),
        lambda lab: checks.past_the_window(lab, "gpt_oss"),
    ],
    "window by slot": [
        lambda lab: checks.tree_equals_single_steps(lab, "mistral", "full", 40),
        lambda lab: checks.past_the_window(lab, "gemma2"),
    ],
    "rows stay": [
        lambda lab: checks.tree_equals_single_steps(lab, "llama", "ragged", 20),
        lambda lab: checks.past_the_window(lab, "mistral"),
    ],
    "refused token kept": [lambda lab: checks.edited_prompt(lab, "llama")],
    "last chunk missing": [lambda lab: checks.prompt_in_chunks(lab, "llama", lab.CHUNK + 2)],
    "taps of other nodes": [lambda lab: checks.taps_are_hidden_states(lab, "llama")],
}


def test_every_mutant_has_a_check(lab):
    assert set(CHECKS) == set(lab.MUTANTS)


@pytest.mark.parametrize(("name", "number"), [(name, i) for name, found in CHECKS.items() for i in range(len(found))])
def test_mutant_of_the_backend_is_caught(lab, name, number):
    check = CHECKS[name][number]
    check(lab)
    with lab.mutant(name), pytest.raises(AssertionError):
        check(lab)


@pytest.mark.parametrize("name", ["node index as position", "siblings visible"])
def test_the_probe_gives_up_trees_at_load(lab, name):
    with lab.mutant(name):
        target, notices = lab.probed("llama")
    assert not target.trees
    assert len(notices) == 1


def test_the_probe_refuses_wrong_chains_at_load(lab):
    with lab.mutant("ancestors missing"), pytest.raises(ModelError, match="one by one"):
        lab.probed("llama")


def first_unchecked(tree, drawn):
    """The walk with its first draft taken on trust (GRD-02)."""
    if len(tree) == 1:
        return Acceptance((), drawn[0], Origin.PLAIN)
    first = tree.children[0][0]
    return Acceptance((first,), drawn[first], Origin.RECOVERED)


@pytest.mark.parametrize("name", ["wrong", "ngram", "draft chain", "mixed"])
def test_unchecked_first_draft_is_caught(lab, plain, name):
    prompt = ids(9, seed=1)
    expected = plain("llama", prompt, 30)

    def check():
        made = drafter(name, lab, "llama", prompt + expected)
        checks.greedy_equals_generate(lab, "llama", made, prompt, expected)

    check()
    with mock.patch.object(verify, "follow", first_unchecked), pytest.raises(AssertionError):
        check()


def a_twin_is_always_right(lab):
    """The same model as drafter, with trees: its first drafts are always kept if its cache holds the right rows."""
    prompt = ids(9)
    expected = lab.plain("llama", prompt, 60)
    rounds = play(lab.new("llama"), drafter("twin tree", lab, "llama"), prompt, 60)
    assert tokens_of(rounds) == expected, "the drafter must never change the text"
    return rounds


def half_as_good(lab, break_it=lambda model: None):
    """A drafter that is right now and then: refusals happen, so its cache must be cut back."""
    prompt = ids(9)
    expected = lab.plain("gemma2", prompt, 80)
    made = drafter("draft chain", lab, "gemma2")
    break_it(made.model)
    rounds = play(lab.new("gemma2"), made, prompt, 80)
    assert tokens_of(rounds) == expected, "the drafter must never change the text"
    return rounds


def test_draft_cache_that_is_not_rolled_back_costs_acceptance(lab):
    """The text stays exact, so only acceptance can tell."""
    good, bad = half_as_good(lab), half_as_good(lab, lab.never_rolled_back)
    assert 0.3 < acceptance(good) < 0.95
    assert acceptance(bad) < 0.6 * acceptance(good)


def stale(self, tree, taken, scores):
    """Keeps the first rows instead of the path's."""
    if self._lead:
        kept = [n for n in (self._nodes[i] for i in taken.path) if n > 0]
        self.model.commit([*range(1, self._lead), *(i + self._lead for i in range(len(kept)))])
    self._tokens.extend(taken.tokens(tree))


def test_draft_tree_that_keeps_other_rows_is_caught(lab):
    def check():
        draft_model_rolls_back(lab, "llama", "draft tree", 0.0, {"noise": 0.05})

    check()
    with mock.patch.object(draft_model.Drafter, "commit", stale), pytest.raises(AssertionError):
        check()


def test_draft_tree_that_keeps_other_rows_costs_acceptance(lab):
    good = accepted_length(a_twin_is_always_right(lab))
    with mock.patch.object(draft_model.Drafter, "commit", stale):
        bad = accepted_length(a_twin_is_always_right(lab))
    assert good > 3
    assert bad < 0.6 * good
