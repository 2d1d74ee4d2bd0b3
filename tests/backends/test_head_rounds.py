"""Whole texts as the golden implementations decoded them: the same trees, round by round, from the target's own states.

Nothing is stored of these rounds but tokens and parents. Target, taps, head, its cache, the table of draft ids and the
choice of nodes must all be right for the third or tenth tree to be the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from speclocal.core.draft_law import DraftLaws
from speclocal.core.fixed_tree import EAGLE_1, FixedTree, fill_fixed, run_fixed
from speclocal.core.growth import chain, grow
from speclocal.core.head_spec import FEATURE
from speclocal.core.sampling import Sampler, Sampling
from tests.backends.bench_heads import CHAINS, MEDUSA, P_EAGLE, TREES, Bench, host
from tests.core.golden_heads import arrays, cases

GREEDY = Sampling()
# A bias of nothing. Settings that name ids ask for laws as wide as the target's.
WIDE = Sampling(logit_bias={0: 0.0})


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory) -> Bench:
    return Bench(lab, tmp_path_factory.mktemp("heads"))


def drafted(name, head, laws, tokens, taps, case):
    """The tree of a round. tokens, taps: new states and the tokens that follow them."""
    meta = cases(name)["meta"]
    if name in MEDUSA:
        choices = meta["settings"][case["setting"]]["medusa_choices"]
        return fill_fixed(laws, FixedTree.of(choices), head.predict(taps[-1, 0]))
    if name == P_EAGLE:
        rows = head.extend(tokens, taps, meta["draft_len"] - 1)
        return chain(laws, rows[:1], lambda beam: rows[beam.depth : beam.depth + 1], meta["draft_len"])
    first = head.extend(tokens, taps)
    if name in CHAINS:
        return chain(laws, first, head.step, meta["draft_len"])
    if name == "eagle1":
        return run_fixed(laws, EAGLE_1, first, head.step)
    return grow(laws, first, head.step, case["top_k"], case["depth"] + 1, case["total_token"] - 1)


def golden_tree(name, case, each):
    """Tokens and parents as stored."""
    meta = cases(name)["meta"]
    if name in (*CHAINS, P_EAGLE):
        tokens = [each["root_token"], *each["draft_tokens"]]
        return tokens, list(range(-1, len(tokens) - 1))
    if name in MEDUSA:
        return each["tree_tokens"], meta["settings"][case["setting"]]["parents"]
    return each["tree_tokens"], each.get("parents") or meta["parents"]


def walk(tree, best):
    """The greedy path and the token after it."""
    path, node = [], 0
    while True:
        found = [child for child in tree.children[node] if tree.tokens[child] == best[node]]
        if not found:
            return path, best[node]
        node = found[0]
        path.append(node)


def same_rounds(bench, name, number, sampling=GREEDY, ids=None, points=None):
    """How many rounds of a case have the golden tree, until the first one that has not; and how many there are."""
    target, head, case = bench.target(name), bench.head(name), cases(name)["cases"][number]
    target.tap(points or (getattr(head.spec, "taps", (FEATURE,))))
    target.prefill([])
    taps = target.prefill(case["prompt"]).taps
    sampler = Sampler(target.ops, sampling, target.vocab, case["prompt"])
    root = golden_tree(name, case, case["rounds"][0])[0][0]
    tokens = [*case["prompt"][1:], root]
    for done, each in enumerate(case["rounds"]):
        assert len(target.cached) == each["context_len"]
        laws = DraftLaws(sampler, getattr(head, "ids", None) if ids is None else ids, root)
        tree = drafted(name, head, laws, tokens, taps, case)
        if (list(tree.tokens), list(tree.parents)) != golden_tree(name, case, each):
            return done, len(case["rounds"])
        tree = replace(tree, parents=tuple(tree.parents), tokens=tuple(tree.tokens), layout=None)
        scores = target.score(tree)
        path, root = walk(tree, host(scores.logits).argmax(-1).tolist())
        assert len(path) == each["accept_len"]
        taps = scores.taps[target.ops.array([0, *path])]
        target.commit(path)
        tokens = [*(tree.tokens[i] for i in path), root]
        sampler.commit(tokens)
    return len(case["rounds"]), len(case["rounds"])


def one_of_each_setting(name):
    """The numbers of the first two cases of each greedy setting."""
    settings = {}
    for number, case in enumerate(cases(name)["cases"]):
        meta = cases(name)["meta"].get("settings", [{}])[case.get("setting", 0)]
        if meta.get("temperature", 0.0) == 0:
            settings.setdefault(case.get("setting", 0), []).append(number)
    return [number for numbers in settings.values() for number in numbers[:2]]


@pytest.mark.parametrize("name", [*TREES, *CHAINS, P_EAGLE, *MEDUSA])
def test_the_golden_rounds(bench, name):
    for number in one_of_each_setting(name):
        done, rounds = same_rounds(bench, name, number)
        assert done == rounds > 1, f"case {number}"


@pytest.mark.parametrize("name", ["eagle3", "eagle3-speculators", P_EAGLE])
def test_the_golden_rounds_over_the_whole_vocabulary(bench, name):
    done, rounds = same_rounds(bench, name, 0, WIDE)
    assert done == rounds


@pytest.mark.parametrize("name", ["eagle3", "eagle3-speculators", P_EAGLE])
@pytest.mark.parametrize("sampling", [GREEDY, WIDE], ids=["narrow", "wide"])
def test_draft_ids_read_as_ids_show(bench, name, sampling):
    head = bench.head(name)
    columns = head.ops.arange(head.spec.draft_vocab)
    for wrong in (columns, head.ids - columns):  # no table; the stored offsets taken for ids
        done, _ = same_rounds(bench, name, 0, sampling, wrong)
        assert done == 0


@pytest.mark.parametrize("name", ["eagle3", "eagle31-fcnorm", P_EAGLE])
@pytest.mark.parametrize("shift", [-1, 1])
def test_other_layers_show(bench, name, shift):
    points = [point + shift for point in bench.spec(name).taps]
    done, rounds = same_rounds(bench, name, 0, points=points)
    assert done < rounds


@pytest.mark.parametrize("name", ["eagle1", "eagle3-narrow", "eagle31-speculators", P_EAGLE])
def test_half_precision(lab, tmp_path, name):
    """Target and head in bfloat16: close to the golden logits, which are handed out in float32."""
    bench, held = Bench(lab, tmp_path, "bfloat16"), arrays(name)
    target, head = bench.target(name), bench.head(name)
    tree = "case0.round0.features_in" in held
    expected = held["case0.round0.step0.logits" if tree else "case0.round0.step_logits"][:1]
    prompt = cases(name)["cases"][0]["prompt"]
    target.tap(head.spec.taps)
    taps = target.prefill(prompt).taps
    root = golden_tree(name, cases(name)["cases"][0], cases(name)["cases"][0]["rounds"][0])[0][0]
    got = head.extend([*prompt[1:], root], taps)
    assert "float32" in str(got.dtype)
    assert "bfloat16" in str(taps.dtype)
    assert 1e-3 < np.abs(host(got) - expected).max() < 0.3
    head.truncate(0)
    wrong = head.extend([*prompt[1:], root], taps * 0)
    assert np.abs(host(wrong) - expected).max() > 0.5
