"""What training needs of MLX: gradients, arrays from and to the host, texts side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from speclocal.backends.mlx.batch import Batch
from speclocal.backends.mlx.target import MlxTarget

__all__ = ["Batch", "Gradients"]


class Gradients:
    """Implements `core.interfaces.Gradients` on MLX's default device, which is the target's."""

    def __init__(self, target: MlxTarget):
        self._target = target

    def array(self, values: np.ndarray) -> mx.array:
        """See Gradients."""
        return mx.array(np.ascontiguousarray(values))

    def numpy(self, array: mx.array) -> np.ndarray:
        """See Gradients. numpy has no bfloat16: it comes as float32."""
        return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)

    def embed(self, tokens: mx.array) -> mx.array:
        """See Gradients."""
        return self._target.embed(tokens).astype(mx.float32)

    def unembed(self, hidden: mx.array) -> mx.array:
        """See Gradients."""
        return self._target.unembed(hidden).astype(mx.float32)

    def of(
        self, loss: Callable[[dict[str, mx.array]], tuple[mx.array, Any]], params: Mapping[str, mx.array]
    ) -> tuple[Any, dict[str, mx.array]]:
        """See Gradients. Nothing is computed yet."""
        beside: list[Any] = []

        def number(leaves: dict[str, mx.array]) -> mx.array:
            total, rest = loss(leaves)
            beside.append(rest)
            return total

        _, grads = mx.value_and_grad(number)(dict(params))
        return beside[0], grads

    def done(self, *arrays: mx.array) -> None:
        """See Gradients."""
        mx.eval(*arrays)
