"""Tiny random models for the torch backend, and the same models untouched, as transformers runs them.

Another backend brings a module with the same public functions; the tests stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from speclocal.backends.torch import loading
from speclocal.backends.torch.quantized import make_cache
from speclocal.backends.torch.target import TorchTarget
from speclocal.core.cached_target import CHUNK
from tests.backends import kinds
from tests.backends.mutants_torch import MUTANTS, copies_its_cache, mutant, never_rolled_back
from tests.backends.pickles import pickle

__all__ = ["CHUNK", "MUTANTS", "copies_its_cache", "mutant", "never_rolled_back", "pickle"]

LAW_SEED = 0
"""Of a model of 8 words whose drafts are often kept and often refused."""


def _build(kind: str, *, seed: int = 0, noise: float = 0.0, raised: int | None = None, **changes: Any) -> Any:
    """A random model in float32.

    noise: its weights are mixed with so much of another seed's: a draft model that agrees now and then.
    raised: output rows from this id on are made large, so that their logits win half of the time.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    config = kinds.config(kind, **changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    if kind == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, 0.0, 1.0)
    if noise:
        other = _build(kind, seed=seed + 1000, **changes).state_dict()
        for name, weight in model.state_dict().items():
            weight.add_(other[name] - weight, alpha=noise)
    if raised is not None:
        model.get_output_embeddings().weight.data[raised:] *= 20.0
    return model.eval().requires_grad_(False)


@cache
def _untouched(kind: str, key: tuple[Any, ...]) -> Any:
    return _build(kind, **kinds.thaw(key))


@cache
def _wrapped(kind: str, key: tuple[Any, ...]) -> TorchTarget:
    def refuse(text: str) -> None:
        raise AssertionError(f"unexpected notice: {text}")

    return loading.wrap(_build(kind, **kinds.thaw(key)), refuse)


def new(
    kind: str, taps: Sequence[int] = (), context: int | None = None, kv_bits: int | None = None, **changes: Any
) -> TorchTarget:
    """A target with an empty cache. The model and the outcome of its probe are shared between calls."""
    made = _wrapped(kind, kinds.key(changes))
    target = TorchTarget(made.model, context or made.context, taps)
    target.cache = make_cache(kv_bits)
    target.trees = made.trees
    return target


def probed(kind: str, **changes: Any) -> tuple[TorchTarget, list[str]]:
    """A target that was probed just now, and the notices of that."""
    notices: list[str] = []
    return loading.wrap(_build(kind, **changes), notices.append), notices


def has_cuda() -> bool:
    return torch.cuda.is_available()


def load(folder: Path, **options: Any) -> TorchTarget:
    """A target from a folder."""
    return loading.load(folder, lambda text: None, **options)


def save(kind: str, folder: Path, **changes: Any) -> None:
    """Write config.json and weights."""
    model = _build(kind, **changes)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)


def save_config(kind: str, folder: Path) -> None:
    """Write config.json only."""
    kinds.config(kind).save_pretrained(folder)


@torch.inference_mode()
def plain(
    kind: str, prompt: Sequence[int], n: int, settings: dict[str, Any] | None = None, **changes: Any
) -> list[int]:
    """The next n tokens by transformers' own greedy decoding."""
    model = _untouched(kind, kinds.key(changes))
    ids = torch.tensor([list(prompt)])
    options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": n, "max_new_tokens": n, **(settings or {})}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def logits(kind: str, ids: Sequence[int], **changes: Any) -> np.ndarray:
    """[T, V] raw logits of every position, in one pass without a cache."""
    return _untouched(kind, kinds.key(changes))(torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


@torch.inference_mode()
def stepwise(kind: str, ids: Sequence[int], **changes: Any) -> np.ndarray:
    """[T, V] raw logits, token by token with transformers' own cache."""
    model, past, rows = _untouched(kind, kinds.key(changes)), None, []
    for token in ids:
        out = model(torch.tensor([[token]]), cache=past, use_cache=True)
        past = out.cache
        rows.append(out.logits[0, -1])
    return torch.stack(rows).numpy()


@torch.inference_mode()
def hidden(kind: str, ids: Sequence[int], points: Sequence[int], **changes: Any) -> np.ndarray:
    """[T, E, D] hidden states at every position; points as in `Target.tap`."""
    model, last = _untouched(kind, kinds.key(changes)), []
    hook = model.get_decoder().layers[-1].register_forward_hook(lambda module, args, out: last.append(out))
    states = list(model(torch.tensor([list(ids)]), use_cache=False, output_hidden_states=True).hidden_states)
    hook.remove()
    # transformers' last one stands after the final norm.
    states.insert(-1, last[0][0] if isinstance(last[0], tuple) else last[0])
    return np.stack([states[point][0].numpy() for point in points], 1)


def cache_bytes(target: TorchTarget) -> int:
    """Bytes of keys and values held."""
    return target.cache.nbytes


def storages(target: TorchTarget) -> list[int]:
    """Where the buffers lie."""
    return [buffer.data_ptr() for buffer in (*target.cache._keys, *target.cache._values)]


def rows_of(target: TorchTarget, slots: int) -> np.ndarray:
    """A copy of the first slots of every buffer: [buffers, G, slots, d]."""
    buffers = (*target.cache._keys, *target.cache._values)
    return np.stack([buffer[0, :, :slots].clone().numpy() for buffer in buffers])


class _Recorder(TorchDispatchMode):
    def __init__(self, sizes: list[int]):
        super().__init__()
        self._sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {place for place, _ in map(_storage, args) if place}
        for place, size in map(_storage, out if isinstance(out, tuple | list) else (out,)):
            if place and place not in given:
                self._sizes.append(size)
        return out


def _storage(value: Any) -> tuple[int, int]:
    """Where the bytes of a tensor lie, and how many there are; packed weights do not tell."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return 0, 0
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@contextmanager
def allocations(target: TorchTarget) -> Iterator[list[int]]:
    """Sizes in bytes of all arrays made inside."""
    sizes: list[int] = []
    with _Recorder(sizes):
        yield sizes
