"""Linear layers for few rows on a CPU: the same product from weights stored in the layout its kernels read.

torch's general matrix product re-packs the weight for every call, which at 2 to 16 rows costs more than the product.
oneDNN can keep the packed weight: one row then runs at memory speed, and 16 rows cost little more than one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

PACKED = (torch.float32, torch.bfloat16)


@cache
def available(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this torch build and processor have the packed product, and it is right on a small case."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    plain = nn.Linear(48, 40, dtype=dtype)
    x = torch.linspace(-1, 1, 3 * 48).view(3, 48).to(dtype)
    try:
        packed = PackedLinear(plain)(x)
    except RuntimeError:  # an operator this processor lacks
        return False
    return torch.allclose(packed.float(), plain(x).float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


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
    count = 0
    # Parents only: a list of all modules would keep the plain weights alive until the end.
    parents = [module for module in model.modules() if any(type(child) is nn.Linear for child in module.children())]
    for parent in parents:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype in PACKED and available(child.weight.dtype):
                setattr(parent, name, PackedLinear(child))
                count += 1
    return count
