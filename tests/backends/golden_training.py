"""Golden heads and their targets as training sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from speclocal.core.heads import FEATURE
from speclocal.core.interfaces import Target
from speclocal.train.material import Material, Params
from speclocal.train.vocabulary import DraftVocabulary
from tests.backends.bench_heads import Bench
from tests.core.golden_heads import as_safetensors, head_file, target_folder

VOCAB = 128
TOLERANCE = 2e-6
"""Relative."""
SHOWS = 50 * TOLERANCE


def to_numpy(array: Any) -> np.ndarray:
    return np.array(array.tolist())


def material(target: Target, name: str, taps: tuple[int, ...], **changes: Any) -> Material:
    """The target of a golden folder. States are as they are: their scales are 1."""
    held = load_file(target_folder(name) / "model.safetensors")

    def weights(key: str) -> np.ndarray:
        return held[key]

    fields = {
        "ops": target.ops,
        "facts": target.facts,
        "config": {},
        "taps": (*taps, FEATURE),
        "counts": np.ones(VOCAB, np.int64),
        "embed": target.embed,
        "unembed": target.unembed,
        "weights": weights,
        "array": target.ops.array,
        "numpy": to_numpy,
        "lend": target.output_rows,
        "scales": np.ones((len(taps) + 1, target.facts.hidden), np.float32),
    }
    return Material(**{**fields, **changes})


def states_of(target: Target, texts: np.ndarray, taps: tuple[int, ...]) -> np.ndarray:
    """The target's states [B, S, E, H] and the feature, over texts [B, S]."""
    target.tap((*taps, FEATURE))
    found = []
    for text in texts.tolist():
        target.prefill([])
        found.append(to_numpy(target.prefill(text).taps))
    return np.stack(found).astype(np.float32)


def trained(bench: Bench, name: str, place: Path) -> tuple[Params, DraftVocabulary]:
    """The tensors of a golden head by normalised name, on the device, and its draft vocabulary."""
    file = head_file(name)
    _, names = file.identify()
    folder = as_safetensors(name, place)
    array = bench.target(name).ops.array
    files = [path for path in folder.glob("*.safetensors") if path.stem in ("model", "medusa_lm_head")]
    held = {names[old]: value for path in files for old, value in load_file(path).items() if old in names}
    offsets = held.pop("d2t", np.zeros(VOCAB, np.int64))
    held.pop("t2d", None)
    vocabulary = DraftVocabulary(offsets + np.arange(len(offsets)), VOCAB)
    return {key: array(value.astype(np.float32)) for key, value in held.items()}, vocabulary


def near(got: float, expected: float) -> bool:
    return abs(got - expected) <= TOLERANCE * abs(expected)


def shifted(values: np.ndarray, by: int, fill: Any) -> np.ndarray:
    """[B, S] one row later for each of `by`; earlier for a negative one."""
    out = np.full_like(values, fill)
    if by >= 0:
        out[:, by:] = values[:, : values.shape[1] - by]
    else:
        out[:, :by] = values[:, -by:]
    return out


def with_feature(states: np.ndarray, feature: np.ndarray) -> np.ndarray:
    return np.concatenate([states[..., :-1, :], feature[..., None, :]], -2)


def off(got: Any, expected: float) -> float:
    """Relative difference."""
    return abs(float(got) - expected) / abs(expected)
