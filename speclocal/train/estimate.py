"""What a training will take of disk and memory, said and refused beforehand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from speclocal.core.memory import size
from speclocal.errors import ModelError
from speclocal.train.writing import Limits

TYPICAL = 0.5
"""Texts are about so long, as a share of the most a question and an answer may take."""
COPIES = 6
"""Of the trained tensors: themselves, gradients, two moments, and what a step makes of them."""
SCRATCH = 2**30
"""Activations of a batch."""


def check_disk(folder: Path, texts: int, limits: Limits, row: int, note: Callable[[str], None]) -> None:
    """Say how much the states of so many more texts take, `row` bytes a token; ModelError if the disk has no room."""
    if not texts:
        return
    tokens = int(texts * (limits.question + limits.answer) * TYPICAL)
    if not row:
        note(f"about {tokens:,} tokens of text; the target's states are computed in every pass")
        return
    wanted = tokens * row
    note(f"states of about {tokens:,} tokens take {size(wanted)} in {folder}; --features recompute keeps none")
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    if wanted > free:
        raise ModelError(
            "the disk has no room for the target's states",
            got=f"{size(free)} free",
            expected=size(wanted),
            do="write fewer --texts, name another --data folder, or take --features recompute",
        )


def check_training(tensors: Mapping[str, np.ndarray], free: int, note: Callable[[str], None]) -> None:
    """Say how much memory training takes beside the target; ModelError if there is not so much."""
    count = sum(value.size for value in tensors.values())
    wanted = COPIES * 4 * count + SCRATCH
    note(f"{count / 1e6:.1f} M trained numbers: {size(wanted)} of memory, gradients and activations included")
    if wanted > free:
        raise ModelError(
            "not enough memory to train", got=f"{size(free)} free", expected=size(wanted), do="take a smaller head"
        )
