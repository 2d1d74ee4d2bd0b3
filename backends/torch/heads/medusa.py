"""Medusa heads (Cai et al. 2401.10774): each predicts one position further from the target's last feature."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speclocal.backends.torch.heads.eagle import linear
from speclocal.backends.torch.linear import pack
from speclocal.backends.torch.target import TorchTarget
from speclocal.core.heads import MedusaSpec


class Blocks(nn.Sequential):
    """Residual blocks, one after the other: x + SiLU(W x + b)."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + F.silu(block(x))
        return x


class MedusaHeads:
    """Implements `core.interfaces.ParallelHead`. tensors: by normalised name (`core.heads.identify`)."""

    def __init__(self, spec: MedusaSpec, tensors: Mapping[str, Tensor], target: TorchTarget):
        self.spec, self.ops = spec, target.ops
        self.width = spec.vocab
        self._heads = nn.ModuleList(
            Blocks(*(linear(tensors, f"heads.{h}.blocks.{j}") for j in range(spec.blocks))) for h in range(spec.heads)
        )
        stored = (1 if spec.shared_output else spec.heads) if spec.own_output else 0
        outputs = nn.ModuleList(linear(tensors, f"heads.{h}.output") for h in range(stored))
        modules = nn.ModuleList([self._heads, outputs]).to(target.device).eval().requires_grad_(False)
        if target.device.type == "cpu":
            pack(modules)
        own = list(outputs) or [target.unembed]
        self._outputs = own if len(own) == spec.heads else own * spec.heads

    @torch.inference_mode()
    def predict(self, feature: Tensor) -> Tensor:
        """Feature [H] → logits [heads, V] in float32: head h for the position h + 1 after the target's own."""
        rows = [output(head(feature[None])) for head, output in zip(self._heads, self._outputs, strict=True)]
        return torch.cat(rows).float()
