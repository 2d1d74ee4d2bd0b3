"""T1, whole rules: laws of a round averaged over drafts, and the seeds of the coupled rule."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from speclocal.core.interfaces import Ops
from speclocal.core.sampling import Sampling
from speclocal.core.tree import DraftTree, TreeBuilder
from tests.conftest import golden
from tests.core import gtest
from tests.core.exact import ROUNDS, Prefix, Table, continued, difference, draft_tuples, drafts, law_of
from tests.core.tables import ROOT, drafted, golden_law, instances, logs, prefix, rows, table
from tests.toys import LawDrafter, TableTarget, chain, double, fractions, full, generate

EXACT = 1e-12


# Whole rules: averaged over drafts.


def sampled(siblings: str, *widths: int) -> Any:
    return lambda ops, p, q: (
        (drafted(ops, branches, q, siblings), weight) for branches, weight in drafts(q, full(*widths), siblings)
    )


def least_likely(ops: Ops, p: Table, q: Table) -> Iterator[tuple[DraftTree, float]]:
    path: Prefix = ()
    for _ in range(3):
        path = (*path, min(range(3), key=lambda t: (p(path)[t], t)))
    yield DraftTree.chain(ROOT, path), 1.0


def stop_after_unlikely(ops: Ops, p: Table, q: Table) -> Iterator[tuple[DraftTree, float]]:
    def grow(path: Prefix, weight: float) -> Iterator[tuple[Prefix, float]]:
        for token, chance in enumerate(q(path)):
            if chance > 0:
                longer = (*path, token)
                done = len(longer) == 3 or chance < 0.3
                yield from [(longer, weight * chance)] if done else grow(longer, weight * chance)

    for path, weight in grow((), 1.0):
        tree = DraftTree.chain(ROOT, path)
        yield DraftTree.chain(ROOT, path, double(ops, rows(q, tree)), "without-replacement"), weight


def rerank(ops: Ops, p: Table, q: Table) -> Iterator[tuple[DraftTree, float]]:
    scores: dict[Prefix, float] = {}
    frontier: list[tuple[Prefix, float]] = [((), 1.0)]
    for _ in range(2):
        grown = []
        for path, score in frontier[:2]:
            for token in next(draft_tuples(q(path), 2, "one-hot"))[0]:
                if q(path)[token] > 0:
                    grown.append(((*path, token), score * q(path)[token]))
        scores.update(grown)
        frontier = sorted(grown, key=lambda item: (-item[1], item[0]))
    best = sorted(scores, key=lambda path: (-scores[path], len(path), path))[:4]
    tree = TreeBuilder(ROOT)
    for path in best:
        tree.add(path, 100)
    yield tree.build(), 1.0


def heads() -> Table:
    laws = [fractions(row) for row in golden("tables")["heads"]]
    return lambda path: laws[len(path) % 2]


def cartesian_best(ops: Ops, p: Table, q: Table) -> Iterator[tuple[DraftTree, float]]:
    branches, _ = next(drafts(heads(), full(2, 2), "one-hot"))
    yield drafted(ops, branches, heads(), "one-hot"), 1.0


def cartesian_drawn(ops: Ops, p: Table, q: Table) -> Iterator[tuple[DraftTree, float]]:
    head = heads()
    for first, a in draft_tuples(head(()), 2, "without-replacement"):
        for second, b in draft_tuples(head((0,)), 2, "without-replacement"):
            branches = [[t, [[s, []] for s in second]] for t in first]
            yield drafted(ops, branches, head, "without-replacement"), a * b


def merged_paths(ops: Ops, p: Table, q: Table) -> Iterator[tuple[DraftTree, float]]:
    chains = [([b[0][0], b[0][1][0][0]], weight) for b, weight in drafts(q, chain(2), "iid")]
    for (one, a), (two, b) in itertools.product(chains, repeat=2):
        tree = TreeBuilder(ROOT)
        tree.add(one, 100)
        tree.add(two, 100)
        yield tree.build(), a * b


RULES = {
    "chain/token-level (accept, residual, bonus)": ("rejection", sampled("without-replacement", 1, 1, 1)),
    "chain/block verification": ("block", sampled("without-replacement", 1, 1, 1)),
    "chain/independent sample-and-match": ("walk", sampled("without-replacement", 1, 1, 1)),
    "chain/deterministic drafter, one-hot rule": ("rejection", sampled("one-hot", 1, 1, 1)),
    "chain/deterministic adversarial drafter, walk": ("walk", least_likely),
    "chain/stop after a low-q token, token kept": ("rejection", stop_after_unlikely),
    "tree iid/recursive rejection": ("rejection", sampled("iid", 2, 2)),
    "tree iid/walk": ("walk", sampled("iid", 2, 2)),
    "tree wor/recursive rejection, q renormalised": ("rejection", sampled("without-replacement", 2, 2)),
    "tree wor/walk": ("walk", sampled("without-replacement", 2, 2)),
    "tree top-k/one-hot rule (EAGLE-2/3)": ("rejection", sampled("one-hot", 2, 2)),
    "tree top-k/walk": ("walk", sampled("one-hot", 2, 2)),
    "tree dynamic top-k + rerank/one-hot rule": ("rejection", rerank),
    "Medusa cartesian top-k/walk": ("walk", cartesian_best),
    "Medusa cartesian sampled wor/recursive rejection": ("rejection", cartesian_drawn),
    "K iid paths/walk": ("walk", merged_paths),
}


def rule_law(ops: Ops, name: str, p: Table, q: Table) -> dict[tuple[Prefix, int], float]:
    """Law of one round of a rule, averaged over its drafts."""
    rule, every_draft = RULES[name]
    law: dict[tuple[Prefix, int], float] = defaultdict(float)
    for tree, weight in every_draft(ops, p, q):
        for key, chance in law_of(ROUNDS[rule](ops, double(ops, rows(p, tree)), tree), tree, weight).items():
            law[key] += chance
    return law


@pytest.mark.parametrize("name", RULES)
def test_rules(ops: Ops, name: str) -> None:
    """Each round has its golden law; continued by plain sampling it has the target's law of four tokens."""
    targets = golden("target_laws")
    for instance, (p, q) in instances().items():
        want = golden("rules")["rules"][name]["instances"].get(instance)
        law = rule_law(ops, name, p, q)
        if want and want["round"]:
            assert difference(law, golden_law(want["round"])) < EXACT, instance
            assert sum(n * c for (_, n), c in law.items()) == pytest.approx(want["expected_accepted"], abs=EXACT)
        plain = {prefix(key): chance for key, chance in targets[instance].items()}
        assert difference(continued(law, p, 4), plain) < EXACT, instance


def coupled_counts(ops: Ops, p: Table, q: Table, shape: Any, rounds: int) -> Counter[tuple[Prefix, int]]:
    """One round of the real loop under the coupled rule, for many seeds."""
    keys = [key for n in range(4) for key in itertools.product(range(3), repeat=n)]
    target_logs, draft_logs = ({key: logs(law(key)) for key in keys} for law in (p, q))
    flat = [0.0] * 3
    counts: Counter[tuple[Prefix, int]] = Counter()
    for seed in range(rounds):
        drafter = LawDrafter(lambda h: draft_logs.get(h[1:], flat), shape)
        target = TableTarget(ops, target_logs, prompt=1)
        first = next(generate(target, drafter, [0], Sampling(temperature=1.0, seed=seed), 10))
        counts[first.tokens, len(first.path)] += 1
    return counts


@pytest.mark.parametrize(
    ("name", "shape"),
    [("chain/Gumbel-coupled walk", chain(3)), ("tree Gumbel top-k/coupled walk", full(2, 2))],
)
@pytest.mark.parametrize("instance", ["generic", "q_truncated"])
def test_coupled_rounds_have_the_golden_law(ops: Ops, name: str, shape: Any, instance: str) -> None:
    """The coupled law needs an integral over the noise, so it is counted: real loop, real noise, 2,000 seeds."""
    p, q = instances()[instance]
    want = golden_law(golden("rules")["rules"][name]["instances"][instance]["round"])
    assert gtest.p_value(coupled_counts(ops, p, q, shape, 2000), want) > 1e-4


# Seeds.


def check_per_seed(ops: Ops) -> None:
    """40 seeds, four drafters: token for token the plain text, in exactly the golden rounds."""
    file = golden("per_seed")
    start, length = file["start_position"], file["length"]
    laws = {name: {k: logs(row) for k, row in table(file[name]).items()} for name in ("p", "q_near", "q_unrelated")}
    flat = [0.0] * file["V"]
    drafters = {
        "near, chain 3, coupled": ("q_near", chain(3), "without-replacement"),
        "near, tree 2x2, coupled": ("q_near", full(2, 2), "without-replacement"),
        "unrelated, tree 2x2, coupled": ("q_unrelated", full(2, 2), "without-replacement"),
        "near, tree 2x2, plain top-k": ("q_near", full(2, 2), "one-hot"),
    }
    for sequence in file["sequences"]:
        settings = Sampling(temperature=1.0, seed=sequence["seed"])
        for run in sequence["runs"]:
            name, shape, how = drafters[run["drafter"]]
            law = laws[name]
            drafter = LawDrafter(lambda h, law=law: law.get(h[start:], flat), shape, how)
            rounds = generate(TableTarget(ops, laws["p"], start), drafter, [0] * start, settings, 100)
            emitted: list[int] = []
            for want, kept in run["rounds"]:
                round = next(rounds)
                # The golden laws end after six tokens.
                room = length - len(emitted)
                assert list(round.tokens[:room]) == want[:room], (sequence["seed"], run["drafter"])
                assert min(len(round.path), room) == min(kept, room)
                emitted += round.tokens
            assert emitted[:length] == sequence["autoregressive"]


def test_per_seed(ops: Ops) -> None:
    check_per_seed(ops)
