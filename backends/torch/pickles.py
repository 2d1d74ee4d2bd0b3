"""Weights in pickle files, rewritten as safetensors for backends that read nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import save_file
from torch import Tensor

from speclocal.errors import ModelError

SHARD = 4 * 10**9
"""Most bytes of a file, unless one tensor is larger."""
KEPT = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
INDEX = "pytorch_model.bin.index.json"


def convert(folder: Path, place: Path) -> None:
    """Write the weights of `folder` into `place` as safetensors, and copy what else a model folder holds.

    Tensors keep their names and types. Raises ModelError if a file holds more than tensors, or is no pickle of weights.
    """
    for path in folder.iterdir():
        if path.name.endswith(KEPT) and path.name != INDEX:
            shutil.copyfile(path, place / path.name)
    written: list[tuple[Path, list[str], int]] = []
    for i, (tensors, total) in enumerate(_shards(folder)):
        part = place / f"part-{i}.safetensors"
        save_file(tensors, part, metadata={"format": "pt"})
        written.append((part, list(tensors), total))
    if not written:
        raise ModelError(f"no weights in {folder.name}", expected="pytorch_model.bin or *.pt")
    if len(written) == 1:
        written[0][0].rename(place / "model.safetensors")
        return
    names: dict[str, str] = {}
    for i, (part, held, _) in enumerate(written, 1):
        final = f"model-{i:05}-of-{len(written):05}.safetensors"
        part.rename(place / final)
        names |= dict.fromkeys(held, final)
    index = {"metadata": {"total_size": sum(total for *_, total in written)}, "weight_map": names}
    (place / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(folder: Path) -> Iterator[tuple[dict[str, Tensor], int]]:
    """Tensors by name in portions of up to SHARD bytes, with the bytes of each portion."""
    held: dict[str, Tensor] = {}
    total = 0
    for path in _files(folder):
        for name, tensor in _read(path, folder).items():
            if held and total + tensor.nbytes > SHARD:
                yield held, total
                held, total = {}, 0
            # Tied weights share their memory in a pickle; a safetensors file holds each for itself.
            held[name] = tensor.clone(memory_format=torch.contiguous_format)
            total += tensor.nbytes
    if held:
        yield held, total


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights, of all pickles that may lie in a folder."""
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{INDEX} of {folder.name} is no index of shards") from error
        return [folder / name for name in sorted(names)]
    return sorted(folder.glob("pytorch_model*.bin")) or sorted(folder.glob("*.pt"))


def _read(path: Path, folder: Path) -> dict[str, Tensor]:
    refused = ModelError(f"the pickled weights of {folder.name} hold more than tensors: not opened", got=path.name)
    try:
        held = _load(path)
    except UnpicklingError as error:
        raise refused from error
    except (OSError, RuntimeError, EOFError) as error:
        raise ModelError(f"{path.name} of {folder.name} is no file of weights", got=type(error).__name__) from error
    if not isinstance(held, dict) or not all(isinstance(tensor, Tensor) for tensor in held.values()):
        raise refused
    return held


def _load(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        return torch.load(path, map_location="cpu", weights_only=True)  # the format of torch 1.5 and before
