"""Weights as pickles, which only torch writes, whatever backend is to read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def pickle(folder: Path, runs: str | None = None) -> None:
    """Turn the weights of a folder into a pickle, or into one that runs a line of code when it is opened."""
    weights = folder / "model.safetensors"
    if weights.exists():
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()
    if runs:
        torch.save(_Running(runs), folder / "pytorch_model.bin")


class _Running:
    def __init__(self, line: str):
        self._line = line

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._line,)
