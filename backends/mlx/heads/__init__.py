"""Draft modules that read the target, as MLX modules: EAGLE and P-EAGLE, Medusa."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from speclocal.backends.mlx.heads.eagle import EagleHead
from speclocal.backends.mlx.heads.medusa import MedusaHeads
from speclocal.backends.mlx.target import MlxTarget
from speclocal.core.heads import EagleSpec, MedusaSpec, check_map

SPELLED = {mx.int64: "I64", mx.int32: "I32", mx.uint64: "U64", mx.uint32: "U32"}
"""Types of tables as safetensors spells them."""


def load(
    folder: Path, spec: EagleSpec | MedusaSpec, names: Mapping[str, str], target: MlxTarget
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


def read(folder: Path, names: Mapping[str, str]) -> dict[str, mx.array]:
    """The tensors of a folder that have a normalised name, by that name. Others are not read from the disk."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors: Any = mx.load(str(file))
        for stored, tensor in tensors.items():
            if stored in names:
                found[names[stored]] = tensor
    return found


def _cast(tensors: Mapping[str, mx.array], dtype: str) -> dict[str, mx.array]:
    kind = getattr(mx, dtype)
    return {name: t.astype(kind) if mx.issubdtype(t.dtype, mx.floating) else t for name, t in tensors.items()}


def _listed(table: mx.array | None) -> Any:
    return None if table is None else table.tolist()
