"""The loop over toy targets: the same text with every drafter and tree, and what each setting means inside a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from speclocal.core.interfaces import Limit, Ops, Origin
from speclocal.core.sampling import Sampling
from speclocal.drafters import none, scripted
from tests.toys import RAGGED, HashTarget, LawDrafter, chain, full, generate, hashed, mixed, text

VOCAB = 40
PROMPT = [3, 1, 4]
LONE: Any = ((), ((((((),),),),),), ())
"""One lone deep branch between two leaves."""
SHAPES = {
    "chain 1": chain(1),
    "chain 2": chain(2),
    "chain 5": chain(5),
    "chain 8": chain(8),
    "wide 1x10": full(10),
    "deep 6x1": full(1, 1, 1, 1, 1, 1),
    "full 3x3": full(3, 3),
    "ragged": RAGGED,
    "lone deep branch": LONE,
}
SETTINGS = {
    "greedy": Sampling(),
    "repetition": Sampling(repetition_penalty=1.3),
    "presence": Sampling(presence_penalty=1.5),
    "frequency": Sampling(frequency_penalty=0.8),
    "sampled": Sampling(temperature=1.0, seed=5),
    "hot and filtered": Sampling(temperature=1.7, top_k=12, top_p=0.9, min_p=0.02, seed=6),
    "everything": Sampling(
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={5: 2.0, 6: -100.0},
        min_tokens=12,
        seed=7,
    ),
}


def good(shape: Any, how: str = "without-replacement") -> LawDrafter:
    """Drafts from a law near the target's."""
    return LawDrafter(mixed(hashed(VOCAB, "target"), hashed(VOCAB, "noise"), 0.85), shape, how)


def plain(ops: Ops, settings: Sampling, count: int = 40, **more: Any) -> list[int]:
    return text(generate(HashTarget(ops, VOCAB), none.Drafter(), PROMPT, settings, count, **more))


def check_same_text(ops: Ops, settings: Sampling, count: int = 40) -> None:
    """GRD-03, SMP coupled: token for token the plain text, for every tree and drafter, useful ones included."""
    words = plain(ops, settings, count, end_ids=[2])
    kept = 0
    for shape in SHAPES.values():
        for drafter in (good(shape), good(shape, "one-hot"), LawDrafter(hashed(VOCAB, "useless"), shape)):
            rounds = list(generate(HashTarget(ops, VOCAB), drafter, PROMPT, settings, count, end_ids=[2]))
            assert [t for r in rounds for t in r.tokens] == words
            kept += sum(len(r.path) for r in rounds)
    assert kept > 30, "the drafts were worth checking"


@pytest.mark.parametrize("name", SETTINGS)
def test_same_text(ops: Ops, name: str) -> None:
    check_same_text(ops, SETTINGS[name])


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_greedy_under_every_rule(ops: Ops, rule: str) -> None:
    """At temperature 0 the other rules give the plain text too."""
    words = plain(ops, Sampling())
    for shape in (chain(1), chain(4)) if rule == "block" else SHAPES.values():
        assert text(generate(HashTarget(ops, VOCAB), good(shape), PROMPT, Sampling(), 40, rule=rule)) == words


def check_wrong_drafts(ops: Ops) -> None:
    """GRD-02: drafts that are never right: nothing accepted, the first one included, and the plain text."""
    for settings in (Sampling(), Sampling(temperature=1.0, seed=3)):
        words = plain(ops, settings)
        for depth in (1, 2, 4):
            drafter = scripted.Drafter(scripted.Settings("wrong", (*PROMPT, *words), depth, vocab=VOCAB))
            rounds = list(generate(HashTarget(ops, VOCAB), drafter, PROMPT, settings, 40))
            assert [t for r in rounds for t in r.tokens] == words
            assert all(r.path == () for r in rounds)
            assert sum(len(r.tree) > 1 for r in rounds) == 39


def test_wrong_drafts(ops: Ops) -> None:
    check_wrong_drafts(ops)


@pytest.mark.parametrize("depth", [2, 8, 48])
@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_penalties_with_known_outcomes(ops: Ops, name: str, depth: int) -> None:
    """LGT-01: right drafts are all kept, wrong ones leave no trace."""
    settings = SETTINGS[name]
    words = plain(ops, settings, 120)
    assert words != plain(ops, Sampling(), 120), "the penalty bites"
    for preset in ("oracle", "wrong", "mixed"):
        drafter = scripted.Drafter(scripted.Settings(preset, (*PROMPT, *words), depth, vocab=VOCAB))
        rounds = list(generate(HashTarget(ops, VOCAB), drafter, PROMPT, settings, 120))
        assert [t for r in rounds for t in r.tokens] == words
        if preset == "oracle":
            assert all(len(r.path) == len(r.tree) - 1 for r in rounds)


def test_filters_reach_every_position(ops: Ops) -> None:
    """SMP-05: min-p 0.9 leaves the argmax; a ban of the plain tokens bans them everywhere in a block."""
    greedy = plain(ops, Sampling())
    oracle = scripted.Settings("oracle", (*PROMPT, *greedy), 4, vocab=VOCAB)
    for seed in range(5):
        settings = Sampling(temperature=1.0, min_p=1.0, seed=seed)
        assert text(generate(HashTarget(ops, VOCAB), scripted.Drafter(oracle), PROMPT, settings, 40)) == greedy
    banned = greedy[1]
    settings = Sampling(logit_bias={banned: -100.0})
    words = text(generate(HashTarget(ops, VOCAB), scripted.Drafter(oracle), PROMPT, settings, 40))
    assert banned not in words
    assert words == plain(ops, settings)
    for rule in ("rejection", "coupled"):
        forced = Sampling(temperature=1.0, logit_bias={11: 100.0})
        assert set(text(generate(HashTarget(ops, VOCAB), good(chain(5)), PROMPT, forced, 20, rule=rule))) == {11}


def check_end_tokens_wait(ops: Ops) -> None:
    """No end token before `min_tokens`, whatever the tree: at a depth of a block the count goes on."""
    for count in (1, 3, 6, 9):
        settings = Sampling(temperature=1.0, logit_bias={2: 100.0}, min_tokens=count, seed=count)
        for shape in (chain(1), chain(4), RAGGED):
            words = text(generate(HashTarget(ops, VOCAB), good(shape), PROMPT, settings, 40, end_ids=[2]))
            assert (len(words), words.index(2)) == (count + 1, count)


def test_end_tokens_wait(ops: Ops) -> None:
    check_end_tokens_wait(ops)


def test_seeds(ops: Ops) -> None:
    """SMP-07: a seed is a text; other seeds and streams are other texts."""
    hot = [Sampling(temperature=1.5, seed=s) for s in (42, 42, 42, *range(1, 11))]
    texts = [text(generate(HashTarget(ops, VOCAB), good(chain(3)), PROMPT, s, 10)) for s in hot]
    assert texts[0] == texts[1] == texts[2]
    assert len({tuple(t) for t in texts}) == 11
    assert plain(ops, hot[0], 10, stream=1) != texts[0]


@pytest.mark.parametrize("temperature", [0.7, 0.01])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_draft_equals_target(ops: Ops, rule: str, temperature: float) -> None:
    """SMP-04: everything is accepted; the residual, all zeros, is never needed and never NaN."""
    settings = Sampling(temperature=temperature, seed=1)
    drafter = LawDrafter(hashed(VOCAB, "target"), chain(4))
    rounds = list(generate(HashTarget(ops, VOCAB), drafter, PROMPT, settings, 600, rule=rule))
    drafted = sum(len(r.tree) - 1 for r in rounds)
    assert drafted > 400
    assert sum(len(r.path) for r in rounds) >= 0.999 * drafted


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_every_round_commits_a_token(ops: Ops, rule: str) -> None:
    """PRF-04: empty drafts, single drafts, hopeless drafts; never an endless retry."""
    plans = {
        "none": lambda tokens, limit: [],
        "empty path": lambda tokens, limit: [[]],
        "off and on": lambda tokens, limit: [[7]] if len(tokens) % 2 else [],
    }
    settings = Sampling(temperature=1.0, seed=9)
    for name, plan in plans.items():
        if rule == "block" and name == "off and on":
            continue  # block verification refuses drafts without a law
        rounds = list(generate(HashTarget(ops, VOCAB), scripted.Drafter(plan=plan), PROMPT, settings, 30, rule=rule))
        assert all(r.tokens for r in rounds)
        assert sum(len(r.tokens) for r in rounds) == 30
        if rule == "coupled":
            assert [t for r in rounds for t in r.tokens] == plain(ops, settings, 30)


@pytest.mark.parametrize("depth", [0, 1, 1000])
def test_any_draft_length(ops: Ops, depth: int) -> None:
    """PRF-05: 0 is plain decoding; a longer draft than the text is cut to what may still be emitted."""
    words = plain(ops, Sampling(), 30)
    oracle = scripted.Drafter(scripted.Settings("oracle", (*PROMPT, *words), 1000, vocab=VOCAB))
    rounds = list(generate(HashTarget(ops, VOCAB), oracle, PROMPT, Sampling(), 30, limit=Limit(depth, depth)))
    assert [t for r in rounds for t in r.tokens] == words
    assert len(rounds) == {0: 30, 1: 15, 1000: 1}[depth]


def test_origins(ops: Ops) -> None:
    check_origins(ops)


def check_origins(ops: Ops) -> None:
    """Accepted, recovered after a refusal, bonus after none, plain without a draft."""
    words = plain(ops, Sampling(), 12)
    right = [[*words[:2], (words[2] + 1) % VOCAB], words[3:5], []]
    drafts = iter(right)
    drafter = scripted.Drafter(plan=lambda tokens, limit: [next(drafts)])
    rounds = list(generate(HashTarget(ops, VOCAB), drafter, PROMPT, Sampling(), 7))
    kept = [Origin.ACCEPTED] * 2
    assert [r.origins for r in rounds] == [(*kept, Origin.RECOVERED), (*kept, Origin.BONUS), (Origin.PLAIN,)]


def test_one_token_prompt_and_progress(ops: Ops, hash_target: Callable[..., HashTarget]) -> None:
    """The first token comes out of the same verification as all others."""
    target = hash_target(VOCAB)
    rounds = list(generate(target, good(chain(3)), [3], Sampling(), 9))
    assert [t for r in rounds for t in r.tokens] == text(
        generate(hash_target(VOCAB), none.Drafter(), [3], Sampling(), 9)
    )
    assert target.cached[0] == 3
    assert len(target.cached) == 9


def events(ops: Ops, submit: bool, count: int = 16) -> list[str]:
    """What happens in which order, the consumer's turn ("round") included."""
    seen: list[str] = []
    drafter = good(chain(2))
    target = HashTarget(replace(ops, submit=(lambda *arrays: seen.append("submit")) if submit else None), VOCAB)

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            seen.append(name)
            return call(*args)

        return noting

    drafter.draft = noted("draft", drafter.draft)  # type: ignore[method-assign]
    target.score = noted("score", target.score)  # type: ignore[method-assign]
    target.commit = noted("commit", target.commit)  # type: ignore[method-assign]
    for _ in generate(target, drafter, PROMPT, Sampling(), count):
        seen.append("round")
    return seen


def check_order(ops: Ops) -> None:
    """Where passes can be submitted, the next is under way before a round is shown; after the last there is none."""
    seen = events(ops, submit=True)
    rounds = seen.count("round")
    assert rounds > 2
    one = ["draft", "score", "submit", "commit"]
    assert seen == [*one[:3], *["commit", *one[:3], "round"] * (rounds - 1), "commit", "round"]
    assert events(ops, submit=False) == ["draft", "score", "commit", "round"] * rounds


def test_the_next_pass_is_submitted_before_a_round_is_shown(ops: Ops) -> None:
    check_order(ops)


@pytest.mark.parametrize("name", ["greedy", "sampled", "everything"])
def test_same_text_with_passes_submitted_early(ops: Ops, name: str) -> None:
    submitting = replace(ops, submit=lambda *arrays: None)
    assert plain(submitting, SETTINGS[name]) == plain(replace(ops, submit=None), SETTINGS[name])
    check_same_text(submitting, SETTINGS[name])
