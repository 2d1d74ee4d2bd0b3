"""What we read in a config against what transformers' classes do with it."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from speclocal.core.anatomy import RECURRENT, context_of, refuse_recurrent, windows
from speclocal.errors import ModelError

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
W = {"sliding_window": 16}
USED = {**W, "use_sliding_window": True}
CASES = [
    ("llama", W),
    ("mistral", W),
    ("mistral", {"sliding_window": None}),
    ("mixtral", W),
    ("mixtral", {}),
    ("ministral", W),
    ("ministral", {**W, "layer_types": ["sliding_attention", "full_attention"] * 3}),
    ("ministral3", W),
    ("phi3", W),
    ("starcoder2", W),
    ("qwen2", {**USED, "max_window_layers": 4}),
    ("qwen2", {**W, "max_window_layers": 0}),
    ("qwen3", {**USED, "max_window_layers": 4}),
    ("qwen2_moe", {**USED, "max_window_layers": 4}),
    ("qwen2_moe", W),
    ("qwen3_moe", {**USED, "max_window_layers": 4}),
    ("qwen3_moe", W),
    ("smollm3", USED),
    ("smollm3", {**USED, "no_rope_layers": [0, 1, 1, 0, 1, 1]}),
    ("smollm3", W),
    ("gemma2", W),
    ("gemma3_text", W),
    ("gemma3_text", {**W, "sliding_window_pattern": 4}),
    ("gpt_oss", W),
    ("cohere2", W),
    ("cohere2", {**W, "sliding_window_pattern": 2}),
    ("olmo3", W),
    ("exaone4", W),
    ("exaone4", {**W, "sliding_window_pattern": 2}),
    ("vaultgemma", W),
]


@cache
def reach(kind: str, changes: str) -> tuple[int | None, ...]:
    """How far back every layer of a real model sees, in a text of 40 tokens."""
    config = AutoConfig.for_model(kind, **SIZES, **json.loads(changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    seen: list[int | None] = []

    def look(module, args, kwargs):
        visible = kwargs["attention_mask"][0, 0, -1] == 0
        seen.append(None if bool(visible.all()) else int(visible.sum()))

    for layer in model.get_decoder().layers:
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
    with torch.inference_mode():
        model(torch.zeros(1, 40, dtype=torch.long), use_cache=False)
    return tuple(seen)


def spellings(kind, changes, folder):
    """The config as on the hub, as transformers writes it, and as it is in memory."""
    config = AutoConfig.for_model(kind, **SIZES, **changes)
    config.save_pretrained(folder)
    yield {"model_type": kind, **SIZES, **changes}
    yield json.loads((folder / "config.json").read_text())
    yield config.to_dict()


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_windows_are_those_of_the_classes(kind, changes, tmp_path):
    real = reach(kind, json.dumps(changes))
    for config in spellings(kind, changes, tmp_path):
        assert (windows(config) or (None,) * len(real)) == real


def test_the_table_is_not_all_alike():
    """The control: a rule taken for another one's gives other windows."""
    assert len({reach(kind, json.dumps(changes)) for kind, changes in CASES}) > 6


HYBRIDS = sorted(RECURRENT & set(CONFIG_MAPPING))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_classes_are_refused_in_every_spelling(kind, tmp_path):
    config = AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    for each in (config.to_dict(), json.loads((tmp_path / "config.json").read_text()), {"model_type": kind}):
        with pytest.raises(ModelError, match=rf"{kind} .*(linear_attention|hybrid|recurrent)"):
            refuse_recurrent(each)


def test_longrope_in_every_spelling(tmp_path):
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    changes = {"rope_scaling": rope, "original_max_position_embeddings": 64}
    for config in spellings("phi3", changes, tmp_path):
        assert context_of(config, None, lambda text: None) == 64
