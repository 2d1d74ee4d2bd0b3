"""Trainings that forget something when they are resumed. Each must give another curve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speclocal.train import loop
from speclocal.train.checkpoint import Checkpoint
from speclocal.train.loop import Training


def no_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read

    def forgetful(folder: Path, settings: Any) -> Checkpoint | None:
        if found := read(folder, settings):
            found.tensors.update({key: 0 * value for key, value in found.tensors.items() if key[0] in "mv"})
        return found

    monkeypatch.setattr(Checkpoint, "read", forgetful)


def order_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of a resumed run begin with the first one."""
    init, batch = Training.__init__, Training._batch

    def begin(self: Training, *args: Any) -> None:
        init(self, *args)
        self.began = self.step

    monkeypatch.setattr(Training, "__init__", begin)
    monkeypatch.setattr(Training, "_batch", lambda self, step: batch(self, step - self.began))


def another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of an epoch is no matter of its seed."""
    draw = np.random.default_rng(0)
    plan = loop.plan
    monkeypatch.setattr(
        loop, "plan", lambda *args: [made[i] for made in [plan(*args)] for i in draw.permutation(len(made))]
    )


def step_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule starts again."""
    read = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda *args: found and replace(found, step=0) if (found := read(*args)) else None
    )


def weights_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read

    def rounded(folder: Path, settings: Any) -> Checkpoint | None:
        if found := read(folder, settings):
            half = {
                key: value.astype(np.float16).astype(np.float32)
                for key, value in found.tensors.items()
                if key[0] == "p"
            }
            found.tensors.update(half)
        return found

    monkeypatch.setattr(Checkpoint, "read", rounded)


ALL = (no_moments, order_from_the_start, another_order, step_forgotten, weights_rounded)
