"""Tiny random models for the mlx backend, and the same models untouched, as mlx-lm runs them with its own caches."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache

from speclocal.backends.mlx import loading
from speclocal.backends.mlx.target import MlxTarget
from speclocal.core.anatomy import windows
from speclocal.core.cached_target import CHUNK
from tests.backends import kinds
from tests.backends.mutants_mlx import MUTANTS, copies_its_cache, mutant, never_rolled_back
from tests.backends.pickles import pickle

__all__ = ["CHUNK", "MUTANTS", "copies_its_cache", "mutant", "never_rolled_back", "pickle"]

LAW_SEED = 25
"""Of a model of 8 words whose drafts are often kept and often refused."""

Key = tuple[Any, ...]
ZERO_CENTRED = ("gemma2", "gemma3_text")
"""Classes whose norms multiply by one plus their weight."""
Steps = tuple[np.ndarray, list[Any]]
"""Logits [V] of the last token of a text, and the caches behind it."""


def _config(kind: str, **changes: Any) -> dict[str, Any]:
    return kinds.config(kind, **changes).to_dict()


def _build(kind: str, *, seed: int = 0, noise: float = 0.0, raised: int | None = None, **changes: Any) -> nn.Module:
    """A random model in float32.

    noise: its weights are mixed with so much of another seed's: a draft model that agrees now and then.
    raised: output rows from this id on are made large, so that their logits win half of the time.
    """
    mx.set_default_device(mx.cpu)
    config = _config(kind, **changes)
    weights = random_weights(config, seed)
    if noise:
        other = random_weights(config, seed + 1000)
        weights = {name: weight + noise * (other[name] - weight) for name, weight in weights.items()}
    if raised is not None:
        weights.get("lm_head.weight", weights["model.embed_tokens.weight"])[raised:] *= 20.0
    return filled(config, weights)


def filled(config: dict[str, Any], weights: dict[str, np.ndarray]) -> nn.Module:
    """mlx-lm's model with these weights."""
    model = loading.build(config)
    model.load_weights([(name, mx.array(weight)) for name, weight in weights.items()])
    model.eval()
    mx.eval(model.parameters())
    return model


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by name for a model with this config."""
    kind, scale = config["model_type"], config.get("initializer_range", 0.25)
    norm = 0.0 if kind in ZERO_CENTRED else 1.0
    weights = {}
    for name, weight in tree_flatten(loading.build(config).parameters()):
        # mlx-lm ties gemma2's output to its embedding: a text would repeat its last token if layers weighed no more.
        centre = 7.0 if kind == "gemma2" and ".post_" in name else norm
        weights[name] = _weight(name, weight.shape, seed, scale, centre)
    return weights


def _weight(name: str, shape: tuple[int, ...], seed: int, scale: float, norm: float) -> np.ndarray:
    """Random numbers that depend on seed and name."""
    draw = np.random.default_rng([seed, crc32(name.encode())])
    if "norm" in name and name.endswith("weight"):
        return draw.normal(norm, 0.1, shape).astype(np.float32)
    if name.endswith("bias"):
        scale = 0.1
    return draw.normal(0.0, 1.0 if name.endswith("sinks") else scale, shape).astype(np.float32)


@cache
def _untouched(kind: str, key: Key) -> Any:
    return _build(kind, **kinds.thaw(key))


@cache
def _wrapped(kind: str, key: Key, kv_bits: int | None) -> MlxTarget:
    def refuse(text: str) -> None:
        raise AssertionError(f"unexpected notice: {text}")

    return _wrap(kind, kinds.thaw(key), refuse, kv_bits)


def _wrap(kind: str, changes: dict[str, Any], notify: Any, kv_bits: int | None = None) -> MlxTarget:
    config = _config(kind, **{k: v for k, v in changes.items() if k not in ("seed", "noise", "raised")})
    return loading.wrap(_build(kind, **changes), config, notify, kv_bits=kv_bits)


def new(
    kind: str, taps: Sequence[int] = (), context: int | None = None, kv_bits: int | None = None, **changes: Any
) -> MlxTarget:
    """A target with an empty cache. The model and the outcome of its probe are shared between calls."""
    made = _wrapped(kind, kinds.key(changes), kv_bits)
    target = MlxTarget(made.model, made.cache.twin(), context or made.context, taps)
    target.trees = made.trees
    return target


def probed(kind: str, **changes: Any) -> tuple[MlxTarget, list[str]]:
    """A target that was probed just now, and the notices of that."""
    notices: list[str] = []
    return _wrap(kind, changes, notices.append), notices


def has_cuda() -> bool:
    return mx.cuda.is_available()


def load(folder: Path, **options: Any) -> MlxTarget:
    """A target from a folder."""
    return loading.load(folder, lambda text: None, **options)


def save(kind: str, folder: Path, **changes: Any) -> None:
    """Write config.json and weights."""
    model = _build(kind, **changes)
    save_config(kind, folder, **{k: v for k, v in changes.items() if k not in ("seed", "noise", "raised")})
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"}
    )


def save_config(kind: str, folder: Path, **changes: Any) -> None:
    """Write config.json only."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(kind, **changes)))


def plain(
    kind: str, prompt: Sequence[int], n: int, settings: dict[str, Any] | None = None, **changes: Any
) -> list[int]:
    """The next n tokens, each the likeliest after one more step with mlx-lm's caches.

    settings: `repetition_penalty`, which means what transformers means by it: the logits of every token of prompt and
    answer are divided by it where they are positive and multiplied where they are negative.
    """
    return list(_greedy(kind, tuple(prompt), n, (settings or {}).get("repetition_penalty", 1.0), kinds.key(changes)))


@cache
def _greedy(kind: str, prompt: tuple[int, ...], n: int, penalty: float, key: Key) -> tuple[int, ...]:
    text = list(prompt)
    caches = _caches(kind, key)
    row = _prefill(kind, key, text, caches)
    while len(text) < len(prompt) + n:
        seen = sorted(set(text))
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        text.append(int(row.argmax()))
        row = _step(kind, key, text[-1], caches)
    return tuple(text[len(prompt) :])


def _prefill(kind: str, key: Key, text: Sequence[int], caches: list[Any]) -> np.ndarray:
    """[V] logits after a text. With a window token by token: not every class of mlx-lm masks several at once."""
    if _windows(kind, key):
        return [_step(kind, key, token, caches) for token in text][-1]
    return np.array(_untouched(kind, key)(mx.array([list(text)]), cache=caches)[0, -1])


def _windows(kind: str, key: Key) -> tuple[int | None, ...]:
    """Sliding window of every layer; empty if no layer has one."""
    changes = {k: v for k, v in kinds.thaw(key).items() if k not in ("seed", "noise", "raised")}
    found = windows(_config(kind, **changes)) or ()
    return found if any(found) else ()


def _caches(kind: str, key: Key) -> list[Any]:
    """mlx-lm's own caches."""
    found = _windows(kind, key) or [None] * len(_untouched(kind, key).layers)
    return [RotatingKVCache(max_size=window) if window else KVCache() for window in found]


def _step(kind: str, key: Key, token: int, caches: list[Any]) -> np.ndarray:
    return np.array(_untouched(kind, key)(mx.array([[token]]), cache=caches)[0, -1])


_remembered: OrderedDict[tuple[str, Key, tuple[int, ...]], Steps] = OrderedDict()
"""The last states that `_after` made: most texts of the tests share a prefix with another one."""


def _after(kind: str, key: Key, text: tuple[int, ...]) -> Steps:
    """Logits after a text and the caches behind it, token by token from the longest prefix that is remembered."""
    known = len(text)
    while known and (kind, key, text[:known]) not in _remembered:
        known -= 1
    row, caches = _remembered[kind, key, text[:known]] if known else (np.zeros(0), _caches(kind, key))
    for end in range(known + 1, len(text) + 1):
        caches = deepcopy(caches)  # arrays are shared until one of them is written
        row = _step(kind, key, text[end - 1], caches)
        _remembered[kind, key, text[:end]] = row, caches
        if len(_remembered) > 256:
            _remembered.popitem(last=False)
    return row, caches


def logits(kind: str, ids: Sequence[int], **changes: Any) -> np.ndarray:
    """[T, V] raw logits of every position: in one pass without a cache, token by token if there is a window."""
    key = kinds.key(changes)
    if _windows(kind, key):
        return stepwise(kind, ids, **changes)
    return np.array(_untouched(kind, key)(mx.array([list(ids)]))[0])


def stepwise(kind: str, ids: Sequence[int], **changes: Any) -> np.ndarray:
    """[T, V] raw logits, token by token with mlx-lm's own caches."""
    key = kinds.key(changes)
    return np.stack([_after(kind, key, tuple(ids[: end + 1]))[0] for end in range(len(ids))])


def hidden(kind: str, ids: Sequence[int], points: Sequence[int], **changes: Any) -> np.ndarray:
    """[T, E, D] hidden states at every position, token by token; points as in `Target.tap`."""
    key = kinds.key(changes)
    model = _untouched(kind, key).model
    caches, rows = _caches(kind, key), []
    with _recorded(model.layers, range(len(model.layers))) as seen:
        for token in ids:
            _step(kind, key, token, caches)
            states = [seen[layer] for layer in range(-1, len(model.layers))]
            states.append(model.norm(states[-1]))
            rows.append([np.array(states[point]) for point in points])
    return np.array(rows)


@contextmanager
def _recorded(stack: list[Any], layers: Sequence[int]) -> Iterator[dict[int, mx.array]]:
    """Outputs [D] of some layers of the last pass of one token."""
    seen: dict[int, mx.array] = {}
    originals = {layer: stack[layer] for layer in layers}
    for layer, original in originals.items():
        stack[layer] = _Recorder(original, layer, seen)
    try:
        yield seen
    finally:
        for layer, original in originals.items():
            stack[layer] = original


class _Recorder:
    """Stands in for a decoder layer."""

    def __init__(self, layer: nn.Module, number: int, seen: dict[int, mx.array]):
        self._layer, self._number, self._seen = layer, number, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._number == 0:
            self._seen[-1] = args[0][0, -1]
        out = self._layer(*args, **kwargs)
        self._seen[self._number] = (out[0] if isinstance(out, tuple) else out)[0, -1]
        return out


def cache_bytes(target: MlxTarget) -> int:
    """Bytes of keys and values held."""
    return target.cache.nbytes


def storages(target: MlxTarget) -> list[int]:
    """Where the buffers lie."""
    mx.eval(target.cache.arrays)
    # The views must not outlive this line: an array that is looked at is copied when it is written to.
    return [np.array(a, copy=False).__array_interface__["data"][0] for a in target.cache.arrays]


def rows_of(target: MlxTarget, slots: int) -> np.ndarray:
    """A copy of the first slots of every buffer: [buffers, G, slots, d]."""
    return np.stack([np.array(a[0, :, :slots]) for a in target.cache.arrays])


@contextmanager
def allocations(target: MlxTarget) -> Iterator[list[int]]:
    """What was held at most beyond what was there before: one number, in bytes, that no array made inside exceeds."""
    mx.eval(target.cache.arrays)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    sizes: list[int] = []
    yield sizes
    mx.eval(target.cache.arrays)
    if (extra := mx.get_peak_memory() - before) > 0:
        sizes.append(extra)
