"""The golden drafter heads: config, headers of the tensors, tables, and facts of the target."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from speclocal.core.heads import EagleSpec, MedusaSpec, Overrides, Spec, TargetFacts, identify
from tests.conftest import GOLDEN

HEADS = GOLDEN / "heads"
FILES = ("model.safetensors", "medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
SMALL, LARGE = TargetFacts(layers=4, hidden=64, vocab=128), TargetFacts(layers=8, hidden=64, vocab=128)


@dataclass
class HeadFile:
    """A head's files, free to be spoilt by a test."""

    config: dict[str, Any]
    tensors: dict[str, tuple[list[int], str]]
    target: TargetFacts

    def identify(self, *overrides: Any) -> tuple[Spec, dict[str, str]]:
        return identify(self.config, self.tensors, self.target, *overrides)


def head_file(name: str) -> HeadFile:
    """A fresh copy of what a golden folder says."""
    config = json.loads((HEADS / name / "config.json").read_text())
    target = SMALL if name in ("eagle1", "eagle2", "eagle2-llama3") or name.startswith("medusa") else LARGE
    return HeadFile(config, {key: (list(shape), kind) for key, (shape, kind) in _headers(name).items()}, target)


def weights(name: str) -> Path:
    return next(path for file in FILES if (path := HEADS / name / file).is_file())


@cache
def _headers(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    path = weights(name)
    if path.suffix == ".safetensors":
        with safe_open(path, "numpy") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
            return {key: (tuple(each.get_shape()), each.get_dtype()) for key, each in slices.items()}
    torch = pytest.importorskip("torch")
    kinds = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    return {key: (tuple(each.shape), kinds[each.dtype]) for key, each in _pickled(path).items()}


def table(name: str, key: str) -> list[int]:
    """A stored table of numbers, as a list."""
    path = weights(name)
    if path.suffix == ".safetensors":
        with safe_open(path, "numpy") as file:
            return file.get_tensor(key).tolist()
    return _pickled(path)[key].tolist()


def _pickled(path: Path) -> dict[str, Any]:
    return pytest.importorskip("torch").load(path, weights_only=True)


def eagle(file: HeadFile, *overrides: Overrides) -> EagleSpec:
    """The head, which is of an EAGLE kind."""
    spec, _ = file.identify(*overrides)
    assert isinstance(spec, EagleSpec)
    return spec


def with_config(name: str = "eagle3", **changes: Any) -> HeadFile:
    """A golden head whose config.json says something else."""
    file = head_file(name)
    file.config |= changes
    return file


def with_layer(name: str = "eagle3-speculators", **changes: Any) -> HeadFile:
    file = head_file(name)
    file.config["transformer_layer_config"] |= changes
    return file


def said(spec: EagleSpec | MedusaSpec, words: str) -> bool:
    """Whether a notice has these words."""
    return any(words in notice for notice in spec.notices)


@cache
def cases(name: str) -> dict[str, Any]:
    """`meta` and `cases` of a golden folder."""
    return json.loads((HEADS / name / "cases.json").read_text())


@cache
def arrays(name: str) -> dict[str, np.ndarray]:
    """The tensors that belong to the cases."""
    return load_file(HEADS / name / "cases.safetensors")


def stored_rounds(name: str) -> dict[int, list[str]]:
    """For each case the start of its tensors' names in every round that is stored, in order from the first round."""
    found: dict[int, list[str]] = {}
    for case in range(len(cases(name)["cases"])):
        starts = [f"case{case}.round{r}." for r in range(3)]
        kept = list(takewhile(lambda start: any(key.startswith(start) for key in arrays(name)), starts))
        found |= {case: kept} if kept else {}
    return found


def as_safetensors(name: str, place: Path) -> Path:
    """A folder with the head's weights in safetensors: the golden one, or `place` where they are in a pickle."""
    if weights(name).suffix == ".safetensors":
        return HEADS / name
    held = {key: tensor.numpy().copy() for key, tensor in _pickled(weights(name)).items()}
    save_file(held, place / "model.safetensors")
    return place


def target_folder(name: str) -> Path:
    """The target of a head: of Medusa-2 the folder itself."""
    own = HEADS / name / "target"
    return own if own.is_dir() else HEADS / name


def without_heads(name: str, place: Path) -> Path:
    """A folder with the target alone: that of Medusa-2 holds the heads as well."""
    folder = target_folder(name)
    if folder != HEADS / name:
        return folder
    held = load_file(folder / "model.safetensors")
    save_file({key: t for key, t in held.items() if "medusa" not in key}, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    return place
