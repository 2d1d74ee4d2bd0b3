"""What objectives work with: arrays of one batch, and what they may ask of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from speclocal.checks import read_json
from speclocal.core.anatomy import text_of
from speclocal.core.head_spec import TargetFacts
from speclocal.core.interfaces import Array, Gradients, Ops, Target
from speclocal.train import tensors
from speclocal.train.states import States
from speclocal.train.store import Store

Params = dict[str, Array]
"""Trained tensors by the name they have in the file."""


@dataclass(frozen=True)
class Rows:
    """Texts side by side, padded behind their ends to the longest; B texts of S rows.

    Row i holds the target's states at token i and the token after it.

    tokens: [B, S] int32, token i + 1. states: [B, S, E, H] float16. best: [B, S] int32, the target's likeliest token
    after token i, -1 where it was not kept. own: [B, S] bool, the target wrote token i + 1 (so its law there counts).
    first: [B] int32, token 0, for objectives that read the text itself.
    """

    tokens: np.ndarray
    states: np.ndarray
    best: np.ndarray
    own: np.ndarray
    first: np.ndarray | None = None

    @property
    def real(self) -> int:
        """Rows that are not padding."""
        return int((self.tokens >= 0).sum())


@dataclass(frozen=True)
class Material:
    """The target as an objective sees it.

    config: its text config. taps: points whose states are kept, `head_spec.FEATURE` last. counts: [V] how often it
    wrote each token. weights: tensors of its files by name, read when asked for; LookupError for one that is not there.
    lend: see `Target.output_rows`.
    """

    ops: Ops
    facts: TargetFacts
    config: Mapping[str, Any]
    taps: tuple[int, ...]
    counts: np.ndarray
    embed: Callable[[Array], Array]
    unembed: Callable[[Array], Array]
    weights: Callable[[str], np.ndarray]
    array: Callable[[np.ndarray], Array]
    numpy: Callable[[Array], np.ndarray]
    lend: Callable[[Array], Array | None]
    scales: np.ndarray
    """[E, H] typical size of every number of the states."""

    def output_rows(self, ids: Sequence[int]) -> Array:
        """[n, H] float32 rows of the output matrix."""
        index = self.array(np.asarray(ids, np.int32))
        rows = self.lend(index)
        return self._output[index] if rows is None else self.array(np.asarray(self.numpy(rows), np.float32))

    @cached_property
    def _output(self) -> Array:
        """The whole matrix [V, H] of a target that shows no rows: what it makes of unit vectors tells."""
        units = np.eye(self.facts.hidden, dtype=np.float32)
        made = [self.unembed(self.array(units[first : first + 64])) for first in range(0, len(units), 64)]
        return self.ops.xp.swapaxes(self.ops.xp.concat(made), 0, 1)


@dataclass(frozen=True)
class Outcome:
    """What one batch gave.

    losses: a device number for each predicted position, already weighted into `total`. hits: for each position, device
    [m] bool, whether the draft is the target's likeliest token; at: [m] flat row of each on the host.
    """

    total: Array
    losses: list[Array]
    hits: list[Array]
    at: list[np.ndarray]


class Objective(Protocol):
    """A way to train a kind of drafter. Works over `ops.xp`, so that it is the same on every backend."""

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """The tensors before the first step, float32."""

    def loss(self, params: Params, rows: Rows, progress: float) -> Outcome:
        """progress: share of the training that is done, for what changes on the way."""

    def files(self, params: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Tensors and config.json as they are published."""


@runtime_checkable
class Calibrated(Protocol):
    """An objective whose files also hold what is measured on the texts held out: Medusa's tree."""

    def calibrate(self, params: Params, held_out: Iterable[Rows]) -> None:
        """Before `files`."""


SMALLEST = 1e-3
"""Least usual size of a number."""
MEAN = 1.25
"""Root mean square of a bell curve, as a multiple of its mean size. The mean is less moved by a few huge states."""


def gather(
    store: Store, states: States, target: Target, gradients: Gradients, folder: Path, sample: int, seed: int
) -> Material:
    """The target in `folder` as an objective sees it; the usual size of its states from so many rows of the texts."""
    counts = np.zeros(target.facts.vocab, np.int64)
    for text in store.texts:
        np.add.at(counts, list(text.ids[text.own :]), 1)
    some = np.random.default_rng(seed).permutation(len(store.texts))
    seen, rows = [], 0
    for i in some:
        seen.append(states.of([i], [len(store.texts[i].ids) - 1])[0][1:].astype(np.float32))
        rows += len(seen[-1])
        if rows >= sample:
            break
    scales = np.maximum(np.abs(np.concatenate(seen)).mean(0) * MEAN, SMALLEST)
    return Material(
        ops=target.ops,
        facts=target.facts,
        config=text_of(read_json(folder / "config.json")),
        taps=store.taps,
        counts=counts,
        embed=gradients.embed,
        unembed=gradients.unembed,
        weights=lambda name: _weight(folder, name),
        array=gradients.array,
        numpy=gradients.numpy,
        lend=target.output_rows,
        scales=scales,
    )


def _weight(folder: Path, name: str) -> np.ndarray:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            return tensors.read(path, name)
        except LookupError:
            continue
    raise LookupError(name)
