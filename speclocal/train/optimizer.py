"""AdamW (Loshchilov & Hutter 1711.05101) with warm-up, cosine decay and gradient clipping, on any backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from speclocal.core.interfaces import Array
from speclocal.train.material import Params


@dataclass(frozen=True)
class AdamW:
    """rate: the largest learning rate. warmup: share of the training in which it rises; then it falls along a cosine to
    `floor` times itself. decay: of matrices only. clip: largest norm of all gradients together."""

    rate: float = 1e-3
    warmup: float = 0.03
    floor: float = 0.05
    decay: float = 0.01
    clip: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8

    def rate_at(self, progress: float) -> float:
        """The learning rate when this share of the training is done."""
        if progress < self.warmup:
            return self.rate * progress / self.warmup
        fallen = (progress - self.warmup) / max(1 - self.warmup, 1e-9)
        return self.rate * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(fallen, 1.0))))

    def start(self, params: Mapping[str, Array]) -> dict[str, Params]:
        """Moments before the first step."""
        return {kind: {name: 0 * value for name, value in params.items()} for kind in ("m", "v")}

    def step(
        self, xp: Any, params: Params, grads: Params, state: dict[str, Params], step: int, rate: float
    ) -> tuple[Params, dict[str, Params], Array]:
        """Step number `step` (from 1): new tensors, new moments, and the norm of the gradients on the device."""
        norm = sum((g * g).sum() for g in grads.values()) ** 0.5
        share = xp.where(norm > self.clip, self.clip / norm, 1.0)
        b1, b2 = self.beta1, self.beta2
        first, second = 1 / (1 - b1**step), 1 / (1 - b2**step)
        new: Params = {}
        m, v = state["m"], state["v"]
        moments: dict[str, Params] = {"m": {}, "v": {}}
        for name, g in grads.items():
            g = g * share
            moments["m"][name] = b1 * m[name] + (1 - b1) * g
            moments["v"][name] = b2 * v[name] + (1 - b2) * g * g
            root = (moments["v"][name] * second) ** 0.5 + self.epsilon
            value = params[name]
            if len(value.shape) > 1:
                value = value * (1 - rate * self.decay)
            new[name] = value - rate * first * moments["m"][name] / root
        return new, moments, norm
