"""Tokens that are still on the device: when the host waits for them, and that every rule reads them there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speclocal.core.interfaces import Ops
from speclocal.core.pending import Pending
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.tree import DraftTree
from speclocal.core.verify import verify
from tests.toys import RAGGED, Shape, chain, full, hashed, single

VOCAB = 12


def counting(ops: Ops) -> tuple[Ops, list[int]]:
    """Operations of which every wait for the device is noted."""
    waits: list[int] = []

    def to_host(*arrays: Any) -> list[Any]:
        waits.append(len(arrays))
        return ops.to_host(*arrays)

    return replace(ops, to_host=to_host, support=None), waits


def check_reading(ops: Ops) -> None:
    """Length and structure wait for nothing; the first id brings all of them; what is settled is never fetched."""
    ops, waits = counting(ops)
    pending = Pending(ops, ops.array([5, 6, 7]))
    tree = DraftTree(pending, (-1, 0, 0))
    assert (len(tree), tree.depth, tree.children, tree.is_chain) == (3, (0, 1, 1), ((1, 2), (), ()), False)
    assert not waits
    assert not pending.settled
    assert (pending[1], pending[-1], pending[1:], list(pending)) == (6, 7, (6, 7), [5, 6, 7])
    assert waits == [1]
    assert pending.settled
    for known in (Pending(ops, ops.array([5, 6]), [5, 6]), Pending(ops, ops.array([5, 6]))):
        known.settle([5, 6])
        assert list(known) == [5, 6]
    assert waits == [1]


def test_reading(ops: Ops) -> None:
    check_reading(ops)


def shaped(shape: Shape) -> tuple[list[int], tuple[int, ...]]:
    """Tokens and parents of a tree; siblings differ."""
    tokens, parents, queue = [1], [-1], [(0, shape)]
    while queue:
        node, below = queue.pop(0)
        for rank, child in enumerate(below):
            queue.append((len(tokens), child))
            tokens.append((tokens[node] * 5 + rank) % VOCAB)
            parents.append(node)
    return tokens, tuple(parents)


CASES: list[tuple[str, Shape, Any]] = [
    ("coupled", chain(4), "one-hot"),
    ("coupled", RAGGED, "one-hot"),
    ("rejection", chain(4), "iid"),
    ("rejection", RAGGED, "one-hot"),
    ("rejection", full(3, 2), "without-replacement"),
    ("block", chain(4), "iid"),
    ("block", chain(0), "one-hot"),
]


def check_one_wait(ops: Ops) -> None:
    """Every rule decides as with known tokens, and waits once: ids come with its own numbers."""
    ops, waits = counting(ops)
    kept = 0
    for rule, shape, siblings in CASES:
        tokens, parents = shaped(shape)
        rows = [hashed(VOCAB, "target")((i,)) for i in range(len(tokens))]
        for seed in range(30):
            sampler = Sampler(ops, Sampling(temperature=1.3, seed=seed), VOCAB, [1], rule=rule)
            q = None if siblings == "one-hot" else ops.xp.softmax(single(ops, rows) * 0.5, -1)
            pending = Pending(ops, ops.array(tokens))
            outcomes = []
            for ids in (tuple(tokens), pending):
                tree = DraftTree(ids, parents, q, siblings)
                waits.clear()
                outcomes.append(verify(sampler.law(single(ops, rows), tree), tree, sampler))
                assert len(waits) == 1, f"{rule}: {len(waits)} waits"
            assert outcomes[0] == outcomes[1]
            assert pending.settled
            assert list(pending) == tokens
            kept += len(outcomes[1].path)
    assert kept > 30


def test_one_wait(ops: Ops) -> None:
    check_one_wait(ops)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_penalties_cost_a_wait_of_their_own(ops: Ops, rule: str) -> None:
    """The law depends on the path then, so the ids are needed before it."""
    ops, waits = counting(ops)
    sampler = Sampler(ops, Sampling(temperature=1.0, presence_penalty=1.0), VOCAB, [1], rule=rule)
    tree = DraftTree(Pending(ops, ops.array([1, 2, 3])), (-1, 0, 1))
    verify(sampler.law(single(ops, [hashed(VOCAB, "t")((i,)) for i in range(3)]), tree), tree, sampler)
    assert len(waits) == 2
