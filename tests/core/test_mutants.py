"""Deliberate errors in the core (`mutants.toml`), each of which a named check of the other tests must catch.

A mutant whose piece of source is gone fails loudly: it must be rewritten with the code, not dropped.
"""

from __future__ import annotations
import __future__ as future

import inspect
import sys
import textwrap
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from speclocal.core.interfaces import Ops
from tests.conftest import golden
from tests.core import test_decode, test_noise, test_pending, test_stats, test_stop, test_stream
from tests.core.exact import continued, distance, plainly
from tests.core.gtest import p_value
from tests.core.tables import instances
from tests.core.test_law_enumeration import (
    PEAKED,
    SETTINGS,
    TOLERANCE,
    Toy,
    check_history,
    check_node_laws,
    check_output_law,
    output_law,
)
from tests.core.test_rules_golden import check_per_seed, rule_law
from tests.core.test_sampling import check_greedy_ties
from tests.core.test_statistics import LEVEL, RULES, check_keys, drawn
from tests.core.test_typical import check_typical
from tests.core.test_verification_golden import (
    check_block_example,
    check_corners,
    check_given_trees,
    check_scripted,
    check_single_level,
)
from tests.toys import chain, full

Check = Callable[[Ops], None]
MUTANTS = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())["mutant"]


def law(rule: str, siblings: str, shape: Any) -> Check:
    return lambda ops: check_output_law(ops, rule, siblings, shape, 4, "temperature 1", PEAKED)


def keys(name: str) -> Check:
    return lambda ops: check_keys(ops, name, 200)


def same_text(name: str) -> Check:
    return lambda ops: test_decode.check_same_text(ops, test_decode.SETTINGS[name])


CHECKS: dict[str, Check] = {
    "given trees": check_given_trees,
    "scripted": check_scripted,
    "single level": check_single_level,
    "block example": check_block_example,
    "corners": check_corners,
    "per seed": check_per_seed,
    "node laws": check_node_laws,
    "history": check_history,
    "greedy ties": check_greedy_ties,
    "noise": test_noise.check_independence,
    "known plan": test_stats.check_known_plan,
    "phases": test_stats.check_phases,
    "order": test_decode.check_order,
    "decoding": test_stream.check_decoding,
    "typical": check_typical,
    "pending": test_pending.check_reading,
    "one wait": test_pending.check_one_wait,
    "wrong drafts": test_decode.check_wrong_drafts,
    "origins": test_decode.check_origins,
    "end tokens wait": test_decode.check_end_tokens_wait,
    "end token": test_stop.check_end_token,
    "limits": test_stop.check_limits,
    "cuts": test_stop.check_cuts,
    "stop strings": test_stop.check_stop_strings,
    "same text, greedy": same_text("greedy"),
    "same text, presence": same_text("presence"),
    "same text, frequency": same_text("frequency"),
    "same text, sampled": same_text("sampled"),
    "same text, filtered": same_text("hot and filtered"),
    "law: chain": law("rejection", "iid", chain(2)),
    "law: i.i.d.": law("rejection", "iid", full(3)),
    "law: without replacement": law("rejection", "without-replacement", full(3)),
    "law: one-hot": law("rejection", "one-hot", full(3)),
    "law: block": law("block", "iid", chain(2)),
    **{f"keys: {name}": keys(name) for name in RULES},
}


def mutate(patch: pytest.MonkeyPatch, at: str, old: str, new: str) -> None:
    """Replace a function by its source with `old` turned into `new`, wherever it has been imported."""
    module, _, path = at.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{at} has changed: rewrite this mutant"
    scope: dict[str, Any] = {}
    flags = future.annotations.compiler_flag
    exec(compile(source.replace(old, new), f"<mutant of {at}>", "exec", flags), function.__globals__, scope)
    places = [owner] if outer else [m for m in sys.modules.values() if vars(m).get(name) is function]
    for place in places:
        patch.setattr(place, name, scope[name])


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_without_mutants(ops: Ops, name: str) -> None:
    CHECKS[name](ops)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["what"])
def test_mutants_are_caught(ops: Ops, monkeypatch: pytest.MonkeyPatch, mutant: dict[str, str]) -> None:
    if mutant.get("needs") == "support" and ops.support is None:
        pytest.skip("this backend never looks which tokens are left")
    mutate(monkeypatch, mutant["at"], mutant["old"], mutant["new"])
    with pytest.raises(AssertionError):
        CHECKS[mutant["check"]](ops)


GOLDEN_ERRORS = {
    "tree iid/duplicates skipped without residual update": (
        "i.i.d.: duplicates are skipped with their residual update",
        "tree iid/recursive rejection",
    ),
    "tree wor/q not renormalised": (
        "without replacement: q is not renormalised",
        "tree wor/recursive rejection, q renormalised",
    ),
    "chain/softmax of the residual (HF before #28508)": (
        "the residual goes through a softmax",
        "chain/token-level (accept, residual, bonus)",
    ),
}


@pytest.mark.parametrize("name", GOLDEN_ERRORS)
def test_mutants_have_the_golden_error(ops: Ops, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """T2 on whole laws: the error of the mutant is the listed one, and the G-test of T6 rejects it from 0.005 on."""
    what, rule = GOLDEN_ERRORS[name]
    mutant = next(m for m in MUTANTS if m["what"] == what)
    mutate(monkeypatch, mutant["at"], mutant["old"], mutant["new"])
    seen = 0
    for instance, (p, q) in instances().items():
        broken, plain = continued(rule_law(ops, rule, p, q), p, 4), dict(plainly(p, (), 4))
        want = golden("broken_rules")["rules"][name][instance]
        if total := sum(broken.values()):
            assert total == pytest.approx(1.0)
        # MLX's exponential of doubles is no more exact than that of floats.
        assert distance(broken, plain) == pytest.approx(want["total_variation_after_4_tokens"], abs=1e-8), instance
        if want["total_variation_after_4_tokens"] > 0.005:
            seen += 1
            assert p_value(drawn(broken, 5), plain) < LEVEL, instance
    assert seen >= 2


@pytest.mark.parametrize("setting", ["top-k", "min-p", "all filters", "top-k and min-p", "temperature 1.7"])
@pytest.mark.parametrize("siblings", ["iid", "without-replacement"])
def test_a_q_that_was_not_drawn_from_is_seen(ops: Ops, setting: str, siblings: str) -> None:
    """SMP-01, SMP-02: drafts from the processed law, reported with the raw one: enumeration sees it."""

    def raw(toy: Toy, sampler: Any, tree: Any) -> Any:
        unfiltered = Toy(ops, toy.vocab, SETTINGS["temperature 1"])
        return unfiltered.laws(unfiltered.sampler(), tree, "draft")

    toy = Toy(ops, 4, SETTINGS[setting])
    want = dict(plainly(toy.plain("target"), (), 3))
    got = output_law(toy, "rejection", siblings, full(2, 1), 3, raw)
    assert distance(got, want) > 1000 * TOLERANCE
