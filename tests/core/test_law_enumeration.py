"""The law of the first three tokens, enumerated: rule x tree shape x sampler setting, against plain sampling.

Plain sampling is `reference.law`, an independent sampler. What is enumerated is the project's: processed laws at every
node of every possible draft, the rule's numbers, the walk. The coupled rule emits plain draws by construction, so for
it the laws per node are compared here, and its texts token by token in `test_decode`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from speclocal.core.interfaces import Ops
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.tree import DraftTree
from tests.core import reference
from tests.core.exact import ROUNDS, Law, Prefix, continued, difference, drafts, law_of, nested, plainly, prefixes
from tests.toys import RAGGED, chain, double, full, hashed, single

TOLERANCE = 1e-6
ANSWER = (0, 1)
"""Already generated when the round begins."""
END = 2
FLAT, PEAKED = 1.2, 2.5
"""Spread of the draft's logits. Flat: its filters cut. Peaked: several refusals in a row are likely, and matter."""

SETTINGS = {
    "greedy": Sampling(),
    "temperature 0.3": Sampling(temperature=0.3),
    "temperature 1": Sampling(temperature=1.0),
    "temperature 1.7": Sampling(temperature=1.7),
    "top-k": Sampling(temperature=1.0, top_k=3),
    "top-p": Sampling(temperature=1.0, top_p=0.6),
    "min-p": Sampling(temperature=1.0, min_p=0.2),
    "all filters": Sampling(temperature=1.3, top_k=3, top_p=0.8, min_p=0.1),
    "top-k and min-p": Sampling(temperature=0.8, top_k=3, min_p=0.25),
    "top-p and min-p": Sampling(temperature=0.8, top_p=0.9, min_p=0.1),
    "repetition": Sampling(temperature=1.0, repetition_penalty=1.3),
    "presence": Sampling(temperature=1.0, presence_penalty=1.5),
    "frequency": Sampling(temperature=1.0, frequency_penalty=0.75),
    "negative penalties": Sampling(
        temperature=1.0, presence_penalty=-0.5, frequency_penalty=-0.5, repetition_penalty=0.8
    ),
    "bias": Sampling(temperature=1.0, logit_bias={0: 1.5, 1: -2.0}),
    "min tokens": Sampling(temperature=1.0, min_tokens=4),
    "greedy with penalties": Sampling(repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={1: 0.5}),
    "everything": Sampling(
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={1: 0.5},
        min_tokens=3,
    ),
}
ALL = tuple(SETTINGS)
FEW = ("temperature 1", "temperature 0.3", "top-k and min-p", "repetition", "everything")
SHAPES: dict[str, tuple[str, str, Any, int, Sequence[str]]] = {
    # name: rule, siblings, shape, vocabulary, settings
    "chain of 1": ("rejection", "without-replacement", chain(1), 4, ALL),
    "chain of 2": ("rejection", "iid", chain(2), 4, ALL),
    "chain of 3": ("rejection", "without-replacement", chain(3), 4, ALL),
    "chain of 4": ("rejection", "without-replacement", chain(4), 3, ALL),
    "block of 1": ("block", "iid", chain(1), 4, ALL),
    "block of 2": ("block", "iid", chain(2), 4, ALL),
    "block of 3": ("block", "iid", chain(3), 4, ALL),
    "block of 4": ("block", "iid", chain(4), 3, ALL),
    "3 siblings i.i.d.": ("rejection", "iid", full(3), 4, ALL),
    "3 siblings without replacement": ("rejection", "without-replacement", full(3), 4, ALL),
    "3 siblings one-hot": ("rejection", "one-hot", full(3), 4, ALL),
    "3x2 i.i.d.": ("rejection", "iid", full(3, 2), 2, ALL),
    "3x2 without replacement": ("rejection", "without-replacement", full(3, 2), 3, FEW),
    "3x2 one-hot": ("rejection", "one-hot", full(3, 2), 4, ALL),
    "ragged without replacement": ("rejection", "without-replacement", (((),), ((),), ()), 4, ALL),
    "ragged i.i.d.": ("rejection", "iid", (((),), ()), 4, ALL),
    "ragged one-hot": ("rejection", "one-hot", RAGGED, 4, ALL),
    "no draft": ("rejection", "one-hot", (), 4, ALL),
}


@dataclass(frozen=True)
class Toy:
    """A target and a draft model over a small vocabulary, under one setting, in the middle of a text."""

    ops: Ops
    vocab: int
    settings: Sampling
    spread: float = FLAT

    @property
    def prompt(self) -> Prefix:
        return (self.vocab - 1, 1)

    def sampler(self) -> Sampler:
        made = Sampler(self.ops, self.settings, self.vocab, self.prompt, end_ids=[END])
        made.commit(ANSWER)
        return made

    def logits(self, salt: str) -> Any:
        row = hashed(self.vocab, "target", 1.2)
        row = row if salt == "target" else hashed(self.vocab, salt, self.spread)
        return lambda path: row((*self.prompt, *ANSWER, *path))

    def plain(self, salt: str) -> Any:
        """Law of the token after a drafted path, by the reference."""
        row = self.logits(salt)

        @cache
        def law(path: Prefix) -> list[float]:
            return reference.law(row(path), self.settings, self.prompt, (*ANSWER, *path), (), [END])

        return law

    def laws(self, sampler: Sampler, tree: DraftTree, salt: str, make: Any = double) -> Any:
        """Processed laws at every node by the project's sampler, [N, V] probabilities."""
        row = self.logits(salt)
        raw = make(self.ops, [row(path) for path in prefixes(tree)])
        return sampler.probabilities(sampler.law(raw, tree))


def output_law(toy: Toy, rule: str, siblings: str, shape: Any, length: int, make_q: Any = None) -> Law:
    """The law of the first `length` tokens: every draft, every outcome of the rule, continued by plain sampling.

    make_q: (toy, sampler, tree) -> the law that is reported for the drafts; by default that they are drawn from.
    """
    sampler, total = toy.sampler(), defaultdict(float)
    q = toy.plain("draft")
    for branches, weight in drafts(q, shape, siblings):
        tokens, parents = nested(branches)
        tree = DraftTree((ANSWER[-1], *tokens), (-1, *parents))
        if siblings != "one-hot":
            reported = make_q(toy, sampler, tree) if make_q else toy.laws(sampler, tree, "draft")
            tree = DraftTree(tree.tokens, tree.parents, reported, siblings)
        outcomes = ROUNDS[rule](toy.ops, toy.laws(sampler, tree, "target"), tree)
        for key, chance in law_of(outcomes, tree, weight).items():
            total[key] += chance
    return continued(total, toy.plain("target"), length)


def check_output_law(ops: Ops, rule: str, siblings: str, shape: Any, vocab: int, name: str, spread: float) -> None:
    toy = Toy(ops, vocab, SETTINGS[name], spread)
    got = output_law(toy, rule, siblings, shape, 3)
    want = dict(plainly(toy.plain("target"), (), 3))
    assert sum(got.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert difference(got, want) <= TOLERANCE, (rule, siblings, shape, name)


@pytest.mark.parametrize("spread", [FLAT, PEAKED])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_law(ops: Ops, shape: str, spread: float) -> None:
    rule, siblings, tree, vocab, names = SHAPES[shape]
    for name in names:
        check_output_law(ops, rule, siblings, tree, vocab, name, spread)


TREES = {
    "root": DraftTree.chain(1),
    "chain": DraftTree.chain(1, [2, 0, 1, 1, 2]),
    "siblings": DraftTree((1, 0, 1, 2), (-1, 0, 0, 0)),
    "bushy": DraftTree((1, 2, 0, 2, 1, 0, 4, 2), (-1, 0, 0, 1, 1, 2, 4, 6)),
    "with duplicates": DraftTree((1, 0, 0, 3, 3), (-1, 0, 0, 1, 2)),
}


def check_node_laws(ops: Ops) -> None:
    """Every node's law is the reference's for that node's own path: float64 and float32, whole and partial passes."""
    for settings in SETTINGS.values():
        toy = Toy(ops, 5, settings)
        for tree in TREES.values():
            sampler, plain = toy.sampler(), toy.plain("target")
            want = [plain(path) for path in prefixes(tree)]
            for make, tolerance in ((double, TOLERANCE), (single, 1e-5)):
                (got,) = ops.to_host(toy.laws(sampler, tree, "target", make))
                assert same(got, want, tolerance), settings
            row = toy.logits("target")
            for start in range(1, len(tree)):
                raw = double(ops, [row(path) for path in prefixes(tree)[start:]])
                (got,) = ops.to_host(sampler.probabilities(sampler.law(raw, tree, start)))
                assert same(got, want[start:], TOLERANCE), (settings, start)


def same(got: list[list[float]], want: list[list[float]], tolerance: float) -> bool:
    return all(
        abs(a - b) <= tolerance for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)
    ) and len(got) == len(want)


def test_node_laws(ops: Ops) -> None:
    check_node_laws(ops)


def check_history(ops: Ops) -> None:
    """Only committed tokens count: laws after a round are those of a sampler that saw just the emitted tokens."""
    for name in ("repetition", "presence", "frequency", "everything"):
        toy = Toy(ops, 5, SETTINGS[name])
        used, fresh = toy.sampler(), toy.sampler()
        for tree in TREES.values():
            toy.laws(used, tree, "target")  # drafts are looked at, and refused
        used.commit([4, 0])
        fresh.commit([4, 0])
        tree = TREES["bushy"]
        assert ops.to_host(toy.laws(used, tree, "target")) == ops.to_host(toy.laws(fresh, tree, "target"))


def test_history(ops: Ops) -> None:
    check_history(ops)
