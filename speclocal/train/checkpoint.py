"""What a training needs to go on after it was killed: written beside the last one, then put in its place."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from speclocal.errors import ModelError, UsageError

NAME = "checkpoint.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """step: steps done. tensors: `p.`, `m.` and `v.` before each name. settings: what the training was started with."""

    step: int
    tensors: dict[str, np.ndarray]
    settings: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Replace the checkpoint of a folder; whatever interrupts this, one of the two is whole."""
        part = folder / (NAME + ".part")
        about = {"step": str(self.step), "settings": json.dumps(self.settings, sort_keys=True)}
        save_file({name: np.ascontiguousarray(value) for name, value in self.tensors.items()}, part, about)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, folder / NAME)

    @classmethod
    def read(cls, folder: Path, settings: Mapping[str, Any]) -> Checkpoint | None:
        """The checkpoint of a folder, None if there is none; UsageError if it belongs to another training."""
        path = folder / NAME
        if not path.is_file():
            return None
        try:
            from safetensors import safe_open

            with safe_open(path, "np") as file:
                about = file.metadata()
            found = cls(int(about["step"]), load_file(path), json.loads(about["settings"]))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path} cannot be read", got=error, do="remove it to start again") from error
        wanted = json.loads(json.dumps(dict(settings), sort_keys=True))
        different = [key for key in wanted if found.settings.get(key) != wanted[key]]
        if different:
            key = different[0]
            raise UsageError(
                f"{folder} holds a training that was started otherwise: {key}",
                got=wanted[key],
                expected=found.settings.get(key),
                do="repeat its settings, or name another folder with --out",
            )
        return found
