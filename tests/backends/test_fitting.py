"""Drafters that fit the target and those that do not: options, vocabularies, contexts, acceptance rules."""

from __future__ import annotations

import pytest

import speclocal
from speclocal.core.sampling import Sampling
from speclocal.engine import Load, Request
from speclocal.errors import ModelError, UsageError
from tests.backends.folders import GREEDY, SIZE, answer, model_folder, one_line


@pytest.mark.parametrize(
    ("method", "options", "what"),
    [
        ("eagle9", {}, "eagle9"),
        ("ngrm", {}, "did you mean ngram"),
        ("ngram", {"size": "3"}, "no setting 'size'.*min, max"),
        ("none", {"depth": "3"}, "no settings"),
        ("ngram", {"depth": "-1"}, "depth.*-1"),
        ("ngram", {"depth": "1.9"}, "depth.*1.9"),
        ("ngram", {"depth": "many"}, "depth.*many"),
        ("ngram", {"depth": "1000"}, "depth.*1000.*128"),
        ("ngram", {"min": "5", "max": "4"}, "min.*5"),
        ("ngram", {"confidence": "2"}, "confidence.*2"),
        ("scripted", {"preset": "lucky"}, "lucky"),
        ("draft_model", {}, "draft-model"),
    ],
)
def test_impossible_drafters(folder, backend_name, method, options, what):
    with pytest.raises(UsageError, match=what) as error:
        speclocal.load(Load(str(folder), method, None, options, backend=backend_name))
    assert one_line(error) == 2


@pytest.mark.parametrize("depth", ["0", "4 ", "128"])
def test_draft_lengths_at_the_edge(build, folder, backend_name, depth):
    """0 is plain decoding, blanks do no harm, the longest draft works (PRF-05)."""
    made = speclocal.load(Load(str(folder), "ngram", options={"depth": depth}, backend=backend_name))
    got = answer(made, [7, 8] * 20)
    assert got.token_ids == answer(build(), [7, 8] * 20).token_ids
    assert (got.stats.drafted == 0) == (depth == "0")


def test_block_verification_needs_chains(build):
    with pytest.raises(UsageError, match=r"block.*topk=3"):
        build("draft tree", verify="block")
    notices = []
    made = build("ngram", verify="block", notify=notices.append)
    assert made.header.verify == "rejection"
    assert made.header.notices == tuple(notices)
    assert len(notices) == 1


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("draft chain", "rejection"),
        ("draft tree", "rejection"),
        ("draft chain", "block"),
    ],
)
def test_rules_agree_at_temperature_0(build, name, rule):
    assert answer(build(name, verify=rule)).token_ids == answer(build()).token_ids


@pytest.mark.parametrize(
    ("name", "rule"), [("draft chain", "block"), ("draft chain", "rejection"), ("draft tree", "rejection")]
)
def test_uncoupled_rules_answer(build, name, rule):
    got = answer(build(name, verify=rule), sampling=Sampling(temperature=1.0, seed=1))
    assert got.stats.drafted > got.stats.accepted > 0
    assert len(got.token_ids) == 40


@pytest.mark.parametrize("ids", [(3, 9), (300, 301)])
def test_another_tokenizer_is_refused(lab, tmp_path, build, ids):
    """By the first id that differs, with both strings (TOK-02)."""
    other = model_folder(lab, tmp_path, swapped=ids)
    with pytest.raises(ModelError, match=f"id {ids[0]} differs") as error:
        build("draft chain", draft_model=str(other))
    assert one_line(error) == 1
    text = build().text
    assert repr(text.token(ids[0])) in str(error.value)
    assert repr(text.token(ids[1])) in str(error.value)


@pytest.mark.parametrize(("wide", "narrow"), [(520, 512), (512, 520), (512, SIZE)])
@pytest.mark.parametrize("name", ["draft chain", "draft tree"])
def test_padded_vocabularies(lab, tmp_path, build, wide, narrow, name):
    """Padding rows differ: accepted with a notice, never proposed, never drawn (TOK-01, TOK-03)."""
    target = str(model_folder(lab, tmp_path / "a", vocab_size=wide, raised=SIZE))
    draft = str(model_folder(lab, tmp_path / "b", vocab_size=narrow, raised=SIZE if narrow > SIZE else None))
    notices = []
    made = build(name, target=target, draft_model=draft, notify=notices.append)
    assert notices == [f"vocab {wide}/{narrow}, shared {SIZE}: padding ids are never proposed"]
    for sampling in (GREEDY, Sampling(temperature=2.0, seed=1)):
        got = answer(made, sampling=sampling)
        assert got.token_ids == answer(build(target=target), sampling=sampling).token_ids
        assert max(got.token_ids) < SIZE
        assert got.text == made.text.decode(got.token_ids)
        assert got.stats.drafted


@pytest.mark.parametrize("length", [50, 63, 64, 65, 200])
def test_draft_context_shorter_than_the_targets(lab, tmp_path, build, length):
    """One notice with the numbers, then plain decoding (CTX-01)."""
    target = str(model_folder(lab, tmp_path / "a", max_position_embeddings=256))
    draft = str(model_folder(lab, tmp_path / "b", max_position_embeddings=64, noise=0.05))
    notices = []
    made = build("draft chain", target=target, draft_model=draft, notify=notices.append)
    prompt = [i % SIZE for i in range(length)]
    got = answer(made, prompt, 100)
    assert got.token_ids == answer(build(target=target), prompt, 100).token_ids
    assert [("64" in notice) for notice in notices] == [True]
    if length == 50:
        assert got.stats.drafted


def test_drafters_change_between_turns(build, draft_folder, folder):
    """CTX-05 d and e; a drafter that does not fit changes nothing."""
    made, plain = build("ngram"), build()
    prompt = list(made.prompt_ids(Request("one two three", raw=True)))
    changes = ["none", f"draft_model:{draft_folder}", "ngram", f"draft_model:{draft_folder}", "none"]
    for name in changes:
        made.set_drafter(name)
        assert made.header.drafter == name.partition(":")[0]
        got = answer(made, prompt, 12)
        assert got.token_ids == answer(plain, prompt, 12).token_ids
        prompt += got.token_ids
    made.set_drafter("ngram", {"depth": "3"})
    kept = made.drafter
    for wrong, options in (("eagle9", {}), ("ngram", {"depth": "-3"}), ("draft_model", {})):
        with pytest.raises(UsageError):
            made.set_drafter(wrong, options)
        assert made.drafter is kept
