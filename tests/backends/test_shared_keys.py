"""Layers that share keys with earlier ones (gemma4): in a prompt transformers runs them for the last row only."""

from __future__ import annotations

from unittest import mock

import pytest

from speclocal.backends.torch.cache import View
from tests.backends import checks, tiny_torch
from tests.backends.play import SHAPES, Shaped, ids, play, tokens_of

BACKENDS = ("torch",)
KIND = "gemma4_text"
CHANGES = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "tie_word_embeddings": True,
    "use_double_wide_mlp": False,
    "num_global_key_value_heads": None,
    "enable_moe_block": False,
}


def text_is_the_frameworks(lab, length):
    prompt = ids(length, seed=3)
    expected = lab.plain(KIND, prompt, 24, **CHANGES)
    target = lab.new(KIND, **CHANGES)
    assert target.trees
    rounds = play(target, Shaped(SHAPES["full"], prompt + expected, luck=0.8), prompt, 24)
    assert tokens_of(rounds) == expected
    target.prefill(prompt[:-1])
    checks.close(checks.next_logits(target, prompt[-1]), lab.logits(KIND, prompt, **CHANGES)[-1], f"prompt of {length}")


@pytest.mark.parametrize("length", [5, 40, 300])
def test_text_is_the_frameworks(length):
    text_is_the_frameworks(tiny_torch, length)


def test_rows_of_the_wrong_end_are_caught():
    bias = View.bias

    def turned(self, window, dtype, repeat=1):
        made = bias(self, window, dtype, repeat)
        return made if made is None or repeat > 1 else made.flip(0)

    with mock.patch.object(View, "bias", turned), pytest.raises(AssertionError):
        text_is_the_frameworks(tiny_torch, 40)
