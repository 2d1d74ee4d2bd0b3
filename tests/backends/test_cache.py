"""The cache after every round: what it says it holds, and what it scores (T7), across turns and interruptions."""

from __future__ import annotations

import numpy as np
import pytest

from speclocal.core.sampling import Sampling
from speclocal.core.tree import DraftTree
from speclocal.errors import ContextError
from tests.backends import checks
from tests.backends.play import DRAFTERS, GREEDY, SHAPES, Shaped, drafter, host, ids, play, tokens_of, tree_of
from tests.toys import generate

CLASSES = ["llama", "gemma2", "gemma3_text", "mistral", "gpt_oss", "mixtral", "smollm3"]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", ["oracle", "wrong", "mixed", "ragged tree", "full tree", "draft tree"])
def test_every_round_scores_like_a_fresh_model(lab, plain, kind, name):
    prompt = ids(10)
    expected = plain(kind, prompt, 40)
    target = lab.new(kind)
    if name in ("ragged tree", "full tree"):
        made = Shaped(SHAPES[name.split()[0]], prompt + expected, 0.7)
    else:
        made = drafter(name, lab, kind, prompt + expected)
    rounds = play(target, made, prompt, 40, watch=checks.cache_audit(lab, kind, target))
    assert tokens_of(rounds) == expected


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("name", ["draft chain", "draft tree", "stranger tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_models_cache_too(lab, kind, name, temperature):
    """Rolled back exactly: a prefix of the text, with that prefix's logits."""
    changes = {"seed": 7} if name.startswith("stranger") else {"noise": 0.05}
    draft_model_rolls_back(lab, kind, name, temperature, changes)


def draft_model_rolls_back(lab, kind, name, temperature, changes):
    prompt = ids(10)
    made = drafter(name, lab, kind)

    def watch(text, round):
        held = list(made.model.cached)
        assert held == text[: len(held)]
        assert len(text) - len(held) <= 2 or round.finish
        checks.close(
            checks.next_logits(made.model, text[len(held)]),
            lab.logits(kind, text[: len(held) + 1], **changes)[-1],
            "draft model",
        )

    play(lab.new(kind), made, prompt, 40, Sampling(temperature=temperature, seed=2), watch=watch)


@pytest.mark.parametrize("name", DRAFTERS)
def test_turns_equal_a_fresh_target(lab, plain, name):
    """The same prompt twice, the next turn, an edited turn, a shorter one: each answer is a fresh one's (CTX-05)."""
    first = ids(30, seed=1)
    answer = plain("llama", first, 20)
    turn = first + answer + ids(7, seed=2)
    edited = turn[:33] + ids(9, seed=3)
    target = lab.new("llama")
    made = drafter(name, lab, "llama", turn)
    for prompt in (first, first, turn, edited, edited[:5], first, turn):
        rounds = play(target, made, prompt, 20)
        assert tokens_of(rounds) == plain("llama", prompt, 20)


def test_only_what_is_new_is_processed(lab, plain):
    """Taps cover the tokens that went through the model: what is new, and the last one that is not."""
    first = ids(30, seed=1)
    text = first + plain("llama", first, 20)
    target = lab.new("llama", taps=(1,))
    play(target, drafter("draft tree", lab, "llama"), first, 20)
    for prompt, new in (([*text, 1, 2, 3], 4), ([*text, 1, 2, 4, 5], 2), ([*text, 1, 2, 4, 5], 0), (text, 0)):
        assert target.prefill(prompt).taps.shape[0] == new + 1
        assert list(target.cached) == prompt
    assert target.prefill([]).taps is None
    target.prefill(text)
    target.tap((1,))
    assert list(target.cached) == text
    target.tap((2,))
    assert not target.cached, "of these tokens the other state is not known"


def test_drafter_changed_between_turns(lab, plain):
    """Every drafter after every other one, over one target."""
    target = lab.new("llama")
    text = ids(8)
    known = text + plain("llama", text, 120)
    made = {name: drafter(name, lab, "llama", known) for name in DRAFTERS}
    for name in (*DRAFTERS, *reversed(DRAFTERS)):
        expected = plain("llama", text, 6)
        assert tokens_of(play(target, made[name], text, 6)) == expected
        text = text + expected


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_interrupted_then_continued(lab, name, temperature):
    """A closed generator leaves target and drafter fit for the next text, whatever it is."""
    sampling = Sampling(temperature=temperature, seed=8)
    prompt = ids(9)
    expected = tokens_of(play(lab.new("llama"), drafter("none", lab, "llama"), prompt, 40, sampling))
    target, made = lab.new("llama"), drafter(name, lab, "llama", prompt + expected)
    text = list(prompt)
    for size in (5, 6, 7, 100):
        left = 40 - (len(text) - len(prompt))
        rounds = generate(target, made, text, sampling, left, limit=made.limit)
        made_now = []
        for round in rounds:
            made_now += round.tokens
            if len(made_now) >= size:
                break
        rounds.close()
        text += made_now
    assert text[len(prompt) :] == expected
    other = ids(9, seed=5)
    assert tokens_of(play(target, made, other, 10)) == lab.plain("llama", other, 10)


@pytest.mark.parametrize("failing", ["score", "commit"])
def test_an_error_in_the_middle_of_a_round(lab, plain, failing, monkeypatch):
    """As Ctrl-C anywhere: the next answer is right."""
    prompt = ids(9)
    target, made = lab.new("llama"), drafter("draft tree", lab, "llama")
    calls = 0
    original = getattr(target, failing)

    def interrupted(*args):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(target, failing, interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(target, made, prompt, 40)
    assert tokens_of(play(target, made, prompt, 40)) == plain("llama", prompt, 40)


def test_commit_moves_only_the_rows_it_must(lab):
    """Buffers stay where they are, committed rows keep their bits, moved ones are the path's."""
    prompt = ids(20)
    for path in ((), (1,), (1, 4), (2,), (3, 11), (2, 7)):
        target = lab.new("llama")
        target.prefill(prompt[:-1])
        host(target, target.score(tree_of(SHAPES["full"], prompt[-1])).logits)
        before, places = lab.rows_of(target, 19 + 13), lab.storages(target)
        target.commit(path)
        after = lab.rows_of(target, 19 + 13)
        assert lab.storages(target) == places
        expected = before.copy()
        for i, node in enumerate(path):
            expected[:, :, 20 + i] = before[:, :, 19 + node]
        assert np.array_equal(after, expected), path


def test_a_path_in_place_moves_nothing(lab):
    prompt = ids(20)
    target = lab.new("llama")
    target.prefill(prompt[:-1])
    host(target, target.score(DraftTree.chain(prompt[-1], ids(6))).logits)
    with lab.allocations(target) as sizes:
        target.commit((1, 2, 3, 4))
    assert not sizes


def test_two_thousand_tokens_are_never_copied(lab):
    """What a round and its commit allocate stays far below the cache's size, whatever the tree."""
    prompt = ids(2000)
    target = lab.new("llama", head_dim=256)
    target.prefill(prompt[:-1])
    held = lab.cache_bytes(target)
    for shape in SHAPES:
        tree = tree_of(SHAPES[shape], target.cached[-1])
        with lab.allocations(target) as passed:
            host(target, target.score(tree).logits)
        # The keys of one layer are a quarter of the cache of two: even they are not copied, once or bit by bit.
        assert max(passed) < held / 16, f"{shape}: an array of {max(passed)} bytes beside a cache of {held}"
        assert sum(passed) < held / 4
        deepest = max(range(len(tree)), key=lambda n: tree.depth[n])
        with lab.allocations(target) as moved:
            target.commit(tree.path(deepest))
        assert sum(moved) < held / 100
    places = lab.storages(target)
    play(target, Shaped(SHAPES["full"], ids(3000), 0.5), [*target.cached, 1], 40)
    assert lab.storages(target) == places, "room for the answer was made with the prompt"


def test_a_copied_cache_is_seen(lab):
    prompt = ids(300)
    target = lab.new("llama")
    lab.copies_its_cache(target)
    target.prefill(prompt[:-1])
    held, places = lab.cache_bytes(target), lab.storages(target)
    host(target, target.score(tree_of(SHAPES["full"], prompt[-1])).logits)
    with lab.allocations(target) as moved:
        target.commit((2, 7))
    assert sum(moved) > held / 10
    assert lab.storages(target) != places


def test_buffers_grow_and_keep_everything(lab, plain):
    """An answer longer than the room made with the prompt."""
    prompt = ids(5)
    expected = plain("gemma2", prompt, 600)
    target = lab.new("gemma2")
    made = drafter("mixed", lab, "gemma2", prompt + expected, depth=8)
    places = []
    rounds = play(target, made, prompt, 600, watch=lambda text, round: places.append(tuple(lab.storages(target))))
    assert tokens_of(rounds) == expected
    assert 2 <= len(set(places)) <= 4, "growth in blocks, not every round"


def test_prompts_must_fit(lab):
    target = lab.new("llama", context=64)
    with pytest.raises(ContextError, match=r"65 tokens.* 64"):
        target.prefill(ids(65))
    target.prefill(ids(63))
    assert host(target, target.score(DraftTree.chain(1)).logits).shape == (1, target.vocab)


def test_a_text_may_fill_the_context(lab, plain):
    """The last token needs no place in the cache: 64 positions hold 10 + 54."""
    prompt = ids(10)
    expected = plain("llama", prompt, 54)
    for name in ("oracle", "draft tree", "mixed"):
        target = lab.new("llama", context=64)
        made = drafter(name, lab, "llama", prompt + expected, depth=8)
        assert tokens_of(play(target, made, prompt, 54)) == expected


@pytest.mark.parametrize("length", [50, 63, 64, 65, 66, 200])
@pytest.mark.parametrize("name", ["draft chain", "draft tree"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=1)], ids=["greedy", "sampled"])
def test_draft_context_shorter_than_the_targets(lab, name, length, sampling):
    """Past its limit the draft model is silent and says so once; the text is plain's (CTX-01)."""
    prompt = ids(length, seed=length)
    n = min(100, 256 - length)
    expected = tokens_of(play(lab.new("llama", context=256), drafter("none", lab, "llama"), prompt, n, sampling))
    notices = []
    made = drafter(name, lab, "llama", notify=notices.append, context=64)
    for _ in range(2):
        rounds = play(lab.new("llama", context=256), made, prompt, n, sampling)
        assert tokens_of(rounds) == expected
    assert len(notices) == 1
    assert "64" in notices[0]
    if length <= 60:
        assert any(len(r.tree) > 1 for r in rounds)
