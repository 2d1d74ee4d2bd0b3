"""Medusa heads (Cai et al. 2401.10774): each predicts one position further from the target's last feature."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn

from speclocal.backends.mlx.heads.eagle import linear
from speclocal.backends.mlx.target import MlxTarget
from speclocal.core.heads import MedusaSpec


class Blocks(nn.Module):
    """Residual blocks, one after the other: x + SiLU(W x + b)."""

    def __init__(self, blocks: list[nn.Linear]):
        super().__init__()
        self.blocks = blocks

    def __call__(self, x: mx.array) -> mx.array:
        for block in self.blocks:
            x = x + nn.silu(block(x))
        return x


class MedusaHeads:
    """Implements `core.interfaces.ParallelHead`. tensors: by normalised name (`core.heads.identify`)."""

    def __init__(self, spec: MedusaSpec, tensors: Mapping[str, mx.array], target: MlxTarget):
        self.spec, self.ops = spec, target.ops
        self.width = spec.vocab
        self._heads = [
            Blocks([linear(tensors, f"heads.{h}.blocks.{j}") for j in range(spec.blocks)]) for h in range(spec.heads)
        ]
        stored = (1 if spec.shared_output else spec.heads) if spec.own_output else 0
        own: list[Callable[[mx.array], mx.array]] = [linear(tensors, f"heads.{h}.output") for h in range(stored)]
        own = own or [target.unembed]
        self._outputs = own if len(own) == spec.heads else own * spec.heads
        mx.eval([module.parameters() for module in (*self._heads, *own) if isinstance(module, nn.Module)])

    def predict(self, feature: mx.array) -> mx.array:
        """Feature [H] → logits [heads, V] in float32: head h for the position h + 1 after the target's own."""
        rows = [output(head(feature[None])) for head, output in zip(self._heads, self._outputs, strict=True)]
        return mx.concatenate(rows).astype(mx.float32)
