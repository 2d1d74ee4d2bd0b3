"""Draft modules that read the target, as torch modules: EAGLE and P-EAGLE, Medusa."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from speclocal.backends.torch.heads.eagle import EagleHead
from speclocal.backends.torch.heads.medusa import MedusaHeads
from speclocal.backends.torch.target import TorchTarget
from speclocal.core.heads import EagleSpec, MedusaSpec, check_map


def load(
    folder: Path, spec: EagleSpec | MedusaSpec, names: Mapping[str, str], target: TorchTarget
) -> EagleHead | MedusaHeads:
    """The head in a folder's safetensors files.

    spec, names: what `core.heads.identify` found. Weights take the target's number type, tables keep theirs.
    """
    stored = read(folder, names)
    if isinstance(spec, MedusaSpec):
        return MedusaHeads(spec, _cast(stored, target.dtype), target)
    offsets, marks = stored.pop("d2t", None), stored.pop("t2d", None)
    ids = None
    if spec.mapped and offsets is not None:
        dtype = str(offsets.dtype).removeprefix("torch.")
        ids = check_map(offsets.tolist(), dtype, spec, None if marks is None else marks.bool().tolist())
    return EagleHead(spec, _cast(stored, target.dtype), ids, target)


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
