"""Losslessness on the real default model, in float32: greedy equals transformers' generate, coupled equals plain."""

from __future__ import annotations

import pytest

from speclocal.core.interfaces import Drafter, Origin
from speclocal.core.sampling import Sampling
from speclocal.drafters import draft_model, ngram, none, scripted
from speclocal.engine import Engine, Request
from tests.backends.play import GREEDY, SHAPES, Shaped, accepted_length, play, tokens_of

Answers = list[tuple[list[int], list[int]]]
SAMPLED = {
    "T=1": Sampling(temperature=1.0, seed=11),
    "T=0.7 top-p": Sampling(temperature=0.7, top_p=0.9, seed=12),
    "T=1.3 top-k min-p": Sampling(temperature=1.3, top_k=40, min_p=0.02, seed=13),
    "penalties": Sampling(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.4, min_tokens=10, seed=14),
}


def generated(engine: Engine, drafter: Drafter, ids: list[int], n: int, sampling: Sampling = GREEDY) -> list[int]:
    more = {"unknown": engine.text.unknown(engine.target.vocab), "end_ids": sorted(engine.text.end_ids)}
    return tokens_of(play(engine.target, drafter, ids, n, sampling, **more))


def test_plain_decoding_equals_transformers(engine: Engine, answers: Answers) -> None:
    for ids, expected in answers:
        assert generated(engine, none.Drafter(), ids, len(expected)) == expected


def test_ngram_equals_transformers_and_hits(engine: Engine, answers: Answers) -> None:
    for ids, expected in answers:
        assert generated(engine, ngram.Drafter(), ids, len(expected)) == expected
    ids, expected = answers[0]
    ends = sorted(engine.text.end_ids)
    assert accepted_length(play(engine.target, ngram.Drafter(), ids, len(expected), end_ids=ends)) > 2


@pytest.mark.parametrize("depth", range(1, 9))
def test_every_draft_length_equals_transformers(engine: Engine, answers: Answers, depth: int) -> None:
    ids, expected = answers[depth % len(answers)]
    settings = scripted.Settings("mixed", (*ids, *expected), depth=depth, width=2, vocab=1000)
    assert generated(engine, scripted.Drafter(settings), ids, len(expected)) == expected


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tree_shape_equals_transformers(engine: Engine, answers: Answers, shape: str) -> None:
    ids, expected = answers[1]
    drafter = Shaped(SHAPES[shape], [*ids, *expected], luck=0.7, vocab=1000)
    assert generated(engine, drafter, ids, len(expected)) == expected


@pytest.mark.parametrize("topk", [1, 3])
def test_draft_model_equals_transformers(engine: Engine, answers: Answers, topk: int) -> None:
    """The model drafts for itself, with a cache of its own: nearly everything must be accepted."""
    from speclocal.backends.torch.target import TorchTarget

    model = TorchTarget(engine.target.model, engine.target.context)
    drafter = draft_model.Drafter(draft_model.Settings(depth=3, topk=topk, nodes=8), model)
    ids, expected = answers[2]
    ends = sorted(engine.text.end_ids)
    rounds = play(engine.target, drafter, ids, 24, end_ids=ends)
    assert tokens_of(rounds) == expected[:24]
    assert accepted_length(rounds) > (3.5 if topk == 1 else 2.5)


@pytest.mark.parametrize("name", SAMPLED)
def test_coupled_sampling_gives_the_text_of_plain_decoding(engine: Engine, answers: Answers, name: str) -> None:
    ids, _ = answers[1]
    plain = generated(engine, none.Drafter(), ids, 24, SAMPLED[name])
    assert generated(engine, ngram.Drafter(), ids, 24, SAMPLED[name]) == plain
    oracle = scripted.Drafter(scripted.Settings("mixed", (*ids, *plain), depth=5, width=2, vocab=1000))
    assert generated(engine, oracle, ids, 24, SAMPLED[name]) == plain
    assert generated(engine, none.Drafter(), ids, 24, Sampling(temperature=1.0, seed=99)) != plain


def test_stop_string_over_tokens_is_cut_at_its_first_character(engine: Engine, answers: Answers) -> None:
    ids, expected = answers[0]
    whole = engine.text.decode(expected)
    stop = "Boat wa"
    assert stop in whole
    engine.drafter = scripted.Drafter(scripted.Settings("oracle", (*ids, *expected), depth=8, vocab=1000))
    stream = engine.stream(Request(ids, stop=(stop,), max_tokens=40, sampling=Sampling()))
    shown = "".join(piece.text for step in stream for piece in step.pieces)
    answer = stream.answer()
    assert shown == answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    assert engine.text.decode(answer.token_ids).startswith(answer.text)
    assert len(answer.token_ids) == len(answer.origins) == answer.stats.tokens < 20


def test_three_turns_and_an_edit_equal_fresh_answers(engine: Engine) -> None:
    engine.drafter = ngram.Drafter()
    messages: list[dict[str, str]] = []
    for turn in ("Name a colour.", "Name another one.", "And a third."):
        messages.append({"role": "user", "content": turn})
        stream = engine.stream(Request(messages, max_tokens=12, sampling=Sampling()))
        list(stream)
        answer = stream.answer()
        assert answer.cached_tokens > 0 or len(messages) == 1
        engine.target.prefill([])
        fresh = engine.stream(Request(messages, max_tokens=12, sampling=Sampling()))
        list(fresh)
        assert fresh.answer().token_ids == answer.token_ids
        messages.append({"role": "assistant", "content": answer.text})
    edited = [{"role": "user", "content": "Name a fruit."}, *messages[1:-1]]
    again = engine.stream(Request(edited, max_tokens=12, sampling=Sampling()))
    list(again)
    engine.target.prefill([])
    fresh = engine.stream(Request(edited, max_tokens=12, sampling=Sampling()))
    list(fresh)
    assert again.answer().token_ids == fresh.answer().token_ids


def test_origins_tell_who_wrote_each_token(engine: Engine, answers: Answers) -> None:
    ids, expected = answers[0]
    engine.drafter = scripted.Drafter(scripted.Settings("mixed", (*ids, *expected), depth=4, vocab=1000))
    stream = engine.stream(Request(ids, max_tokens=30, sampling=Sampling()))
    steps = list(stream)
    answer = stream.answer()
    assert set(answer.origins) >= {Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS}
    assert answer.stats.accepted == sum(o == Origin.ACCEPTED for o in answer.origins)
    assert any(step.rejected for step in steps)
    assert "".join(p.text for s in steps for p in s.pieces) == answer.text == engine.text.decode(answer.token_ids)
