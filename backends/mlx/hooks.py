"""What must be changed in a model of mlx-lm, instance by instance: its classes stay untouched.

An instance is given a subclass of its own class, so that names, weights and `isinstance` stay as they are.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from speclocal.core.head_spec import FEATURE
from speclocal.errors import ModelError

Call = Callable[..., Any]


def reclass(module: nn.Module, make: Callable[[Call], Call]) -> None:
    """Replace the `__call__` of one instance. make: gets the one of its class, returns the new one."""
    kind = type(module)
    call = make(kind.__call__)
    module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "hooked": True})


def positions_per_node(model: nn.Module) -> int:
    """Ropes accept positions [B, n], one for each row; returns how many were found."""
    ropes = [m for m in model.modules() if _is_rope(m)]
    for rope in ropes:
        reclass(rope, _by_node)
    for module in {type(m).__module__ for m in model.modules()}:
        scale = getattr(sys.modules.get(module), "_get_llama_4_attn_scale", None)
        if scale is not None and not hasattr(scale, "by_node"):
            vars(sys.modules[module])["_get_llama_4_attn_scale"] = _attention_scale(scale)
    return len(ropes)


def _is_rope(module: nn.Module) -> bool:
    """A module without weights that is called with an offset."""
    if getattr(module, "hooked", False) or module.children():
        return False
    return "offset" in inspect.signature(type(module).__call__).parameters


def _by_node(inner: Call) -> Call:
    def call(self: nn.Module, x: mx.array, offset: int | mx.array = 0, *args: Any, **kwargs: Any) -> mx.array:
        if not isinstance(offset, mx.array) or offset.ndim != 2:
            return inner(self, x, offset, *args, **kwargs)
        # Ropes know one position a batch row, so every node becomes a batch row of length 1.
        B, H, n, d = x.shape
        rows = x.transpose(0, 2, 1, 3).reshape(B * n, H, 1, d)
        out = inner(self, rows, offset.reshape(-1), *args, **kwargs)
        return out.reshape(B, n, H, d).transpose(0, 2, 1, 3)

    return call


def _attention_scale(inner: Call) -> Call:
    """Ministral's scale of queries by position, which takes one offset for a text."""

    def scale(size: int, offset: int | mx.array, beta: float, most: int) -> mx.array:
        if not isinstance(offset, mx.array) or offset.ndim != 2:
            return inner(size, offset, beta, most)
        return (1 + beta * mx.log(1 + mx.floor(offset / most)))[:, None, :, None]

    scale.by_node = True  # type: ignore[attr-defined]
    return scale


def own_masks(layers: Sequence[nn.Module]) -> None:
    """Each layer asks its own cache for its mask: for classes that make one mask for layers of different windows."""
    for layer in layers:
        reclass(layer, _with_own_mask)


def _with_own_mask(inner: Call) -> Call:
    signature = inspect.signature(inner)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        cache = given.arguments.get("cache")
        if cache is not None:
            mask = given.arguments.get("mask")
            rows = given.args[1].shape[1]
            given.arguments["mask"] = cache.make_mask(rows, return_array=isinstance(mask, mx.array))
        return inner(*given.args, **given.kwargs)

    return call


def masks_per_text(model: nn.Module) -> None:
    """Attention that lays out its query heads as [B, G, H / G, n, T] (gemma2) accepts masks [B, 1, n, T]."""
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping") and getattr(module, "repeats", 1) > 1:
            reclass(module, _with_wide_mask)


def _with_wide_mask(inner: Call) -> Call:
    def call(self: nn.Module, x: mx.array, mask: Any = None, *args: Any, **kwargs: Any) -> mx.array:
        wide = isinstance(mask, mx.array) and mask.ndim == 4
        return inner(self, x, mask[:, :, None] if wide else mask, *args, **kwargs)

    return call


@contextmanager
def only_rows(norm: nn.Module, rows: mx.array) -> Iterator[None]:
    """Inside, the output layer sees one row of each text [B]: what follows the final norm is not done for the rest."""
    kind = type(norm)

    def make(inner: Call) -> Call:
        def call(module: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            return inner(module, x, *args, **kwargs)[mx.arange(len(rows)), rows][:, None]

        return call

    reclass(norm, make)
    try:
        yield
    finally:
        norm.__class__ = kind


class Anatomy:
    """The parts of a model that a head reads: decoder layers, final norm, embedding, output layer."""

    def __init__(self, model: Any):
        trunk: dict[str, Any] = next((m for m in model.modules() if "embed_tokens" in m and "layers" in m), {})
        self.layers: Sequence[nn.Module] = trunk.get("layers", ())
        self.embedding: Any = trunk.get("embed_tokens")
        self.norm: nn.Module | None = trunk.get("norm")
        self._head = next((m.lm_head for m in model.modules() if "lm_head" in m), None)

    def unembed(self, hidden: mx.array) -> mx.array:
        """[n, D] → [n, V]."""
        return self.embedding.as_linear(hidden) if self._head is None else self._head(hidden)

    def output_rows(self, tokens: mx.array) -> mx.array | None:
        """[n] → [n, D], de-quantised."""
        head = self._head
        if head is None:
            return self.embedding(tokens)
        if isinstance(head, nn.QuantizedLinear):
            scales, biases = head.scales[tokens], head.get("biases")
            biases = None if biases is None else biases[tokens]
            return mx.dequantize(head.weight[tokens], scales, biases, head.group_size, head.bits, head.mode)
        return head.weight[tokens] if isinstance(head, nn.Linear) else None


class Taps:
    """Keeps hidden states of chosen points (see `Target.tap`) during a pass."""

    def __init__(self, anatomy: Anatomy, points: Sequence[int]):
        self.points = tuple(points)
        self._held: dict[int, mx.array] = {}
        self._hooked: list[tuple[nn.Module, type]] = []
        if self.points and (anatomy.embedding is None or anatomy.norm is None):
            raise ModelError("no head can read this model: its layers are not named in the usual way")
        for point in self.points:
            module: Any = anatomy.norm if point == FEATURE else anatomy.layers[max(point - 1, 0)]
            self._hooked.append((module, type(module)))
            reclass(module, self._hook(point))

    def _hook(self, point: int) -> Callable[[Call], Call]:
        def make(inner: Call) -> Call:
            def call(module: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
                out = inner(module, x, *args, **kwargs)
                self._held[point] = x if point == 0 else out[0] if isinstance(out, tuple) else out
                return out

            return call

        return make

    def remove(self) -> None:
        """Give the modules back the classes they had."""
        for module, kind in reversed(self._hooked):
            module.__class__ = kind

    def clear(self) -> None:
        self._held.clear()

    def take(self) -> mx.array | None:
        """[n, E, D] of the first text, or None without taps."""
        return mx.stack([self._held[i][0] for i in self.points], 1) if self.points else None

    def take_batch(self) -> mx.array | None:
        """[B, n, E, D], or None without taps."""
        return mx.stack([self._held[i] for i in self.points], 2) if self.points else None
