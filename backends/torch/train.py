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
        self._device = target.device

    def array(self, values: np.ndarray) -> Tensor:
        """See Gradients."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def numpy(self, array: Tensor) -> np.ndarray:
        """See Gradients."""
        return array.detach().cpu().numpy()

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
