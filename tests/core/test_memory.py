"""What a model is said to take before it is loaded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy as io

from speclocal.checks import weight_sizes
from speclocal.core.memory import (
    GIB,
    Need,
    cached_shapes,
    estimate,
    loaded_bytes,
    refuse_if_too_large,
    token_bytes,
    tokens_that_fit,
)
from speclocal.errors import ModelError

LLAMA = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({}, [(2, 64, 64)] * 4),
        ({"head_dim": 128}, [(2, 128, 128)] * 4),
        ({"num_key_value_heads": None}, [(8, 64, 64)] * 4),
        ({"head_dim": 96, "v_head_dim": 64}, [(2, 96, 64)] * 4),
        ({"kv_lora_rank": 48, "qk_rope_head_dim": 16, "v_head_dim": 64}, [(1, 48, 16)] * 4),
        ({"num_kv_shared_layers": 3}, [(2, 64, 64)]),
        ({"hidden_size": None}, []),
        ({"num_hidden_layers": None}, []),
        (
            {
                "head_dim": 32,
                "global_head_dim": 64,
                "num_global_key_value_heads": 1,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [(2, 32, 32), (1, 64, 64)] * 2,
        ),
        (
            {"per_layer_config": {"1": {"head_dim": 16}, "3": {"num_key_value_heads": 4}}},
            [(2, 64, 64), (2, 16, 16), (2, 64, 64), (4, 64, 64)],
        ),
        ({"per_layer_config": {1: {"head_dim": 16}}}, [(2, 64, 64), (2, 16, 16), (2, 64, 64), (2, 64, 64)]),
    ],
)
def test_shapes_of_the_cache(changes, shapes):
    config = {**LLAMA, **changes}
    assert cached_shapes(config) == shapes
    assert cached_shapes({"model_type": "multimodal", "text_config": config}) == shapes


def test_older_names():
    assert cached_shapes({"n_layer": 2, "n_head": 4, "n_embd": 64}) == [(4, 16, 16)] * 2


@pytest.mark.parametrize(
    ("bits", "expected"), [(None, 64 * 2), (8, 64 + 2 * 2), (4, 32 + 2 * 2)], ids=["full", "8 bits", "4 bits"]
)
def test_bytes_of_a_token(bits, expected):
    assert token_bytes(LLAMA, bits, 2) == 4 * 2 * 2 * expected
    assert token_bytes({**LLAMA, "head_dim": 96}, 8, 2) == 4 * 2 * 2 * (96 + 3 * 2 * 2), "groups of 32"


def test_an_estimate_adds_up():
    need = estimate(LLAMA, 3 * GIB, 1000, None, 4, rows=10)
    assert need == Need(3 * GIB, 1000 * token_bytes(LLAMA, None, 4), 3 * 10 * 1000 * 4)
    assert need.total == need.weights + need.cache + need.scratch
    assert str(need) == "weights 3.0 GiB + cache 3.9 MiB + scratch 0.1 MiB"


def test_weights_as_they_will_be_in_memory(tmp_path):
    io.save_file({"a": np.zeros(100, np.float16), "b": np.zeros(10, np.float32)}, tmp_path / "model-1.safetensors")
    io.save_file({"c": np.zeros(60, np.uint8), "d": np.zeros(50, np.float16)}, tmp_path / "model-2.safetensors")
    stored = weight_sizes(tmp_path)
    assert stored == {"F16": 300, "F32": 40, "U8": 60}
    assert loaded_bytes(stored, None) == 400
    assert loaded_bytes(stored, 4) == 150 * 4 + 10 * 4 + 60, "whole numbers are not converted"
    assert loaded_bytes(stored, 2) == 150 * 2 + 10 * 2 + 60


@pytest.mark.parametrize(("name", "kind"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_pickles_count_as_the_config_says(tmp_path, name, kind, key):
    (tmp_path / "config.json").write_text(json.dumps({key: name}))
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(700))
    (tmp_path / "README.md").write_bytes(bytes(50))
    assert weight_sizes(tmp_path) == {kind: 700}


def test_what_does_not_fit_is_refused_with_the_sum():
    needs = {"target": Need(4 * GIB, GIB, GIB // 2), "draft model": Need(GIB, GIB // 2, 0)}
    refuse_if_too_large(needs, 7 * GIB, "cpu")
    with pytest.raises(ModelError) as error:
        refuse_if_too_large(needs, 7 * GIB - 1, "cuda:1")
    text = str(error.value)
    assert "\n" not in text
    for part in (
        "cuda:1",
        "7.0 GiB needed",
        "target: weights 4.0 GiB + cache 1.0 GiB + scratch 0.5 GiB",
        "draft model",
    ):
        assert part in text
    assert "got 7.0 GiB free" in text
    assert "--context" in text


def test_how_many_tokens_fit():
    need = Need(1000, 999, 100)
    assert tokens_that_fit([need], 10, 1500) == 40
    assert tokens_that_fit([need, need], 10, 1500) == 0
