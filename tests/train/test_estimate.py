"""What a training takes is said before, and refused where it is not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speclocal.errors import ModelError
from speclocal.train.estimate import check_disk, check_training
from speclocal.train.writing import Limits

LIMITS = Limits(answer=300, question=100)
ROW = 1000
WANTED = 1000 * 200 * ROW
"""Bytes of 1000 texts that are half as long as they may be."""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say how much the disk has."""
    asked: list[Path] = []

    def usage(place: Path) -> SimpleNamespace:
        asked.append(place)
        return SimpleNamespace(free=free.bytes)

    free = SimpleNamespace(bytes=0, asked=asked)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    return free


def test_disk_is_said_and_refused(free: Any, tmp_path: Path) -> None:
    notes: list[str] = []
    free.bytes = WANTED
    check_disk(tmp_path / "not" / "there", 1000, LIMITS, ROW, notes.append)
    assert free.asked == [tmp_path], "of the disk that the folder will be on"
    assert len(notes) == 1
    assert "200,000 tokens" in notes[0]
    assert "--features recompute" in notes[0]
    free.bytes = WANTED - 1
    with pytest.raises(ModelError, match="no room for the target's states"):
        check_disk(tmp_path, 1000, LIMITS, ROW, notes.append)


def test_texts_that_are_there_are_not_counted(free: Any, tmp_path: Path) -> None:
    free.bytes = 0
    check_disk(tmp_path, 0, LIMITS, ROW, pytest.fail)


def test_states_that_are_not_kept_take_nothing(free: Any, tmp_path: Path) -> None:
    notes: list[str] = []
    check_disk(tmp_path, 1000, LIMITS, 0, notes.append)
    assert "computed in every pass" in notes[0]


def test_memory_is_said_and_refused() -> None:
    notes: list[str] = []
    tensors = {"a": np.zeros((1000, 1000), np.float32), "b": np.zeros(500_000, np.float32)}
    wanted = 6 * 4 * 1_500_000 + 2**30
    check_training(tensors, wanted, notes.append)
    assert notes[0].startswith("1.5 M trained numbers")
    with pytest.raises(ModelError, match="not enough memory to train"):
        check_training(tensors, wanted - 1, notes.append)
