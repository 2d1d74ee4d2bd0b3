"""Loading a model folder: what is refused, which precision, the hooks, the parity probe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.utils import MODEL_REMAPPING, load_model
from safetensors import safe_open

from speclocal.backends.mlx import hooks
from speclocal.backends.mlx.cache import PackedLayerCache, QuantisedLayerCache, TreeCache
from speclocal.backends.mlx.memory import wire
from speclocal.backends.mlx.spelling import spelled
from speclocal.backends.mlx.target import MlxTarget
from speclocal.core.anatomy import context_of, refuse_recurrent, windows
from speclocal.core.parity import probe
from speclocal.core.tree import DraftTree
from speclocal.errors import ModelError, UsageError

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
KV_BITS = (4, 8)


def load(
    folder: Path,
    notify: Callable[[str], None],
    *,
    dtype: str = "auto",
    device: str = "auto",
    context: int | None = None,
    kv_bits: int | None = None,
    taps: Sequence[int] = (),
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    wired_limit: float | None = None,
) -> MlxTarget:
    """Load a folder in Hugging Face format, or one of mlx-community.

    dtype `auto`: the checkpoint's; float32 on a CPU unless it is quantised. Raises ModelError for models that cannot be
    decoded exactly or that mlx-lm does not know.
    """
    mx.set_default_device(device_of(device))
    if dtype not in ("auto", *DTYPES):
        raise UsageError("unknown dtype", got=dtype, expected=f"auto, {', '.join(DTYPES)}")
    if wired_limit is not None:
        wire(wired_limit)
    config = read_config(folder)
    refuse_recurrent(config)
    try:
        extra = spelled_for(config, _has_output_layer(folder))
        model, loaded = load_model(
            folder,
            lazy=True,
            model_config=extra,
            get_model_classes=_without_heads,
            trust_remote_code=trust_remote_code,
        )
        quantised = "quantization" in loaded or "quantization_config" in loaded
        if dtype != "auto":
            model.set_dtype(DTYPES[dtype])
        elif mx.default_device() == mx.cpu and not quantised:
            model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    except (ImportError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"cannot load {folder.name}: {_line(error)}") from error
    return wrap(model, {**config, **extra}, notify, context, taps, kv_bits)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder; ModelError if there is none."""
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot load {folder.name}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _has_output_layer(folder: Path) -> bool | None:
    """Whether the weights hold an output layer; None if no weights are found."""
    names: list[str] = []
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, framework="numpy") as tensors:
            names += tensors.keys()
    return any(name.endswith("lm_head.weight") for name in names) if names else None


def spelled_for(config: Mapping[str, Any], untied: bool | None = None) -> dict[str, Any]:
    """What must be added to a config for mlx-lm; ModelError if mlx-lm has no such model."""
    return spelled(config, _classes(config)[1], untied)


def _classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    kind = str(config.get("model_type"))
    try:
        module = import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    except ImportError as error:
        raise ModelError(f"mlx-lm does not know the model type {kind}", do="use --backend torch") from error
    return module.Model, module.ModelArgs


def _without_heads(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """The model's classes, for files that hold Medusa heads as well: those are no weights of the model."""
    kind, known = _classes(config)

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        rest = {name: w for name, w in weights.items() if not name.startswith("medusa_head.")}
        return kind.sanitize(self, rest) if hasattr(kind, "sanitize") else rest

    return type(kind.__name__, (kind,), {"sanitize": sanitize, "__module__": kind.__module__}), known


def build(config: Mapping[str, Any]) -> nn.Module:
    """mlx-lm's model for a config in any spelling, with the weights it starts with."""
    kind, known = _classes(config)
    return kind(known.from_dict({**config, **spelled_for(config)}))


def wrap(
    model: Any,
    config: Mapping[str, Any],
    notify: Callable[[str], None],
    context: int | None = None,
    taps: Sequence[int] = (),
    kv_bits: int | None = None,
) -> MlxTarget:
    """A Target around a model that is loaded already; probes it and falls back to chains if trees are not exact."""
    model.eval()
    reach = windows_of(model, config)
    name = f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}"
    hooks.positions_per_node(model)
    hooks.masks_per_text(model)
    cache = quantised_cache(model, reach, kv_bits) if kv_bits else TreeCache(reach)
    target = MlxTarget(model, cache, context_of(config, context, notify), taps)
    probe(target, name, tolerance(target.dtype, kv_bits), notify, (ValueError, TypeError, IndexError, RuntimeError))
    return target


def windows_of(model: Any, config: Mapping[str, Any]) -> list[int | None]:
    """The sliding window of each cache; layers whose class makes no such mask get one of their own.

    Raises ModelError naming the cache if a layer keeps a state that cannot be cut back.
    """
    made = model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]
    odd = sorted({type(cache).__name__ for cache in made} - {KVCache.__name__, RotatingKVCache.__name__})
    if odd:
        raise ModelError(
            f"{config.get('model_type')} cannot be decoded speculatively yet: refused drafts would stay in its state",
            got=f"layers with {', '.join(odd)}",
            expected="attention layers with plain keys and values",
        )
    found = [cache.max_size if isinstance(cache, RotatingKVCache) else None for cache in made]
    declared = windows(config)
    if declared is None or any(found) or len(declared) != len(found) or not any(declared):
        return found
    hooks.own_masks(model.layers)
    return list(declared)


def quantised_cache(model: Any, reach: Sequence[int | None], bits: int) -> TreeCache:
    """A cache of so many bits, handed to attention in the form that the model's class can take."""
    if bits not in KV_BITS:
        raise UsageError("impossible kv_bits", got=bits, expected=" or ".join(map(str, KV_BITS)))
    packed = TreeCache(reach, layer=partial(PackedLayerCache, bits=bits))
    packed.open([DraftTree((0, 0, 0), (-1, 0, 0))])
    try:
        model(mx.array([[0, 0, 0]]), cache=packed.layers)  # described, never computed
    except (TypeError, ValueError, AttributeError):
        return TreeCache(reach, layer=partial(QuantisedLayerCache, bits=bits))
    return packed.twin()


def tolerance(dtype: str, kv_bits: int | None = None) -> float:
    """Largest accepted difference, as a share of the logits' spread: rounding differs with the number of rows.

    With a quantised cache a last bit can decide between two codes.
    """
    return 1e-3 if dtype == "float32" and kv_bits is None else 0.15


def device_of(name: str) -> mx.Device:
    """The device meant by a name; UsageError for one there is not."""
    if name == "auto":
        return mx.default_device()
    if name == "cpu":
        return mx.Device(mx.cpu)
    kind, _, number = name.partition(":")
    if kind == "cuda" and not mx.cuda.is_available():
        raise UsageError("no CUDA device", got=name, expected="a build of MLX with CUDA", do="use --device cpu")
    if kind not in ("gpu", "metal", "cuda") or (number and not number.isdecimal()):
        raise UsageError("unknown device", got=name, expected="auto, cpu, gpu, metal, cuda or cuda:N")
    if not mx.is_available(mx.gpu) or (kind == "metal" and not mx.metal.is_available()):
        raise UsageError("no GPU that MLX can use", got=name, expected="Apple Silicon", do="use --device cpu")
    return mx.Device(mx.gpu, int(number or 0))
