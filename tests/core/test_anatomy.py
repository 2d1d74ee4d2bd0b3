"""What a config.json says, in every spelling there is of it."""

from __future__ import annotations

import pytest

from speclocal.core.anatomy import context_of, layers_of, refuse_recurrent, text_of, windows
from speclocal.errors import ModelError


def context(config, asked=None):
    notices = []
    return context_of(config, asked, notices.append), notices


def test_the_text_part_of_a_multimodal_config():
    part = {"model_type": "gemma3_text", "num_hidden_layers": 3}
    assert text_of({"model_type": "gemma3", "text_config": part}) is part
    assert text_of(part) is part
    assert text_of({"model_type": "x", "text_config": None})["model_type"] == "x"
    assert layers_of({"text_config": part}) == 3
    assert layers_of({"n_layer": 5}) == 5
    assert layers_of({}) is None


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length"])
def test_context_by_any_name(name):
    assert context({name: 300}) == (300, [])


def test_context_asked_for():
    assert context({}) == (2048, [])
    assert context({"max_position_embeddings": 300}, 100) == (100, [])
    assert context({"text_config": {"max_position_embeddings": 300}}, 100) == (100, [])
    limit, notices = context({"max_position_embeddings": 300}, 500)
    assert limit == 300
    assert [("500" in text, "300" in text) for text in notices] == [(True, True)]


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("word", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["longrope", "su", "dynamic"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_rope_that_changes_with_length_cuts_the_context(place, word, kind, inside):
    original = {"original_max_position_embeddings": 400}
    config = {"max_position_embeddings": 1000, place: {word: kind, **(original if inside else {})}}
    limit, notices = context(config if inside else {**config, **original})
    assert limit == 400
    assert len(notices) == 1
    assert "1000" in notices[0]
    assert "400" in notices[0]


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn"}, {"type": "linear"}, {"rope_type": "llama3"}])
def test_other_ropes_do_not(rope):
    if rope:
        rope = {**rope, "original_max_position_embeddings": 400}
    assert context({"model_type": "llama", "max_position_embeddings": 1000, "rope_scaling": rope}) == (1000, [])


def test_one_rope_for_each_kind_of_layer():
    ropes = {
        "sliding_attention": {"rope_type": "default"},
        "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 400},
    }
    assert context({"max_position_embeddings": 1000, "rope_parameters": ropes})[0] == 400


def test_old_phi3_files_call_longrope_yarn():
    rope = {"type": "yarn", "original_max_position_embeddings": 400}
    assert context({"model_type": "phi3", "max_position_embeddings": 1000, "rope_scaling": rope})[0] == 400


def test_a_dynamic_rope_without_an_original_length_changes_past_the_limit_only():
    assert context({"max_position_embeddings": 1000, "rope_scaling": {"type": "dynamic", "factor": 2.0}}) == (1000, [])


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba"},
        {"model_type": "qwen3_next", "full_attention_interval": 4},
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        {"model_type": "nemotron_h", "layers_block_type": ["linear_attention", "full_attention"]},
        {"model_type": "llama4", "text_config": {"layer_types": ["chunked_attention", "full_attention"]}},
    ],
)
def test_recurrent_layers_are_refused_by_name(config):
    types = {t for key in ("layer_types", "layers_block_type") for t in text_of(config).get(key, ())}
    odd = sorted(types - {"attention", "full_attention"}) or ["linear_attention"]
    with pytest.raises(ModelError, match=rf"{config['model_type']} .*{odd[0]}"):
        refuse_recurrent(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "granitemoehybrid", "layers_block_type": ["attention", "attention"]},
    ],
)
def test_attention_layers_are_not(config):
    refuse_recurrent(config)


W = {"num_hidden_layers": 6, "sliding_window": 16}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama", **W}, None),
        ({"model_type": "llama", **W, "layer_types": ["full_attention", "sliding_attention"] * 3}, (None, 16) * 3),
        ({"model_type": "mistral", **W}, (16,) * 6),
        ({"model_type": "mistral", "num_hidden_layers": 6, "sliding_window": None}, (None,) * 6),
        ({"model_type": "qwen2", **W, "use_sliding_window": False, "max_window_layers": 4}, (None,) * 6),
        ({"model_type": "qwen2", **W, "use_sliding_window": True, "max_window_layers": 4}, (None,) * 4 + (16,) * 2),
        ({"model_type": "qwen3", **W, "layer_types": ["sliding_attention"] * 6}, (None,) * 6),
        ({"model_type": "gemma2", **W}, (16, None) * 3),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **W}}, (16,) * 5 + (None,)),
        ({"model_type": "gemma3_text", **W, "sliding_window_pattern": 3}, (16, 16, None) * 2),
        ({"model_type": "gemma3_text", "num_hidden_layers": 6}, None),
        ({"model_type": "exaone4", "num_hidden_layers": 6, "sliding_window": None}, (None,) * 6),
        ({"model_type": "mistral"}, None),
        ({}, None),
    ],
)
def test_windows(config, expected):
    assert windows(config) == expected
