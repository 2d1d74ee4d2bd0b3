"""Checkpoints: the last or the one before it, never half of one, never another training's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speclocal.errors import ModelError, UsageError
from speclocal.train import checkpoint as module
from speclocal.train.checkpoint import NAME, Checkpoint

SETTINGS = {"method": "eagle3", "seed": 0, "optimizer": {"rate": 1e-3}, "objective": {"taps": (1, 2)}}


def made(step: int, **changes: Any) -> Checkpoint:
    draw = np.random.default_rng(step)
    tensors = {f"{kind}.fc.weight": draw.standard_normal((3, 4), np.float32).T for kind in "pmv"}
    return Checkpoint(step, tensors, {**SETTINGS, **changes})


def same(found: Checkpoint | None, wanted: Checkpoint) -> bool:
    assert found is not None
    equal = all(np.array_equal(found.tensors[name], value) for name, value in wanted.tensors.items())
    return found.step == wanted.step and found.tensors.keys() == wanted.tensors.keys() and equal


def test_comes_back(tmp_path: Path) -> None:
    assert Checkpoint.read(tmp_path, SETTINGS) is None
    made(3).write(tmp_path)
    assert same(Checkpoint.read(tmp_path, SETTINGS), made(3))
    made(7).write(tmp_path)
    assert same(Checkpoint.read(tmp_path, SETTINGS), made(7))
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


class CrashError(Exception):
    pass


def crash(*args: Any) -> None:
    raise CrashError


def crash_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the new file and its renaming, and while it is written."""
    made(3).write(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(CrashError):
            made(7).write(folder)
    assert same(Checkpoint.read(folder, SETTINGS), made(3))

    def half(tensors: Any, path: Path, about: Any) -> None:
        path.write_bytes(b"\x08\x00\x00")
        raise CrashError

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", half)
        with pytest.raises(CrashError):
            made(8).write(folder)
    assert same(Checkpoint.read(folder, SETTINGS), made(3))
    made(9).write(folder)
    assert same(Checkpoint.read(folder, SETTINGS), made(9)), "what a crash left is in nobody's way"


def test_a_crash_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crash_leaves_the_old_one(tmp_path, monkeypatch)


def in_place(self: Checkpoint, folder: Path) -> None:
    """Writes over the old one."""
    about = {"step": str(self.step), "settings": json.dumps(SETTINGS)}
    module.save_file(self.tensors, folder / NAME, about)
    os.replace(folder / NAME, folder / NAME)


def test_writing_in_place_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "write", in_place)
    with pytest.raises((AssertionError, ModelError)):
        crash_leaves_the_old_one(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"optimizer": {"rate": 2e-3}}, "optimizer"),
        ({"objective": {"taps": (1, 3)}}, "objective"),
        ({"texts": 7}, "texts"),
    ],
)
def test_another_training_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    made(3).write(tmp_path)
    with pytest.raises(UsageError, match=f"started otherwise: {named}"):
        Checkpoint.read(tmp_path, {**SETTINGS, **changes})


@pytest.mark.parametrize("content", [b"", b"\x08\x00", b"{}" * 40])
def test_a_broken_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(ModelError, match="cannot be read"):
        Checkpoint.read(tmp_path, SETTINGS)
