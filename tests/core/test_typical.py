"""Medusa's typical acceptance, by hand; and that it is no law of the target."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from speclocal.core.interfaces import Acceptance, Ops, Origin
from speclocal.core.pending import Pending
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.tree import DraftTree, Layout
from speclocal.core.verify import EXACT, RULES, typical, verify

LEAST = 1e-9
# Entropies in nats and the limits that follow: 1.05 → min(0.09, 0.105); 2.3 → 0.03; 0.22 → min(0.09, 0.24).
LOOSE = [0.02, 0.5, 0.4, 0.05, 0.03, *[LEAST] * 5]
FLAT = [0.07, 0.13, *[0.1] * 8]
SURE = [0.95, *[0.05 / 9] * 9]
LAWS = {"loose": LOOSE, "flat": FLAT, "sure": SURE}


def round_of(ops: Ops, parents: list[int], tokens: list[int], laws: list[str], grown: bool = False) -> Acceptance:
    """One round under the typical rule. laws: of the nodes; grown: the tree is still on the device."""
    sampler = Sampler(ops, Sampling(temperature=1.0), 10, [0], rule="typical")
    tree = DraftTree(tuple(tokens), tuple(parents))
    if grown:
        layout = Layout.of(ops, ops.array(parents), max(tree.depth))
        tree = DraftTree(Pending(ops, ops.array(tokens)), Pending(ops, layout.parents), layout=layout)
    logits = ops.array([[math.log(p) for p in LAWS[law]] for law in laws])
    return verify(sampler.law(logits, tree), tree, sampler)


CASES = {
    "nothing drafted": ([-1], [9], ["loose"], (), 1, Origin.PLAIN),
    "unlikely": ([-1, 0], [9, 3], ["loose", "flat"], (), 1, Origin.RECOVERED),
    "likely enough, though not the likeliest": ([-1, 0], [9, 2], ["loose", "sure"], (1,), 0, Origin.BONUS),
    "the likelier of two": ([-1, 0, 0], [9, 2, 1], ["loose", "sure", "flat"], (2,), 1, Origin.BONUS),
    "the longer of two": ([-1, 0, 0, 2], [9, 1, 2, 0], ["loose", "sure", "sure", "flat"], (2, 3), 1, Origin.BONUS),
    "the likelier of two long ones": (
        [-1, 0, 0, 1, 2], [9, 1, 2, 4, 0], ["loose", "flat", "sure", "sure", "flat"], (2, 4), 1, Origin.BONUS,
    ),
    "less is enough where the law is flat": ([-1, 0], [9, 0], ["flat", "loose"], (1,), 1, Origin.BONUS),
    "what is below a refused node is refused": (
        [-1, 0, 1], [9, 3, 0], ["loose", "sure", "sure"], (), 1, Origin.RECOVERED,
    ),
}  # fmt: skip


def check_typical(ops: Ops) -> None:
    for name, (parents, tokens, laws, path, last, origin) in CASES.items():
        for grown in (False, True) if len(tokens) > 1 else (False,):
            got = round_of(ops, parents, tokens, laws, grown)
            assert got == Acceptance(path, last, origin), (name, grown)


def test_typical(ops: Ops) -> None:
    check_typical(ops)


def test_it_is_no_law_of_the_target(ops: Ops) -> None:
    """A draft of probability 0.4 always survives: any seed gives it, where the target says it four times in ten."""
    assert "typical" in RULES
    assert "typical" not in EXACT
    tree = DraftTree.chain(9, (2,))
    logits = ops.array([[math.log(p) for p in LOOSE]] * 2)
    kept = dict.fromkeys(("typical", "coupled"), 0)
    for seed in range(200):
        for rule in kept:
            sampler = Sampler(ops, Sampling(temperature=1.0, seed=seed), 10, [0], rule=rule)
            kept[rule] += bool(verify(sampler.law(logits, tree), tree, sampler).path)
    assert kept["typical"] == 200
    assert 50 < kept["coupled"] < 110


def test_at_temperature_0_it_is_the_argmax(ops: Ops) -> None:
    tree = DraftTree((9, 2, 1), (-1, 0, 0))
    sampler = Sampler(ops, Sampling(), 10, [0], rule="typical")
    logits = ops.array([[math.log(p) for p in LOOSE]] * 3)
    assert verify(sampler.law(logits, tree), tree, sampler) == Acceptance((2,), 1, Origin.BONUS)


def test_one_wait_a_round(ops: Ops) -> None:
    waits = []

    def to_host(*arrays: object) -> list[object]:
        waits.append(len(arrays))
        return ops.to_host(*arrays)

    counted = replace(ops, to_host=to_host)
    round_of(counted, [-1, 0, 0, 2], [9, 1, 2, 0], ["loose", "sure", "sure", "flat"], grown=True)
    assert len(waits) == 1


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 0.4}])
def test_filters_come_first(ops: Ops, cut: dict[str, float]) -> None:
    """What the sampler cuts off is never typical."""
    sampler = Sampler(ops, Sampling(temperature=1.0, **cut), 10, [0], rule="typical")
    tree = DraftTree.chain(9, (2,))
    law = sampler.law(ops.array([[math.log(p) for p in LOOSE]] * 2), tree)
    assert typical(law, tree, sampler).path == ()
