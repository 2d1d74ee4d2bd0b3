"""Greedy text is token for token that of the untouched framework, with every drafter, draft length and tree (GRD)."""

from __future__ import annotations

import pytest

from speclocal.core.interfaces import Limit
from speclocal.core.sampling import Sampling
from speclocal.drafters import scripted
from tests.backends import checks
from tests.backends.kinds import KINDS, VOCAB
from tests.backends.play import (
    DRAFTERS,
    HITS,
    SHAPES,
    Shaped,
    acceptance,
    accepted_length,
    drafter,
    ids,
    play,
    tokens_of,
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_class_and_drafter(lab, plain, kind, name):
    prompt = ids(9, seed=1)
    expected = plain(kind, prompt, 32)
    made = drafter(name, lab, kind, prompt + expected)
    rounds = checks.greedy_equals_generate(lab, kind, made, prompt, expected)
    if name in HITS:
        assert accepted_length(rounds) > 1.05, "drafts must hit, or nothing was tested"
    if name == "wrong":
        assert acceptance(rounds) == 0


@pytest.mark.parametrize("depth", range(1, 9))
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_draft_length(lab, plain, name, depth):
    for seed in (2, 3):
        prompt = ids(5 + seed, seed)
        expected = plain("llama", prompt, 30)
        made = drafter(name, lab, "llama", prompt + expected, depth)
        rounds = checks.greedy_equals_generate(lab, "llama", made, prompt, expected)
        assert max(max(r.tree.depth) for r in rounds) <= depth
        if name == "oracle":
            assert len(rounds) == -(-30 // (depth + 1)), "an oracle gives depth + 1 tokens a round"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tree_shape(lab, plain, kind, shape):
    prompt = ids(7)
    expected = plain(kind, prompt, 40)
    made = Shaped(SHAPES[shape], prompt + expected, luck=0.8)
    rounds = checks.greedy_equals_generate(lab, kind, made, prompt, expected)
    assert accepted_length(rounds) > 1.4
    assert any(r.path and r.path != tuple(range(1, len(r.path) + 1)) for r in rounds) or shape in ("chain", "deep")


def test_prompt_lookup_hits(lab, plain):
    """Where the text repeats itself, n-grams must be accepted, as a chain and as a tree."""
    kind = "gemma2"
    texts = ((prompt, plain(kind, prompt, 80)) for prompt in (ids(6, seed) for seed in range(2, 40)))
    prompt, expected = next((prompt, text) for prompt, text in texts if len(set(text[40:])) <= 4)
    for name in ("ngram", "ngram chain"):
        rounds = checks.greedy_equals_generate(lab, kind, drafter(name, lab, kind), prompt, expected)
        assert accepted_length(rounds) > 1.8


@pytest.mark.parametrize("name", DRAFTERS)
def test_prompt_lengths(lab, plain, name):
    """Prompts of one token, and around the size of a chunk: the first tokens are right."""
    for length, n in ((1, 12), (2, 12), (lab.CHUNK - 1, 2), (lab.CHUNK, 2), (lab.CHUNK + 1, 2)):
        prompt = ids(length, seed=length)
        expected = plain("llama", prompt, n)
        made = drafter(name, lab, "llama", prompt + expected)
        checks.greedy_equals_generate(lab, "llama", made, prompt, expected)


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss", "qwen2"])
def test_the_same_model_as_drafter_is_always_right(lab, plain, kind, trees):
    prompt = ids(9)
    expected = plain(kind, prompt, 60)
    made = drafter("twin tree" if trees else "twin", lab, kind)
    rounds = checks.greedy_equals_generate(lab, kind, made, prompt, expected)
    if trees:
        assert all(r.path for r in rounds[:-1]), "the likeliest first token is in every tree"
        assert accepted_length(rounds) > 3
    else:
        assert acceptance(rounds) == 1
        assert len(rounds) == 60 // 5


def test_first_draft_is_checked(lab, plain):
    """One wrong draft, one token (GRD-02)."""
    prompt = [1, 1, 1]
    checks.greedy_equals_generate(
        lab, "llama", drafter("ngram", lab, "llama", depth=1), prompt, plain("llama", prompt, 1)
    )
    expected = plain("llama", prompt, 20)
    rounds = wrong_drafts_are_refused(lab, "llama", prompt, expected)
    assert len(rounds) == 20


def wrong_drafts_are_refused(lab, kind, prompt, expected):
    made = drafter("wrong", lab, kind, prompt + expected, depth=1)
    rounds = checks.greedy_equals_generate(lab, kind, made, prompt, expected)
    assert acceptance(rounds) == 0
    return rounds


def test_rounds_without_a_draft(lab, plain, tiny):
    """Empty drafts, single ones, and 200 refused ones: every round gives a token (PRF-04)."""
    prompt = ids(4)
    expected = plain("llama", prompt, 200)

    def now_and_then(tokens, limit):
        at = len(tokens) % 3
        return [[], [[0]], [expected[len(tokens) - 4 :][:2]]][at]

    rounds = play(tiny("llama"), scripted.Drafter(plan=now_and_then), prompt, 200)
    assert tokens_of(rounds) == expected
    assert {len(r.tree) for r in rounds} >= {1, 2, 3}
    rounds = checks.greedy_equals_generate(
        lab, "llama", drafter("wrong", lab, "llama", prompt + expected), prompt, expected
    )
    assert len(rounds) == 200


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 10, 17])
def test_exactly_the_limit(lab, plain, limit):
    """An oracle with long drafts gives no token too many, and the last round drafts no more than it needs (STP-03)."""
    prompt = ids(6)
    expected = plain("llama", prompt, limit + 20)
    made = drafter("oracle", lab, "llama", prompt + expected, depth=8)
    rounds = checks.greedy_equals_generate(lab, "llama", made, prompt, expected[:limit])
    assert rounds[-1].finish == "length"
    assert len(rounds[-1].tree) <= len(rounds[-1].tokens)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"repetition_penalty": 0.8}])
def test_repetition_penalty_as_in_the_framework(lab, plain, name, settings):
    prompt = ids(12)
    expected = plain("llama", prompt, 40, settings)
    assert expected != plain("llama", prompt, 40)
    made = drafter(name, lab, "llama", prompt + expected)
    checks.greedy_equals_generate(lab, "llama", made, prompt, expected, sampling=Sampling(**settings))


def penalised(lab, prompt, n, presence, frequency):
    """Plain greedy decoding with penalties on what was generated, computed here from the untouched model's logits."""
    text = list(prompt)
    for _ in range(n):
        row = lab.logits("llama", text)[-1].copy()
        made = text[len(prompt) :]
        for token in set(made):
            row[token] -= presence + frequency * made.count(token)
        text.append(int(row.argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.8), (-1.0, -0.4)])
def test_penalties_count_only_what_is_kept(lab, presence, frequency):
    """Refused drafts leave no trace, accepted ones count once (LGT-01)."""
    prompt = ids(8)
    expected = penalised(lab, prompt, 24, presence, frequency)
    assert expected != penalised(lab, prompt, 24, 0, 0)
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    for name in DRAFTERS:
        for depth in (2, 8) if name.startswith(("draft", "stranger")) else (2, 8, 48):
            made = drafter(name, lab, "llama", prompt + expected, depth)
            checks.greedy_equals_generate(lab, "llama", made, prompt, expected, sampling=sampling)


@pytest.mark.parametrize("name", DRAFTERS)
def test_bias_holds_at_every_position(lab, plain, name):
    """A banned token never appears, a forced one always (LGT-02, SMP-05)."""
    prompt = ids(6)
    free = plain("llama", prompt, 40)
    banned = sorted(set(free))[:5]
    made = drafter(name, lab, "llama", prompt + free)
    sampling = Sampling(logit_bias=dict.fromkeys(banned, -100.0))
    reference = play(lab.new("llama"), drafter("none", lab, "llama"), prompt, 40, sampling)
    rounds = play(lab.new("llama"), made, prompt, 40, sampling)
    assert tokens_of(rounds) == tokens_of(reference)
    assert not set(tokens_of(rounds)) & set(banned)
    forced = play(
        lab.new("llama"), drafter(name, lab, "llama", prompt + free), prompt, 10, Sampling(logit_bias={7: 100})
    )
    assert tokens_of(forced) == [7] * 10


def test_a_limit_of_no_nodes_is_plain_decoding(tiny, plain):
    prompt = ids(6)
    made = scripted.Drafter(scripted.Settings("wrong", tuple(ids(40)), depth=0, vocab=VOCAB))
    assert made.limit == Limit(0, 0)
    rounds = play(tiny("llama"), made, prompt, 10)
    assert all(len(r.tree) == 1 for r in rounds)
    assert tokens_of(rounds) == plain("llama", prompt, 10)
