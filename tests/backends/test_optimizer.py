"""The optimizer of training is torch's AdamW with clipping, warm-up and cosine decay, on every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from speclocal.train.optimizer import AdamW
from tests.backends.bench_heads import host

pytest.importorskip("torch")

STEPS = 12
GIVEN = AdamW(rate=0.05, warmup=0.25, decay=0.1, clip=0.7)


def as_torch(start: Mapping[str, np.ndarray], grads: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The tensors after all steps by torch's own AdamW, clipping and schedules, with the settings of `GIVEN`."""
    import torch

    params = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in start.items()}
    groups = [
        {"params": [p for p in params.values() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.95), eps=1e-8)
    warm = round(0.25 * STEPS)
    rise = torch.optim.lr_scheduler.LinearLR(made, 1 / warm, 1.0, total_iters=warm - 1)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(made, STEPS - warm, eta_min=0.05 * 0.05)
    for step, each in enumerate(grads, 1):
        for key, parameter in params.items():
            parameter.grad = torch.tensor(each[key])
        torch.nn.utils.clip_grad_norm_(params.values(), 0.7)
        made.step()
        (rise if step < warm else fall).step()
    return {key: value.detach().numpy() for key, value in params.items()}


def off_torch(ops: Any, optimizer: AdamW) -> float:
    """The largest difference between our steps and torch's."""
    draw = np.random.default_rng(0)
    shapes = {"matrix": (4, 3), "vector": (5,)}
    start = {key: draw.standard_normal(shape, np.float32) for key, shape in shapes.items()}
    # Some steps are clipped and some are not.
    sizes = np.geomspace(0.02, 2.0, STEPS)
    grads = [
        {key: (s * draw.standard_normal(shape)).astype(np.float32) for key, shape in shapes.items()} for s in sizes
    ]
    norms = [np.sqrt(sum((g**2).sum() for g in each.values())) for each in grads]
    assert min(norms) < GIVEN.clip < max(norms)
    params = {key: ops.array(value) for key, value in start.items()}
    state = optimizer.start(params)
    for step, each in enumerate(grads, 1):
        given = {key: ops.array(value) for key, value in each.items()}
        params, state, norm = optimizer.step(ops.xp, params, given, state, step, optimizer.rate_at(step / STEPS))
        assert abs(float(host(norm)) - norms[step - 1]) <= 1e-5
    expected = as_torch(start, grads)
    return max(float(np.abs(host(value) - expected[key]).max()) for key, value in params.items())


def test_the_optimizer_is_torchs(ops):
    assert off_torch(ops, GIVEN) <= 1e-5


WRONG = {
    "rate": 0.051, "warmup": 0.5, "floor": 0.0, "decay": 0.0, "clip": 1e9, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-3,
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_every_setting_of_the_optimizer_counts(ops, what):
    assert off_torch(ops, replace(GIVEN, **{what: WRONG[what]})) > 1e-4
