"""The Engine over a model folder: text, ids, counts and cache agree, wherever and why ever the text ends."""

from __future__ import annotations

import json

import pytest

from speclocal.core.sampling import Sampling
from speclocal.engine import Request
from speclocal.errors import ContextError, UsageError
from tests.backends.folders import SIZE, Forced, model_folder

DRAFTERS = ("none", "ngram", "draft chain", "draft tree", "oracle", "wrong", "mixed")
PROMPT = "the quick brown fox"
# Only printable characters, and no end token: text in which a stop string can be looked for.
PRINTABLE = Sampling(
    logit_bias={i: -100.0 for i in range(SIZE) if not (32 <= i < 94 or 256 <= i < SIZE - 4)} | {SIZE - 3: -100.0}
)


@pytest.fixture(scope="module")
def engine(build):
    return build()


def finish(stream):
    """Consume a stream; checks what must hold for every answer."""
    steps = list(stream)
    return checked(stream, steps)


def checked(stream, steps):
    answer = stream.answer()
    pieces = [piece for step in steps for piece in step.pieces]
    assert "".join(piece.text for piece in pieces) == answer.text
    assert len(answer.token_ids) == len(answer.origins) == answer.stats.tokens
    assert answer.prompt_tokens == len(stream.prompt_ids)
    assert answer.cached_tokens < answer.prompt_tokens
    stats = json.loads(json.dumps(answer.stats.as_dict()))
    assert stats["tokens"] == len(answer.token_ids)
    assert 0 <= stats["acceptance"] <= 1
    assert stats["accepted"] <= stats["drafted"]
    return answer


def ask(engine, prompt=PROMPT, sampling=PRINTABLE, **more):
    return finish(engine.stream(Request(prompt, sampling=sampling, **{"max_tokens": 40, "raw": True, **more})))


def whole(engine, answer):
    """The answer was not cut by a stop string: its text is that of its ids."""
    assert answer.text == engine.text.decode(answer.token_ids)


@pytest.fixture(scope="module")
def known(engine):
    """Prompt and a long answer, for drafters that know it."""
    stream = engine.stream(Request(PROMPT, raw=True, sampling=PRINTABLE, max_tokens=120))
    answer = finish(stream)
    assert answer.finish_reason == "length"
    assert answer.text.isprintable()
    return [*stream.prompt_ids, *answer.token_ids]


@pytest.mark.parametrize("name", DRAFTERS)
def test_one_answer_for_all_drafters(build, engine, known, name):
    made = build(name, known)
    for sampling in (PRINTABLE, Sampling(temperature=1.0, seed=3), Sampling(temperature=0.8, top_p=0.9, seed=4)):
        expected, answer = ask(engine, sampling=sampling), ask(made, sampling=sampling)
        whole(made, answer)
        assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
        assert answer.seed == sampling.seed
    if name in ("oracle", "draft chain", "draft tree"):
        assert ask(made).stats.mean_accepted_length > 1.2


@pytest.mark.parametrize("depth", [4, 5, 8])
@pytest.mark.parametrize("name", ["none", "oracle", "draft tree"])
@pytest.mark.parametrize("position", [3, 5, 8, 9])
def test_end_token_in_the_middle_of_a_run(build, known, name, depth, position):
    """Nothing after it is shown, counted or kept (STP-01)."""
    made = build(name, known, depth)
    start = len(made.prompt_ids(Request(PROMPT, raw=True)))
    answer_ids = known[start:]
    end = answer_ids[position]
    made.text.end_ids = frozenset({end})
    first = answer_ids.index(end)
    answer = ask(made)
    whole(made, answer)
    assert answer.token_ids == tuple(answer_ids[: first + 1])
    assert answer.finish_reason == "stop"
    assert list(made.target.cached) == known[: start + first]


@pytest.mark.parametrize("name", DRAFTERS)
def test_stop_strings(build, known, name):
    """The earliest match cuts, wherever its characters came from; no character of it leaks (STP-02, STP-05)."""
    made = build(name, known, 8)
    plain = ask(made).text
    stops = [plain[7:10], plain[11:16], plain[20:26], plain[3:4]]
    for chosen in ([stops[0]], [stops[2], stops[1]], [stops[2], "nowhere"], [stops[3]], ["nowhere"]):
        at = (
            min((plain.find(s) + len(s), plain.find(s)) for s in chosen if s in plain)[1]
            if chosen != ["nowhere"]
            else None
        )
        answer = ask(made, stop=tuple(chosen))
        assert answer.text == plain[:at]
        assert answer.finish_reason == ("length" if at is None else "stop")
        text = made.text.decode(answer.token_ids)
        assert text.startswith(answer.text), "the ids spell the text, and at most the rest of its last token"
        assert len(made.text.decode(answer.token_ids[:-1])) < max(len(answer.text), 1)
    assert ask(made).text == plain, "the cache is fit for the next request"


@pytest.mark.parametrize("name", ["none", "oracle", "draft tree"])
@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 10, 17])
def test_limits(build, known, name, limit):
    """STP-03"""
    made = build(name, known, 8)
    answer = ask(made, max_tokens=limit)
    whole(made, answer)
    assert len(answer.token_ids) == limit
    assert answer.finish_reason == "length"
    assert list(made.target.cached) == [*known[: answer.prompt_tokens], *answer.token_ids[:-1]]


def test_no_tokens_asked(engine):
    """STP-06: empty text, no model work, no division by zero."""
    passes = engine.target.cached[:]
    answer = ask(engine, prompt="something new", max_tokens=0)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "length")
    assert engine.target.cached == passes
    assert answer.stats.mean_accepted_length == 0


def test_negative_limit_is_refused(engine):
    with pytest.raises(UsageError):
        engine.stream(Request(PROMPT, max_tokens=-1))


@pytest.mark.parametrize("name", ["none", "ngram", "draft tree"])
def test_context_is_filled_exactly(build, name):
    """Prompts around the size of the context (CTX-06), no limit but the context, drafts longer than the room left."""
    made = build(name, depth=64, context=256)
    assert made.header.context == 256
    for length in (200, 250, 254, 255):
        for limit in (None, 10**9):
            answer = ask(made, prompt=[7] * length, max_tokens=limit)
            assert len(answer.token_ids) == 256 - length
            assert answer.finish_reason == "length"
            whole(made, answer)
    before = list(made.target.cached)
    for length in (256, 257, 5000):
        with pytest.raises(ContextError, match=rf"{length} tokens.*255") as error:
            made.stream(Request([7] * length))
        assert error.value.exit_code == 1
    assert made.target.cached == before


@pytest.mark.parametrize("name", DRAFTERS)
def test_short_prompts(build, engine, known, name):
    """CTX-07"""
    made = build(name, known)
    for request in (
        Request("", raw=True, max_tokens=9),
        Request(" ", raw=True, max_tokens=9),
        Request("\n", raw=True, max_tokens=9),
        Request("x", raw=True, max_tokens=9),
        Request([5], max_tokens=9),
        Request("hi", max_tokens=9),
        Request(" ", max_tokens=9),
        Request([{"role": "user", "content": ""}], max_tokens=9),
    ):
        answer = finish(made.stream(request))
        whole(made, answer)
        assert answer.token_ids == finish(engine.stream(request)).token_ids
        assert answer.token_ids
    for prompt in ("", [], ()):
        with pytest.raises(UsageError, match="empty") as error:
            made.stream(Request(prompt))
        assert error.value.exit_code == 2


def test_no_start_token_and_no_template(lab, tmp_path, build):
    bare = build(target=str(model_folder(lab, tmp_path, start=False, template=False)))
    with pytest.raises(UsageError, match="empty"):
        bare.stream(Request("", raw=True))
    assert finish(bare.stream(Request("hi", max_tokens=3))).token_ids


@pytest.mark.parametrize("prompt", [[SIZE + 12], [1, 10**6], [-1]])
def test_prompt_ids_outside_the_vocabulary(engine, prompt):
    with pytest.raises(UsageError, match="vocabulary"):
        engine.stream(Request(prompt))


@pytest.mark.parametrize("token", [SIZE, 512, 10**6])
def test_bias_outside_the_vocabulary(engine, token):
    """LGT-02"""
    with pytest.raises(UsageError, match=str(token)) as error:
        engine.stream(Request(PROMPT, sampling=Sampling(logit_bias={token: 1.0})))
    assert error.value.exit_code == 2


def test_characters_split_over_rounds(build, known):
    """The bytes of a character come in different rounds; the text is whole (UTF-01)."""
    made = build()
    start = made.prompt_ids(Request(PROMPT, raw=True))
    wanted = "ab🙂ď ábel🙂ské👩‍👩‍👧"
    table = {made.text.token(i): i for i in range(256)}
    spelled = [table[char] for char in byte_chars(wanted)]
    plan = start + spelled + [SIZE - 3]
    for depth in (1, 2, 3, 4):
        made = build("oracle", plan, depth)
        made.target = Forced(made.target, plan)
        stream = made.stream(Request(PROMPT, raw=True, sampling=Sampling()))
        steps = list(stream)
        answer = checked(stream, steps)
        assert len(spelled) == len(wanted.encode()) > len(wanted)
        assert answer.text == wanted == made.text.decode(answer.token_ids)
        assert "�" not in "".join(piece.text for step in steps for piece in step.pieces)
        assert answer.stats.mean_accepted_length == pytest.approx(len(plan[len(start) :]) / len(steps))
        assert len(steps) == -(-(len(spelled) + 1) // (depth + 1))


def byte_chars(text):
    """The byte-level alphabet's spelling of a text."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in printable)}
    return [moved.get(b, chr(b)) for b in text.encode()]


@pytest.mark.parametrize("name", DRAFTERS)
def test_interrupted(build, known, name):
    """An answer that was stopped is valid, and the next one is a fresh engine's."""
    made = build(name, known)
    stream = made.stream(Request(PROMPT, raw=True, sampling=PRINTABLE, max_tokens=80))
    steps = [next(stream), next(stream), next(stream)]
    answer = checked(stream, steps)
    assert answer.finish_reason == "interrupted"
    assert list(answer.token_ids) == known[answer.prompt_tokens :][: len(answer.token_ids)]
    assert list(ask(made, max_tokens=120).token_ids) == known[answer.prompt_tokens :]
    other = ask(made, "another text")
    assert other.token_ids == ask(build(), "another text").token_ids


def test_turns_reuse_the_cache(build, engine):
    """A repeat, the next turn, an edited one; each equals a fresh engine's answer (CTX-05)."""
    made, messages = build("draft tree"), [{"role": "user", "content": "hello there"}]
    for content in ("and now?", "go on", "once more"):
        answer = finish(made.stream(Request(messages, sampling=PRINTABLE, max_tokens=15)))
        fresh = finish(build().stream(Request(messages, sampling=PRINTABLE, max_tokens=15)))
        assert answer.token_ids == fresh.token_ids
        assert fresh.cached_tokens == 0
        again = finish(made.stream(Request(messages, sampling=PRINTABLE, max_tokens=15)))
        assert again.token_ids == answer.token_ids
        assert again.cached_tokens == again.prompt_tokens - 1
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": content}]
    messages[2]["content"] = "edited"
    edited = finish(made.stream(Request(messages, sampling=PRINTABLE, max_tokens=15)))
    assert edited.token_ids == finish(engine.stream(Request(messages, sampling=PRINTABLE, max_tokens=15))).token_ids
    assert 10 < edited.cached_tokens < edited.prompt_tokens - 10


def test_rejected_text_is_told(build, known):
    made = build("wrong", known)
    steps = list(made.stream(Request(PROMPT, raw=True, sampling=PRINTABLE, max_tokens=8)))
    assert all(step.rejected for step in steps[:-1])
    made = build("oracle", known)
    steps = list(made.stream(Request(PROMPT, raw=True, sampling=PRINTABLE, max_tokens=8)))
    assert not any(step.rejected for step in steps)


def test_progress_of_a_long_prompt(build, lab):
    seen = []
    stream = build().stream(Request([9] * (2 * lab.CHUNK + 5), max_tokens=1), lambda *done: seen.append(done))
    finish(stream)
    total = 2 * lab.CHUNK + 4
    assert seen == [(lab.CHUNK, total), (2 * lab.CHUNK, total), (total, total)]
