"""A tree pass scores every node as the untouched model scores its path, one token at a time."""

from __future__ import annotations

import pytest

from speclocal.errors import ModelError
from tests.backends import checks
from tests.backends.kinds import HYBRIDS, KINDS, WINDOWED
from tests.backends.play import SHAPES, ids


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_models_do_not_repeat_themselves(plain, kind):
    """Else equal text would prove little."""
    assert len(set(plain(kind, ids(6), 60))) >= 12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [3, 40])
def test_tree_equals_single_steps(lab, kind, shape, length):
    checks.tree_equals_single_steps(lab, kind, shape, length)


@pytest.mark.parametrize("kind", KINDS)
def test_levels_equal_one_pass(lab, kind):
    checks.levels_equal_one_pass(lab, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_hidden_states(lab, kind):
    checks.taps_are_hidden_states(lab, kind)


@pytest.mark.parametrize("kind", WINDOWED)
def test_past_the_window(lab, kind):
    checks.past_the_window(lab, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_longer_than_a_chunk(lab, kind):
    checks.prompt_in_chunks(lab, kind, lab.CHUNK + 2)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_edited_prompt(lab, kind):
    checks.edited_prompt(lab, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_probe_passes(lab, kind):
    target, notices = lab.probed(kind)
    assert target.trees
    assert not notices
    assert not target.cached


@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_models_are_refused_by_name(lab, tmp_path, kind):
    lab.save_config(kind, tmp_path)
    with pytest.raises(ModelError, match=rf"{kind} .*linear_attention"):
        lab.load(tmp_path)


def test_scores_need_their_earlier_nodes(tiny):
    target = tiny("llama")
    target.prefill(ids(5))
    with pytest.raises(ValueError, match="scored first"):
        target.score(checks.tree_of(SHAPES["chain"], 1), 2)
    with pytest.raises(ValueError, match="not scored"):
        target.commit((1,))
