"""Checks of a backend as plain functions, so that the mutants can be shown to fail them."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from speclocal.core.head_spec import FEATURE
from speclocal.core.tree import DraftTree
from tests.backends.play import (
    SHAPES,
    TOLERANCE,
    Shaped,
    accepted_length,
    host,
    ids,
    leaves,
    path_tokens,
    play,
    tokens_of,
    tree_of,
)


def close(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Logits agree."""
    assert got.shape == expected.shape, f"{what}: shape {got.shape} instead of {expected.shape}"
    off = np.abs(got - expected).max(initial=0.0)
    assert off <= TOLERANCE, f"{what}: off by {off:.1e}"


def tree_equals_single_steps(lab: ModuleType, kind: str, shape: str, length: int) -> None:
    """Scores of a tree are those of its paths, before and after a commit along the deepest one."""
    prompt = ids(length, seed=length)
    target = lab.new(kind)
    target.prefill(prompt[:-1])
    tree = tree_of(SHAPES[shape], prompt[-1], seed=1)
    scored = host(target, target.score(tree).logits)
    deepest = max(range(len(tree)), key=lambda node: tree.depth[node])
    for leaf in leaves(tree):
        run = lab.stepwise if leaf == deepest else lab.logits
        expected = run(kind, prompt[:-1] + path_tokens(tree, leaf))[length - 1 :]
        close(scored[[0, *tree.path(leaf)]], expected, f"{kind}, {shape}, path to node {leaf}")
    target.commit(tree.path(deepest))
    text = prompt[:-1] + path_tokens(tree, deepest)
    assert list(target.cached) == text
    close(next_logits(target, 5), lab.logits(kind, [*text, 5])[-1], f"{kind}, {shape}, step after the commit")


def levels_equal_one_pass(lab: ModuleType, kind: str) -> None:
    """A tree scored level by level, as a draft model grows it, has the scores of one pass."""
    prompt = ids(20)
    target = lab.new(kind)
    target.prefill(prompt[:-1])
    tree = tree_of(SHAPES["ragged"], prompt[-1])
    whole = host(target, target.score(tree).logits)
    at = 0
    for depth in range(max(tree.depth) + 1):
        end = sum(d <= depth for d in tree.depth)
        part = DraftTree(tree.tokens[:end], tree.parents[:end])
        close(host(target, target.score(part, at).logits), whole[at:end], f"{kind}, level {depth}")
        at = end


def taps_are_hidden_states(lab: ModuleType, kind: str) -> None:
    """Taps of prefill and of every node are the untouched model's hidden states of that layer."""
    prompt, points = ids(12), (0, 1, 2, FEATURE)
    target = lab.new(kind, taps=points)
    scores = target.prefill(prompt[:-1])
    close(host(target, scores.taps), lab.hidden(kind, prompt[:-1], points), f"{kind}, taps of the prompt")
    tree = tree_of(SHAPES["full"], prompt[-1])
    taps = host(target, target.score(tree).taps)
    for leaf in leaves(tree):
        expected = lab.hidden(kind, prompt[:-1] + path_tokens(tree, leaf), points)[len(prompt) - 1 :]
        close(taps[[0, *tree.path(leaf)]], expected, f"{kind}, taps of node {leaf}")


def next_logits(target, token: int) -> np.ndarray:
    """Logits after one more token, without keeping it."""
    return host(target, target.score(DraftTree.chain(token)).logits)[0]


def past_the_window(lab: ModuleType, kind: str) -> None:
    """100 tokens with a window of 16 and half of the drafts wrong (CTX-02): plain text, and exact logits each round."""
    prompt = ids(6)
    expected = lab.plain(kind, prompt, 100)
    target = lab.new(kind)
    drafter = Shaped(SHAPES["full"], prompt + expected, luck=0.5)
    audit = cache_audit(lab, kind, target, every=4)
    rounds = play(target, drafter, prompt, 100, watch=audit)
    assert tokens_of(rounds) == expected
    assert 1.2 < accepted_length(rounds) < 2.8, "the drafts must hit and miss"


def cache_audit(lab: ModuleType, kind: str, target, every: int = 1, **changes):
    """Called after each round: the cache holds exactly the committed text, and scores as a fresh model does (T7)."""
    count = 0

    def watch(text, round) -> None:
        nonlocal count
        assert list(target.cached) == text[:-1], "cached ids are not the committed ones"
        count += 1
        if count % every == 0 or round.finish:
            close(next_logits(target, text[-1]), lab.logits(kind, text, **changes)[-1], f"{kind}, round {count}")

    return watch


def prompt_in_chunks(lab: ModuleType, kind: str, length: int) -> None:
    """The first token after a prompt of any length is the untouched model's."""
    prompt = ids(length, seed=length)
    target = lab.new(kind)
    target.prefill(prompt[:-1])
    close(next_logits(target, prompt[-1]), lab.logits(kind, prompt)[-1], f"{kind}, prompt of {length}")


def edited_prompt(lab: ModuleType, kind: str) -> None:
    """After a text is edited in the middle, nothing of the old one is left."""
    old, new = ids(40, seed=1), ids(40, seed=2)
    target = lab.new(kind)
    target.prefill(old)
    text = old[:25] + new[25:]
    target.prefill(text[:-1])
    assert list(target.cached) == text[:-1]
    close(next_logits(target, text[-1]), lab.logits(kind, text)[-1], f"{kind}, edited prompt")


def greedy_equals_generate(lab: ModuleType, kind: str, drafter, prompt, expected, **more) -> list:
    """Token for token what the untouched framework gives."""
    rounds = play(lab.new(kind), drafter, prompt, len(expected), **more)
    assert tokens_of(rounds) == expected, f"{kind} with {drafter.name}"
    return rounds
