"""AdamW: its schedule, and its steps against the formulas of the paper (1711.05101, algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from speclocal.train.optimizer import AdamW

OPTIMIZER = AdamW(rate=0.1, warmup=0.2, floor=0.1, decay=0.05, clip=1.0)


def test_schedule() -> None:
    """Rises in a straight line, is at the top after the warm-up, half way down in the middle, and ends at the floor."""
    assert OPTIMIZER.rate_at(0.0) == 0.0
    assert OPTIMIZER.rate_at(0.1) == pytest.approx(0.05)
    assert OPTIMIZER.rate_at(0.2) == pytest.approx(0.1)
    assert OPTIMIZER.rate_at(0.6) == pytest.approx(0.1 * 0.55)
    assert OPTIMIZER.rate_at(0.4) == pytest.approx(0.1 * (0.1 + 0.45 * (1 + math.cos(math.pi / 4))))
    assert OPTIMIZER.rate_at(1.0) == pytest.approx(0.01)
    rates = [OPTIMIZER.rate_at(n / 1000) for n in range(1001)]
    assert max(np.abs(np.diff(rates))) < 1e-3
    assert replace(OPTIMIZER, warmup=0.0).rate_at(0.0) == 0.1
    assert replace(OPTIMIZER, warmup=1.0).rate_at(1.0) == pytest.approx(0.1)


def gradients(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(step)
    size = 3.0 if step % 2 else 0.1
    return {"w": size * draw.standard_normal((2, 3)), "b": size * draw.standard_normal(3)}


def by_the_paper(steps: int) -> dict[str, np.ndarray]:
    """One number at a time."""
    o = OPTIMIZER
    values = {name: np.ones_like(g) for name, g in gradients(1).items()}
    m, v = ({name: np.zeros_like(g) for name, g in values.items()} for _ in range(2))
    for t in range(1, steps + 1):
        grads, rate = gradients(t), o.rate_at(t / steps)
        norm = math.sqrt(sum(float(x) ** 2 for g in grads.values() for x in g.flat))
        for name, g in grads.items():
            for i in np.ndindex(g.shape):
                x = g[i] if norm <= o.clip else g[i] * o.clip / norm
                m[name][i] = o.beta1 * m[name][i] + (1 - o.beta1) * x
                v[name][i] = o.beta2 * v[name][i] + (1 - o.beta2) * x * x
                root = math.sqrt(v[name][i] / (1 - o.beta2**t)) + o.epsilon
                move = m[name][i] / (1 - o.beta1**t) / root
                decay = o.decay if name == "w" else 0.0
                values[name][i] -= rate * (move + decay * values[name][i])
    return values


def run(optimizer: AdamW, steps: int, first: int = 1, forget: str = "") -> dict[str, np.ndarray]:
    params: dict[str, Any] = {name: np.ones_like(g) for name, g in gradients(1).items()}
    state = optimizer.start(params)
    for step in range(first, first + steps):
        grads, rate = gradients(step), optimizer.rate_at(step / steps)
        if forget:
            state[forget] = optimizer.start(params)[forget]
        params, state, norm = optimizer.step(np, params, grads, state, step, rate)
        assert norm == pytest.approx(math.sqrt(sum((g * g).sum() for g in grads.values())))
    return params


def near(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(np.allclose(a[name], b[name], rtol=1e-9, atol=0) for name in b)


def test_steps() -> None:
    assert near(run(OPTIMIZER, 7), by_the_paper(7))


@pytest.mark.parametrize(
    "changed",
    [{"decay": 0.0}, {"clip": 1e9}, {"beta1": 0.8}, {"beta2": 0.999}, {"epsilon": 1e-3}, {"warmup": 0.0}],
    ids=str,
)
def test_other_settings_are_seen(changed: dict[str, float]) -> None:
    assert not near(run(replace(OPTIMIZER, **changed), 7), by_the_paper(7))


@pytest.mark.parametrize("broken", [{"first": 2}, {"forget": "m"}, {"forget": "v"}], ids=str)
def test_other_moments_are_seen(broken: dict[str, Any]) -> None:
    assert not near(run(OPTIMIZER, 7, **broken), by_the_paper(7))
