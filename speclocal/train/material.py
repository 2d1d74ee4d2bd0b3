"""What objectives work with: arrays of one batch, and what they may ask of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from speclocal.core.head_spec import TargetFacts
from speclocal.core.interfaces import Array, Ops

Params = dict[str, Array]
"""Trained tensors by the name they have in the file."""


@dataclass(frozen=True)
class Rows:
    """Texts side by side, padded behind their ends to the longest; B texts of S rows.

    Row i holds the target's states at token i and the token after it.

    tokens: [B, S] int32, token i + 1. states: [B, S, E, H] float16. best: [B, S] int32, the target's likeliest token
    after token i, -1 where it was not kept. own: [B, S] bool, the target wrote token i + 1 (so its law there counts).
    """

    tokens: np.ndarray
    states: np.ndarray
    best: np.ndarray
    own: np.ndarray

    @property
    def real(self) -> int:
        """Rows that are not padding."""
        return int((self.tokens >= 0).sum())


@dataclass(frozen=True)
class Material:
    """The target as an objective sees it.

    config: its text config. taps: points whose states are kept, `head_spec.FEATURE` last. counts: [V] how often it
    wrote each token. weights: tensors of its files by name, read when asked for; LookupError for one that is not there.
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
    scales: np.ndarray
    """[E, H] typical size of every number of the states."""

    def output_rows(self, ids: Sequence[int]) -> Array:
        """[n, H] rows of the output matrix, found by asking what it makes of unit vectors."""
        hidden, index = self.facts.hidden, self.array(np.asarray(ids, np.int32))
        made = []
        for first in range(0, hidden, 64):
            unit = np.eye(hidden, dtype=np.float32)[first : first + 64]
            made.append(self.unembed(self.array(unit))[:, index])
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
