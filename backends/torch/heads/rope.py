"""The rope of a head."""

from __future__ import annotations

import torch
from torch import Tensor

from speclocal.core.heads import EagleSpec
from speclocal.core.rope import frequencies


class Rope:
    """Angles of the head's own base and scaling, computed for the positions asked for."""

    def __init__(self, spec: EagleSpec, device: torch.device):
        radians, self._scale = frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        self._radians = torch.tensor(radians, dtype=torch.float32, device=device)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, d]."""
        angles = positions.float()[:, None] * self._radians[None]
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [n, heads, d] at its positions (the halves form)."""
    cos, sin = rope
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
