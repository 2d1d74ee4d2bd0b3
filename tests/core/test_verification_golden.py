"""T1, one drafted tree at a time: the acceptance rules against laws that were computed in rational arithmetic."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from speclocal.core import accept, verify
from speclocal.core.interfaces import Ops
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.tree import DraftTree
from tests.conftest import golden
from tests.core import exact
from tests.core.exact import ROUNDS, difference, draft_tuples, law_of
from tests.core.tables import ROOT, SIBLINGS, drafted, golden_law, instances, logs, rows
from tests.toys import double, fractions, single

EXACT = 1e-12


# One drafted tree: no randomness of the draft is left.


def check_given_trees(ops: Ops) -> None:
    """Law of a round for one tree; acceptance, rejection and residual of its root level."""
    toys = instances()
    names = {"recursive_rejection": "rejection", "walk": "walk", "block_verification": "block"}
    for case in golden("given_trees")["cases"]:
        p, q = toys[case["instance"]]
        tree = drafted(ops, case["tree"], q, SIBLINGS[case["draft"]])
        laws = double(ops, rows(p, tree))
        for rule, want in case["rules"].items():
            if rule in names:
                got = law_of(ROUNDS[names[rule]](ops, laws, tree), tree)
                assert difference(got, golden_law(want["round"])) < EXACT, (case["instance"], case["tree"], rule)
                kept = sum(n * chance for (_, n), chance in got.items())
                assert kept == pytest.approx(want["expected_accepted"], abs=EXACT)
        check_root_level(ops, laws, tree, case["root_level"])


def check_root_level(ops: Ops, laws: Any, tree: DraftTree, want: dict[str, Any]) -> None:
    keep_p, keep_q, left = ops.to_host(*verify.odds(ops, laws, tree))
    refused, accepted = 1.0, []
    for rank in range(len(tree.children[0])):
        chance = exact.below(keep_q[rank][0], keep_p[rank][0])
        accepted.append(refused * chance)
        refused *= 1 - chance
    assert accepted == pytest.approx(want["accept"], abs=EXACT)
    assert refused == pytest.approx(want["reject"], abs=EXACT)
    if want["residual"] is not None:
        assert left[0] == pytest.approx(want["residual"], abs=EXACT)


def test_given_trees(ops: Ops) -> None:
    check_given_trees(ops)


def check_scripted(ops: Ops) -> None:
    """Explicit uniforms in, tokens out."""
    toys = instances()
    cases = [c for c in golden("scripted")["cases"] if c["rule"] == "recursive_rejection"]
    assert len(cases) == 144
    for case in cases:
        p, q = toys[case["instance"]]
        tree = drafted(ops, case["tree"], q, SIBLINGS[case["draft"]])
        keep_p, keep_q, left = ops.to_host(*verify.odds(ops, double(ops, rows(p, tree)), tree))
        uniforms = iter(case["uniforms"])
        last = [inverse_cdf(row, case["u_final"]) for row in left]

        def survives(node: int, rank: int) -> bool:
            parent = tree.parents[node]  # noqa: B023
            return next(uniforms) * keep_q[rank][parent] < keep_p[rank][parent]  # noqa: B023

        taken = accept.try_children(tree, survives, last)
        assert taken.tokens(tree) == tuple(case["emitted"]), case
        assert len(taken.path) == case["accepted"]
        assert next(uniforms, None) is None, "one coin per child that is looked at"


def inverse_cdf(law: list[float], u: float) -> int:
    reached = 0.0
    for token, chance in enumerate(law):
        reached += chance
        if reached > u * sum(law):
            return token
    raise AssertionError("the law has no mass")


def test_scripted(ops: Ops) -> None:
    check_scripted(ops)


# One node, closed forms.


def check_single_level(ops: Ops) -> None:
    """Acceptance of one node: maximal coupling, i.i.d., without replacement, one-hot."""
    for case in golden("single_level")["cases"]:
        p, q = fractions(case["p"]), fractions(case["q"])
        accepted = {s: acceptance(ops, p, q, 1, s) for s in ("iid", "without-replacement")}
        assert list(accepted.values()) == pytest.approx([case["one_minus_tv"]] * 2, abs=EXACT)
        for k, want in case["k"].items():
            assert acceptance(ops, p, q, int(k), "iid") == pytest.approx(want["rrs_iid"], abs=EXACT)
            assert acceptance(ops, p, q, int(k), "without-replacement") == pytest.approx(want["rrs_wor"], abs=EXACT)
            assert acceptance(ops, p, q, int(k), "one-hot") == pytest.approx(want["one_hot_top_k"], abs=EXACT)


def acceptance(ops: Ops, p: list[float], q: list[float], k: int, siblings: str) -> float:
    total = 0.0
    for tokens, weight in draft_tuples(q, k, siblings):
        tree = drafted(ops, [[t, []] for t in tokens], lambda path: q, siblings)
        law = law_of(ROUNDS["rejection"](ops, double(ops, [p] * len(tree)), tree), tree, weight)
        total += sum(chance for (_, kept), chance in law.items() if kept)
    return total


def test_single_level(ops: Ops) -> None:
    check_single_level(ops)


def test_gumbel_coupling(ops: Ops) -> None:
    """P(the target takes x and x is among the draft's k best): closed form against 200,000 rows of the real noise."""
    draws = 200_000
    for case in golden("single_level")["cases"][:4]:
        p, q = fractions(case["p"]), fractions(case["q"])
        noise = ops.noise(7, [3], 0, draws * len(p)).reshape(draws, len(p))
        taken = ops.xp.argmax(ops.xp.log(ops.array(p)) + noise, -1)
        for k, want in case["gumbel"].items():
            _, best = ops.top(ops.xp.log(ops.array(q)) + noise, int(k))
            hit = ops.xp.sum(ops.xp.where(best == taken[:, None], 1, 0), -1) > 0
            for token, chance in enumerate(want):
                seen = float(ops.xp.sum(ops.xp.where((taken == token) & hit, 1.0, 0.0))) / draws
                assert abs(seen - chance) < 5 * math.sqrt(chance * (1 - chance) / draws) + 1e-9, (case, k, token)


def check_block_example(ops: Ops) -> None:
    """The worked example of two tokens: 10/9, 11/9, and every threshold and residual."""
    example = golden("block_example")
    p, q = fractions(example["p"]), fractions(example["q"])
    kept = {"rejection": 0.0, "block": 0.0}
    for case in example["thresholds"]:
        one, two = case["tokens"]
        tree = drafted(ops, [[one, [[two, []]]]], lambda path: q, "without-replacement")
        laws = double(ops, [p] * 3)
        thresholds, left = ops.to_host(*verify.block_thresholds(ops, laws, tree))
        assert thresholds == pytest.approx([1.0, *fractions(case["h"])], abs=EXACT)
        w = fractions(case["w"])
        for i in (0, 1):
            assert left[i] == pytest.approx(fractions(case[f"residual_after_{i}"]), abs=EXACT)
        assert thresholds[2] == pytest.approx(w[2], abs=EXACT)
        assert left[2] == pytest.approx(p, abs=EXACT)
        for rule in kept:
            law = law_of(ROUNDS[rule](ops, laws, tree), tree, q[one] * q[two])
            kept[rule] += sum(n * chance for (_, n), chance in law.items())
    want = fractions([example["token_level"], example["block"]])
    assert list(kept.values()) == pytest.approx(want, abs=EXACT)


def test_block_example(ops: Ops) -> None:
    check_block_example(ops)


# Corners.


class Coins:
    """Noise whose coins are written down, and whose race noise is the worst that can be drawn."""

    def __init__(self, ops: Ops, coin: float, noise: list[float]):
        self._ops, self._coin, self._noise = ops, coin, noise

    def coin(self, position: int, index: int) -> float:
        return self._coin

    def rows(self, position: int, count: int, purpose: Any = None) -> Any:
        return self._ops.array([self._noise] * count)

    block = rows


def check_corners(ops: Ops) -> None:
    """p = 0, underflowed q, lost residuals: a token of the support of p, never NaN; the real rule in float32."""
    for case in golden("numeric_corners")["cases"]:
        support = [t for t, x in enumerate(case["p"]) if x > 0]
        for wildest in itertools.product((-4.2, 45.0), repeat=3):
            sampler = Sampler(ops, Sampling(temperature=1.0), 3, [0], rule="rejection")
            sampler.noise = Coins(ops, case.get("u", 0.5), list(wildest))
            raw = single(ops, [logs(case["p"])] * 2)
            if "u_final" in case:
                alone = DraftTree.chain(ROOT)
                assert verify.verify(sampler.law(raw[:1], alone), alone, sampler).token in support
                continue
            q = single(ops, [case["q"]] * 2)
            tree = DraftTree.chain(ROOT, [case["token"]], q, "iid")
            keep_p, keep_q, left = ops.to_host(*verify.odds(ops, single(ops, [case["p"]] * 2), tree))
            if "residual" in case:
                assert left[0] == pytest.approx(case["residual"], abs=2e-6)
            if case.get("fallback_to_p"):
                assert left[0] == pytest.approx(case["p"], abs=2e-6)
            survives = case["u"] * keep_q[0][0] < keep_p[0][0]
            taken = verify.verify(sampler.law(raw, tree), tree, sampler)
            assert (survives, bool(taken.path)) == (case["accept"],) * 2, case["name"]
            assert set(taken.tokens(tree)) <= set(support), case["name"]
            assert all(math.isfinite(x) for row in left for x in row)


def test_corners(ops: Ops) -> None:
    check_corners(ops)
