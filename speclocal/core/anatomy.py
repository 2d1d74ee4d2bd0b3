"""What a model's config.json says: context, sliding windows, layers that cannot be decoded speculatively.

Takes the file's content as a dict, in the spelling of any version of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from speclocal.errors import ModelError

Config = Mapping[str, Any]

SLIDING = "sliding_attention"
DENSE_LAYERS = {"full_attention", SLIDING, "attention"}
# Classes with recurrent layers whose config.json does not always list the layers.
RECURRENT = {
    "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "minimax", "nemotron_h",
    "olmo_hybrid", "plamo2", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "rwkv7",
    "xlstm", "zamba", "zamba2",
}  # fmt: skip

# The rules below are those of transformers' configuration classes (5.24) for files that do not list their layers.
EVERY_LAYER = {"ministral", "ministral3", "mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"}
"""Classes with one window for all layers; all but ministral do not look at `layer_types`."""
ON_REQUEST = {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
"""Classes whose window counts only with `use_sliding_window`."""
ONE_FULL_IN = {
    "cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "gemma4_text": 6, "gpt_oss": 2,
    "olmo3": 4, "vaultgemma": 2,
}  # fmt: skip
"""Classes in which every so-manieth layer sees everything and the others have the window."""


def text_of(config: Config) -> Config:
    """The part about the language model; the whole of a config that describes nothing else."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def first_of(config: Mapping[Any, Any], *names: Any) -> Any:
    """The value under the first of these names that is there and not null; else None."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def layers_of(config: Config) -> int | None:
    """Number of decoder layers."""
    return first_of(text_of(config), "num_hidden_layers", "n_layer", "n_layers", "num_layers")


def context_of(config: Config, asked: int | None, notify: Callable[[str], None]) -> int:
    """Positions the model may use: its own limit, less where longer texts would change the rope of earlier keys."""
    text = text_of(config)
    limit = int(first_of(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length") or 2048)
    original = _rope_changes_at(text)
    if original and original < limit:
        notify(f"context cut from {limit} to {original} tokens: beyond, this model's rope changes for earlier tokens")
        limit = original
    if asked is not None:
        if asked > limit:
            notify(f"context of {asked} tokens asked for; this model has {limit}")
        limit = min(asked, limit)
    return limit


def _rope_changes_at(text: Config) -> int | None:
    """Length from which a rope that depends on the text's length gives other angles; None if there is none."""
    found = first_of(text, "rope_parameters", "rope_scaling") or {}
    changing = {"longrope", "su", "dynamic"} | ({"yarn"} if text.get("model_type") == "phi3" else set())
    for rope in (found, *(part for part in found.values() if isinstance(part, Mapping))):  # one, or one a layer type
        if first_of(rope, "rope_type", "type") in changing:
            name = "original_max_position_embeddings"
            original = first_of(text, name) or first_of(rope, name)
            return None if original is None else int(original)
    return None


def refuse_recurrent(config: Config) -> None:
    """ModelError naming the layer type if a layer keeps a state that cannot be cut back."""
    text = text_of(config)
    kinds = {kind for name in ("layer_types", "layers_block_type", "block_types") for kind in text.get(name) or ()}
    odd = sorted(kinds - DENSE_LAYERS)
    if not odd and text.get("model_type") in RECURRENT:
        odd = ["linear_attention"]
    if odd:
        raise ModelError(
            f"{config.get('model_type')} cannot be decoded speculatively yet: refused drafts would stay in its state",
            got=f"layers of type {', '.join(odd)}",
            expected="attention layers only",
        )


def windows(config: Config) -> tuple[int | None, ...] | None:
    """The sliding window of every decoder layer, None where a layer sees everything; None if the config says nothing.

    A row sees so many positions, its own included.
    """
    text = text_of(config)
    kind, count = text.get("model_type"), layers_of(text)
    if count is None:
        return None
    window = text.get("sliding_window") or None
    if kind in ON_REQUEST and not text.get("use_sliding_window"):
        window = None
    types = text.get("layer_types")
    if types and (kind not in EVERY_LAYER or kind == "ministral"):
        slides = [each == SLIDING for each in types]
    else:
        made = _sliding(str(kind), text, count)
        if made is None:
            return None
        slides = made
    if window is None and any(slides) and kind not in EVERY_LAYER | ON_REQUEST | {"exaone4"}:
        return None  # a window of unknown width
    return tuple(window if slide else None for slide in slides)


def _sliding(kind: str, text: Config, count: int) -> list[bool] | None:
    """Which layers have the window, by the class's own rule; None for a class without one."""
    layers = range(count)
    if kind in EVERY_LAYER:
        return [True] * count
    if kind in ("qwen2", "qwen3"):
        first = text.get("max_window_layers", 28)
        return [i >= first for i in layers]
    if kind == "qwen2_moe":
        return [i % 2 == 0 and i < text.get("max_window_layers", 28) for i in layers]
    if kind == "smollm3":
        every = text.get("no_rope_layer_interval", 4)
        roped = text.get("no_rope_layers") or [(i + 1) % every for i in layers]
        return [not rope for rope in roped]
    every = first_of(text, "sliding_window_pattern", "_sliding_window_pattern") or ONE_FULL_IN.get(kind)
    if kind not in ONE_FULL_IN or not isinstance(every, int):
        return None
    slides = [(i + 1) % every != 0 for i in layers]
    if kind == "gemma4_text":
        slides[-1] = False
    return slides
