"""Keys and values in 4 and 8 bits: less memory, and drafting changes nothing about the text (CTX-04)."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from speclocal.core.memory import token_bytes
from speclocal.core.sampling import Sampling
from speclocal.core.tree import DraftTree
from speclocal.errors import ModelError, UsageError
from tests.backends.folders import answer, model_folder, one_line
from tests.backends.play import SHAPES, Shaped, drafter, host, ids, leaves, path_tokens, play, tokens_of, tree_of

BITS = (8, 4)
KINDS = ("llama", "gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe")
HEAD = {"head_dim": 32}
"""The smallest head whose numbers can share a scale."""


def text(lab, kind, bits, drafted="none", n=40, sampling=None, **more):
    """What a target with such a cache says, with a drafter by name."""
    prompt = ids(10)
    made = drafter(drafted, lab, kind, **HEAD, **more)
    return tokens_of(play(lab.new(kind, kv_bits=bits, **HEAD), made, prompt, n, sampling or Sampling()))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ngram", "draft chain", "draft tree", "stranger tree"])
def test_greedy_text_is_that_of_plain_decoding(lab, kind, bits, name):
    assert text(lab, kind, bits, name) == text(lab, kind, bits)


@pytest.mark.parametrize("bits", BITS)
def test_sampled_text_too(lab, bits):
    sampling = Sampling(temperature=1.0, seed=3)
    assert text(lab, "llama", bits, "draft tree", sampling=sampling) == text(lab, "llama", bits, sampling=sampling)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_pass_rounds_as_single_steps_do(lab, kind, bits):
    difference, control = trees_and_steps(lab, kind, bits)
    assert difference < 1e-4
    assert control > 1e-2, "rounding to so few bits must show: else nothing was rounded"


def trees_and_steps(lab, kind, bits):
    """Median over texts of the largest difference of a tree pass to single steps, and of those to full precision.

    The median: products over other numbers of rows differ in their last bit, and now and then a number lies so near to
    the border of two codes that this is enough to give it the other one.
    """
    differences, controls = zip(*(tree_and_steps(lab, kind, bits, seed) for seed in range(5)), strict=True)
    return np.median(differences), np.median(controls)


def tree_and_steps(lab, kind, bits, seed):
    """The same of one text, relative to the spread of the logits."""
    prompt = ids(24, seed)  # past the window of 16
    target, single, full = (lab.new(kind, kv_bits=b, **HEAD) for b in (bits, bits, None))
    target.prefill(prompt[:-1])
    tree = tree_of(SHAPES["ragged"], prompt[-1], seed)
    scored = host(target, target.score(tree).logits)
    worst = control = 0.0
    for leaf in leaves(tree):
        text = [*prompt, *path_tokens(tree, leaf)[1:]]
        rows = [one_by_one(model, text) for model in (single, full)]
        worst = max(worst, np.abs(scored[leaf] - rows[0]).max() / rows[0].std())
        control = max(control, np.abs(rows[0] - rows[1]).max() / rows[1].std())
    return worst, control


def one_by_one(model, text):
    """[V] logits after a text whose tokens go through the model one after the other."""
    model.prefill([])
    for token in text:
        logits = host(model, model.score(DraftTree.chain(token)).logits)[0]
        model.commit(())
    return logits


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", ["full", "ragged"])
def test_committed_rows_are_the_paths(lab, bits, shape):
    """After rounds that hit and miss, the cache scores as one that was filled token by token."""
    prompt, expected = ids(10), text(lab, "llama", bits)
    target = lab.new("llama", kv_bits=bits, **HEAD)
    rounds = play(target, Shaped(SHAPES[shape], prompt + expected, 0.6), prompt, 40)
    assert tokens_of(rounds) == expected
    theirs = one_by_one(lab.new("llama", kv_bits=bits, **HEAD), [*target.cached, expected[-1]])
    ours = host(target, target.score(DraftTree.chain(expected[-1])).logits)[0]
    assert np.abs(ours - theirs).max() < {8: 1e-3, 4: 1e-2}[bits] * theirs.std(), "at most some code of the last bit"


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_bytes_held(lab, kind, bits):
    """Codes and, for each group, a scale and a minimum: as few as the estimate before loading says."""
    held = {}
    for each in (bits, None):
        target = lab.new(kind, context=512, kv_bits=each, **HEAD)
        target.prefill(ids(300))
        held[each] = lab.cache_bytes(target)
    share = (bits / 8 + 2 * 4 / 32) / 4
    assert held[bits] == pytest.approx(share * held[None], rel=0.01)
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **HEAD}
    assert token_bytes(config, bits, 4) / token_bytes(config, None, 4) == pytest.approx(share)


def test_a_growing_cache_keeps_its_rows(lab):
    prompt = ids(10)
    expected = text(lab, "llama", 8, n=600)
    target = lab.new("llama", kv_bits=8, **HEAD)
    made = drafter("mixed", lab, "llama", prompt + expected, depth=8)
    assert tokens_of(play(target, made, prompt, 600)) == expected


def test_turns_and_edits(lab):
    """The same prompt, an edited one, a shorter one: each answer is a fresh cache's."""
    target = lab.new("llama", kv_bits=4, **HEAD)
    made = drafter("draft tree", lab, "llama", **HEAD)
    first = ids(30, seed=1)
    for prompt in (first, first, first[:20] + ids(9, seed=3), first[:5]):
        fresh = lab.new("llama", kv_bits=4, **HEAD)
        assert tokens_of(play(target, made, prompt, 20)) == tokens_of(
            play(fresh, drafter("none", lab, "llama"), prompt, 20)
        )


@pytest.mark.parametrize("bits", BITS)
def test_engine_and_header(lab, tmp_path, build, bits):
    target = str(model_folder(lab, tmp_path / "a", **HEAD))
    draft = str(model_folder(lab, tmp_path / "b", noise=0.05, **HEAD))
    made = build("draft tree", target=target, draft_model=draft, kv_bits=bits)
    assert made.header.kv_bits == bits
    assert made.header.notices == (), "the probe passes"
    got = answer(made)
    assert got.token_ids == answer(build(target=target, kv_bits=bits)).token_ids
    assert got.stats.accepted
    tiny = lab.cache_bytes(made.target) / lab.cache_bytes(made.drafter.model)
    assert tiny == pytest.approx((bits / 8 + 2 * 4 / 32) / 4, rel=0.01), "the draft model's is in full precision"


def test_what_cannot_be_quantised(lab, tmp_path, build):
    with pytest.raises(UsageError, match=r"kv_bits.*3.*4 or 8") as error:
        build(kv_bits=3)
    assert one_line(error) == 2
    folder = model_folder(lab, tmp_path, head_dim=16)
    with pytest.raises(ModelError, match=r"cannot be quantised.*16") as error:
        build(target=str(folder), kv_bits=8)
    assert one_line(error) == 1


def test_a_scale_shared_by_the_rows_of_a_pass_is_noticed(lab, backend_name):
    """The control: were rows rounded together, a tree would not score as single steps do."""
    lab.new("llama", kv_bits=8, **HEAD)  # its probe would notice, too
    with rounded_together(backend_name):
        difference, _ = trees_and_steps(lab, "llama", 8)
    assert difference > 1e-3


def rounded_together(backend_name):
    """The backend with a mistake: before it is stored, a pass is rounded with one scale for all of its rows."""
    if backend_name == "torch":
        from speclocal.backends.torch import quantized

        def shared(x, bits, original=quantized.quantize):
            low, high = x.aminmax(dim=-2, keepdim=True)
            step = ((high - low) / 15).clamp_min(1e-9)
            return original(low + ((x - low) / step).round() * step, bits)

        return mock.patch.object(quantized, "quantize", shared)
    from speclocal.backends.mlx.cache import QuantisedLayerCache

    def store(self, keys, values, original=QuantisedLayerCache.update_and_fetch):
        rounded = []
        for x in (keys, values):
            low = x.min(-2, keepdims=True)
            step = (x.max(-2, keepdims=True) - low) / 15 + 1e-9
            rounded.append(low + ((x - low) / step).round() * step)
        return original(self, *rounded)

    return mock.patch.object(QuantisedLayerCache, "update_and_fetch", store)
