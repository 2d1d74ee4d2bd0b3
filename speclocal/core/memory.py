"""How much memory a model will take, told from its config.json and the sizes of its weights before any is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from speclocal.core.anatomy import SLIDING, Config, first_of, layers_of, text_of
from speclocal.errors import ModelError

GIB = 2**30
GROUPS = (64, 32)
"""Numbers that share a scale and a minimum in a quantised cache: the first that divides the size of a head."""
ROWS = 256
"""Rows of logits and scores that a round may hold at once."""
COPIES = 3
"""Logits as the model gives them, in float32, and what sampling makes of them."""
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Number types, as safetensors names them, that loading converts; everything else stays as it is stored."""


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes: its weights, keys and values of all tokens, and what a round needs beside them."""

    weights: int
    cache: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.scratch

    def __str__(self) -> str:
        return f"weights {size(self.weights)} + cache {size(self.cache)} + scratch {size(self.scratch)}"


def size(count: int) -> str:
    """Bytes in the unit that suits them."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def estimate(
    config: Config, weight_bytes: int, tokens: int, kv_bits: int | None, element_bytes: int, rows: int = ROWS
) -> Need:
    """What a model takes with `tokens` in its cache, whose numbers have `element_bytes`, or `kv_bits` bits.

    rows: of the largest pass. What the config does not tell counts as nothing.
    """
    vocab = first_of(text_of(config), "vocab_size") or 0
    return Need(
        weight_bytes, tokens * token_bytes(config, kv_bits, element_bytes), COPIES * rows * int(vocab) * FLOATS["F32"]
    )


def token_bytes(config: Config, kv_bits: int | None, element_bytes: int) -> int:
    """Bytes of the keys and values of one token in all layers."""
    return sum(
        heads * (_vector_bytes(keys, kv_bits, element_bytes) + _vector_bytes(values, kv_bits, element_bytes))
        for heads, keys, values in cached_shapes(config)
    )


def _vector_bytes(length: int, kv_bits: int | None, element_bytes: int) -> int:
    if kv_bits is None:
        return length * element_bytes
    group = next((g for g in GROUPS if length % g == 0), GROUPS[-1])
    return length * kv_bits // 8 + 2 * element_bytes * (length // group)


def cached_shapes(config: Config) -> list[tuple[int, int, int]]:
    """(heads, size of a key, of a value) for each layer that has a cache of its own; [] if the config is silent."""
    text = text_of(config)
    count = layers_of(text)
    if not count:
        return []
    count -= text.get("num_kv_shared_layers") or 0
    shapes = [_shape({**text, **_overrides(text, layer)}) for layer in range(count)]
    return [shape for shape in shapes if shape]


def _shape(text: Config) -> tuple[int, int, int] | None:
    if text.get("kv_lora_rank") and text.get("qk_rope_head_dim"):  # one compressed key for all heads
        return 1, int(text["kv_lora_rank"]), int(text["qk_rope_head_dim"])
    heads = first_of(text, "num_attention_heads", "n_head", "n_heads")
    groups = first_of(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    width = first_of(text, "hidden_size", "n_embd", "d_model")
    head = first_of(text, "head_dim") or (width // heads if width and heads else None)
    if not groups or not head:
        return None
    return int(groups), int(head), int(first_of(text, "v_head_dim") or head)


def _overrides(text: Config, layer: int) -> Config:
    """What differs in one layer: Gemma 4's layers that see everything have heads of their own number and size."""
    layers = text.get("per_layer_config") or {}
    types = text.get("layer_types")
    if layers or not types or not text.get("global_head_dim") or types[layer] == SLIDING:
        return first_of(layers, layer, str(layer)) or {}
    number = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v", True) else None
    return {"head_dim": text["global_head_dim"]} | ({"num_key_value_heads": number} if number else {})


def loaded_bytes(stored: Mapping[str, int], element_bytes: int | None) -> int:
    """Bytes of the weights in memory. stored: number type → bytes on disk.

    element_bytes: of the type that floats are converted to; None: as they are.
    """
    return sum(
        count // FLOATS[name] * element_bytes if element_bytes and name in FLOATS else count
        for name, count in stored.items()
    )


def refuse_if_too_large(needs: Mapping[str, Need], available: int, device: str) -> None:
    """ModelError with the sum if what must be in memory at once is more than is free. needs: by what a model is for."""
    total = sum(need.total for need in needs.values())
    if total <= available:
        return
    parts = "; ".join(f"{name}: {need}" for name, need in needs.items())
    raise ModelError(
        f"not enough memory on {device}: {size(total)} needed ({parts})",
        got=f"{size(available)} free",
        do="lower --context, or take a quantised or smaller model, or another --device",
    )


def tokens_that_fit(needs: Iterable[Need], per_token: int, available: int) -> int:
    """How many tokens, of so many bytes in all caches, there is room for beside weights and scratch."""
    fixed = sum(need.weights + need.scratch for need in needs)
    return max(0, available - fixed) // max(1, per_token)
