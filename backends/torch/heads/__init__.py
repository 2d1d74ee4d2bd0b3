"""Draft modules that read the target, as torch modules: EAGLE and P-EAGLE, Medusa."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from speclocal.backends.torch.heads.eagle import EagleHead
from speclocal.backends.torch.heads.medusa import MedusaHeads
from speclocal.backends.torch.target import TorchTarget
from speclocal.core.heads import EagleSpec, MedusaSpec, check_map

SPELLED = {torch.int64: "I64", torch.int32: "I32", torch.uint64: "U64", torch.uint32: "U32"}
"""Types of tables as safetensors spells them."""


def load(
    folder: Path, spec: EagleSpec | MedusaSpec, names: Mapping[str, str], target: TorchTarget
) -> EagleHead | MedusaHeads:
    """The head in a folder's safetensors files.

    spec, names: what `core.heads.identify` found. Weights take the target's number type, tables keep theirs. Raises
    ModelError if the table of draft ids is none (`core.heads.check_map`).
    """
    stored = read(folder, names)
    if isinstance(spec, MedusaSpec):
        return MedusaHeads(spec, _cast(stored, target.dtype), target)
    offsets, marks = stored.pop("d2t", None), stored.pop("t2d", None)
    dtype = "" if offsets is None else SPELLED.get(offsets.dtype, str(offsets.dtype))
    ids = check_map(_listed(offsets), dtype, spec, _listed(marks))
    return EagleHead(spec, _cast(stored, target.dtype), ids if spec.mapped else None, target)


def read(folder: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of a folder that have a normalised name, by that name."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (no mapping)
                if stored in names:
                    found[names[stored]] = tensors.get_tensor(stored)
    return found


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def _listed(table: Tensor | None) -> Any:
    return None if table is None else table.tolist()
