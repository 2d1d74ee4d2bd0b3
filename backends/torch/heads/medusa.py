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


class MedusaHeads:
    """Implements `core.interfaces.ParallelHead`. tensors: by normalised name (`core.heads.identify`)."""

    def __init__(self, spec: MedusaSpec, tensors: Mapping[str, Tensor], target: TorchTarget):
        self.spec, self.ops = spec, target.ops
        self.width = spec.vocab
        modules = nn.ModuleDict()
        self._blocks = []
        for h in range(spec.heads):
            blocks = [linear(tensors, f"heads.{h}.blocks.{j}") for j in range(spec.blocks)]
            modules[f"blocks{h}"] = nn.ModuleList(blocks)
        outputs = [linear(tensors, f"heads.{h}.output") for h in range(spec.heads if spec.own_output else 0)]
        modules["outputs"] = nn.ModuleList(outputs)
        modules.to(target.device).eval().requires_grad_(False)
        if target.device.type == "cpu":
            pack(modules)
        self._blocks = [list(modules[f"blocks{h}"]) for h in range(spec.heads)]
        self._outputs = list(modules["outputs"]) or [target.unembed] * spec.heads

    @torch.inference_mode()
    def predict(self, feature: Tensor) -> Tensor:
        """Feature [H] → logits [heads, V] in float32: head h for the position h + 1 after the target's own."""
        rows = []
        for blocks, output in zip(self._blocks, self._outputs, strict=True):
            x = feature[None]
            for block in blocks:
                x = x + F.silu(block(x))
            rows.append(output(x))
        return torch.cat(rows).float()
