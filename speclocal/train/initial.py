"""The tensors before the first step: those of a trained head, or what fits from the target and the rest random."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from speclocal.checks import head_files, stored_tensors
from speclocal.core.eagle_layout import tensors_of
from speclocal.core.head_spec import EagleSpec
from speclocal.core.heads import identify
from speclocal.errors import ModelError
from speclocal.heads import HeadFiles
from speclocal.train.material import Material
from speclocal.train.tensors import read
from speclocal.train.vocabulary import DraftVocabulary

SPREAD = 0.02
NEARLY = 0.005
"""Spread of `fc`, which is nearly a selection."""
TABLES = ("d2t", "t2d")


def eagle_tensors(spec: EagleSpec, material: Material, vocabulary: DraftVocabulary, seed: int) -> dict[str, np.ndarray]:
    """An EAGLE-3 or P-EAGLE head: `fc` hands on the last state it reads, the output rows are the target's.

    Measured on the default model (80,000 rows, one step): held-out loss 4.5 so, 4.9 with `fc` as a mean of the states,
    and 5.0 with the layer copied from the target's last one.
    """
    draw = np.random.default_rng(seed)
    out: dict[str, np.ndarray] = {}
    for name, wanted in tensors_of(spec).items():
        if name in TABLES:
            continue
        spread = NEARLY if name == "fc.weight" else SPREAD
        ones = len(wanted.shape) == 1 and name.endswith("norm.weight")
        if ones:
            out[name] = np.ones(wanted.shape, np.float32)
        else:
            out[name] = spread * draw.standard_normal(wanted.shape, np.float32)
    same = spec.hidden == spec.target_hidden
    if spec.fc and same:
        out["fc.weight"][:, -spec.hidden :] += np.eye(spec.hidden, dtype=np.float32)
    if spec.own_head and same:
        out["lm_head.weight"] = material.numpy(material.output_rows(vocabulary.ids.tolist())).astype(np.float32)
        _copy(out, "norm.weight", "model.norm.weight", material)
    if spec.own_embedding and same:
        every = material.array(np.arange(spec.vocab, dtype=np.int32))
        out["embed_tokens.weight"] = material.numpy(material.embed(every)).astype(np.float32)
    return out


def head_tensors(
    folder: Path, spec: EagleSpec, material: Material, vocabulary: DraftVocabulary
) -> dict[str, np.ndarray]:
    """Those of a trained head, for states divided by their usual size; ModelError if it is no such head.

    Of its output rows those are taken that are in this draft vocabulary; the others are the target's.
    """
    head = HeadFiles.read(folder, str(folder))
    found, names = identify(head.config, head.tensors, material.facts)
    if not isinstance(found, EagleSpec) or spec != replace(
        found, draft_vocab=spec.draft_vocab, mapped=spec.mapped, suggested_depth=spec.suggested_depth, notices=()
    ):
        raise ModelError(f"{folder} is no head to begin with: it is built otherwise", do="begin without it")
    files = head_files(folder)
    stored = {names[key]: read(path, key) for path in files for key in stored_tensors([path]) if key in names}
    out = {name: np.asarray(stored[name], np.float32) for name in tensors_of(spec) if name not in TABLES}
    out["fc.weight"] = out["fc.weight"] * np.concatenate(material.scales[:-1])[None]
    ids = np.arange(found.draft_vocab) + (stored["d2t"] if found.mapped else 0)
    place = vocabulary.place[ids]
    rows = np.array(material.numpy(material.output_rows(vocabulary.ids.tolist())), np.float32)
    rows[place[place >= 0]] = out["lm_head.weight"][place >= 0]
    return out | {"lm_head.weight": rows}


def _copy(out: dict[str, np.ndarray], name: str, source: str, material: Material) -> None:
    """Where the target has the tensor in the same shape."""
    try:
        found = material.weights(source)
    except LookupError:
        return
    if found.shape == out[name].shape:
        out[name] = found.astype(np.float32)
