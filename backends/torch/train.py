"""What training needs of torch: gradients, arrays from and to the host, texts side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speclocal.backends.torch.batch import Batch
from speclocal.backends.torch.target import TorchTarget

__all__ = ["Batch", "Gradients"]


class Gradients:
    """Implements `core.interfaces.Gradients` on the device of a target."""

    def __init__(self, target: TorchTarget):
        self._target, self._device = target, target.device

    def array(self, values: np.ndarray) -> Tensor:
        """See Gradients. A copy in torch's own memory: sums depend in their last digits on where arrays begin."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, copy=True)

    def numpy(self, array: Tensor) -> np.ndarray:
        """See Gradients. numpy has no bfloat16: it comes as float32."""
        array = array.detach().cpu()
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()

    def embed(self, tokens: Tensor) -> Tensor:
        """See Gradients."""
        return self._target.embed(tokens).float()

    def unembed(self, hidden: Tensor) -> Tensor:
        """See Gradients."""
        return self._target.unembed(hidden.to(self._target.dtype)).float()

    def of(
        self, loss: Callable[[dict[str, Tensor]], tuple[Tensor, Any]], params: Mapping[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """See Gradients."""
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        with torch.enable_grad():
            total, rest = loss(leaves)
            total.backward()
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        return rest, {name: torch.zeros_like(params[name]) if g is None else g for name, g in grads.items()}

    def done(self, *arrays: Tensor) -> None:
        """See Gradients: torch computes at once."""
