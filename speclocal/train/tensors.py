"""Safetensors in bfloat16, which numpy does not have: read as float32, written rounded to the nearest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open

DType = Literal["bfloat16", "float32", "float16"]
SPELLED = {"float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "bool": "BOOL"}


def write(path: Path, tensors: Mapping[str, np.ndarray], dtype: DType = "bfloat16") -> None:
    """A safetensors file, whole or not at all; tables of whole numbers and truth values keep their type."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    # Wide types first, so that every tensor stands at a multiple of its type's size.
    for name in sorted(tensors, key=lambda name: (-_width(tensors[name], dtype), name)):
        kind, data = _stored(np.asarray(tensors[name]), dtype)
        header[name] = {"dtype": kind, "shape": list(data.shape), "data_offsets": [end, end + data.nbytes]}
        parts.append(data)
        end += data.nbytes
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for data in parts:
            file.write(np.ascontiguousarray(data).tobytes())
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def _width(values: np.ndarray, dtype: DType) -> int:
    if values.dtype.kind != "f":
        return values.dtype.itemsize
    return 4 if dtype == "float32" else 2


def _stored(values: np.ndarray, dtype: DType) -> tuple[str, np.ndarray]:
    """Type as safetensors spells it, and what is written."""
    if values.dtype.kind != "f":
        return SPELLED[values.dtype.name], values
    if dtype == "bfloat16":
        return "BF16", to_bfloat16(values)
    return SPELLED[dtype], values.astype(dtype)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits [...] uint16 of the nearest bfloat16 numbers; of two equally near ones the even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    quiet = (bits >> 16) | 0x40  # rounding a NaN would make it a number
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The numbers of bits [...] uint16, float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read(path: Path, name: str) -> np.ndarray:
    """A tensor of a safetensors file, float32 if it is bfloat16. LookupError if it is not there."""
    with safe_open(path, "np") as file:
        if name not in file.keys():  # noqa: SIM118 (no mapping)
            raise LookupError(name)
        part = file.get_slice(name)
        if part.get_dtype() != "BF16":
            return np.asarray(file.get_tensor(name))
        shape = part.get_shape()
    with path.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
        first, end = json.loads(raw.read(size))[name]["data_offsets"]
        raw.seek(8 + size + first)
        return from_bfloat16(np.frombuffer(raw.read(end - first), np.uint16)).reshape(shape)
