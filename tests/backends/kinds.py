"""The model classes that every backend's laboratory builds: tiny configs, the same for all."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

VOCAB, WINDOW, CONTEXT = 96, 16, 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    # Wide enough that logits depend on the text and greedy text does not fall into one repeated token.
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_WINDOWED: dict[str, Any] = {"sliding_window": WINDOW}
_MIXED: dict[str, Any] = {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}

SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {**_MIXED, "use_sliding_window": True, "tie_word_embeddings": True},
    "qwen3": {**_MIXED, "use_sliding_window": True},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0},
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 16},
    "mistral": _WINDOWED,
    "phi3": _WINDOWED,
    "gpt_oss": {**_MIXED, **_EXPERTS},
    "mixtral": {**_WINDOWED, **_EXPERTS},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "cohere2": {**_MIXED, "logit_scale": 1.0},
    "olmo2": {"initializer_range": 0.5},
    "olmo3": _MIXED,
    "smollm3": {**_MIXED, "use_sliding_window": True, "no_rope_layers": [1, 0]},
    "glm4": {},
    "granite": {"attention_multiplier": 0.3},  # its default, 1, makes attention so sharp that rounding shows
    "starcoder2": _WINDOWED,
}
KINDS = tuple(SETTINGS)
WINDOWED = tuple(kind for kind in KINDS if "sliding_window" in SETTINGS[kind])
"""Classes built with a sliding window on every layer, or on every other one."""
HYBRIDS = ("qwen3_next", "mamba")
"""Classes with a state that cannot be cut back."""


def config(kind: str, **changes: Any) -> Any:
    """transformers' config of a tiny model. changes: of its settings."""
    return AutoConfig.for_model(kind, **{**SIZES, **SETTINGS.get(kind, {}), **changes})


def key(changes: dict[str, Any]) -> tuple[Any, ...]:
    """Changes in a form that a cache can look up."""
    return tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in changes.items()))


def thaw(frozen: tuple[Any, ...]) -> dict[str, Any]:
    """What `key` was made from."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in frozen}
