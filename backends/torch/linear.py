"""Linear layers for few rows on a CPU: the same product from weights stored in the layout its kernels read.

torch's general matrix product re-packs the weight for every call, which at 2 to 16 rows costs more than the product.
oneDNN can keep the packed weight: one row then runs at memory speed, and 16 rows cost little more than one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def available() -> bool:
    """Whether this torch build has the packed product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` whose weight is not needed in any other form."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # A plain attribute: the opaque layout can be neither saved nor moved, so it is no parameter.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


def pack(model: nn.Module) -> int:
    """Replace every plain linear layer of a CPU model, one at a time so that memory never doubles; returns how many.

    Subclasses (quantised layers) stay. A weight shared with an embedding keeps its plain copy there.
    """
    if not available():
        return 0
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in (torch.float32, torch.bfloat16):
                setattr(module, name, PackedLinear(child))

                count += 1
    return count
