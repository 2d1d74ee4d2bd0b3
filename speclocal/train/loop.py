"""The training: batches, steps, held-out loss, checkpoints. The same for every objective and backend."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from speclocal.core.interfaces import Gradients, Ops
from speclocal.errors import ModelError
from speclocal.train.batches import Reader, plan, split
from speclocal.train.checkpoint import Checkpoint
from speclocal.train.material import Objective, Outcome, Params, Rows
from speclocal.train.optimizer import AdamW
from speclocal.train.states import States
from speclocal.train.store import Store

CURVE = "curve.jsonl"


@dataclass(frozen=True)
class Plan:
    """passes: how often each text is seen. rows: most rows of a batch, padding included. longest: rows used of a text.
    held_out: share of the texts that only measures. save: seconds between checkpoints.
    """

    passes: float = 5.0
    rows: int = 1024
    longest: int = 1024
    held_out: float = 0.03
    save: float = 60.0
    seed: int = 0
    optimizer: AdamW = field(default_factory=AdamW)


@dataclass(frozen=True)
class Progress:
    """What a training tells while it runs.

    step, steps: done and planned. loss: of the last batches. acceptance: share of drafts that are the target's
    likeliest token, by position, where all before them are. rows: trained so far.
    """

    step: int
    steps: int
    loss: float
    acceptance: tuple[float, ...]
    rows: int


class Training:
    """One run in a folder, which may go on from a checkpoint there."""

    def __init__(
        self,
        ops: Ops,
        gradients: Gradients,
        objective: Objective,
        store: Store,
        states: States,
        plan: Plan,
        folder: Path,
        about: Mapping[str, Any],
    ):
        self._ops, self._gradients, self._objective, self._plan = ops, gradients, objective, plan
        self._folder = folder
        self._reader = Reader(store, states, plan.longest)
        self._lengths = [self._reader.length(text) for text in store.texts]
        train, self.held_out_texts = split(len(store.texts), plan.held_out, plan.seed)
        self._train = train
        self.settings = {**about, **{k: v for k, v in asdict(plan).items() if k != "save"}, "texts": len(store.texts)}
        self._epochs: dict[int, list[list[int]]] = {}
        self._size = len(self._epoch(0))
        self.steps = max(1, round(plan.passes * self._size))
        folder.mkdir(parents=True, exist_ok=True)
        saved = Checkpoint.read(folder, self.settings)
        self.step, self.rows = 0, 0
        if saved is None:
            self.params = self._up(objective.initial(plan.seed))
            self._state = plan.optimizer.start(self.params)
        else:
            self.step = saved.step
            self.params, *moments = (self._up(_part(saved.tensors, kind)) for kind in "pmv")
            self._state = dict(zip("mv", moments, strict=True))
        self._curve = _open_curve(folder / CURVE, self.step)

    def _up(self, tensors: Mapping[str, np.ndarray]) -> Params:
        """On the device, in an order that is the same after a resume: sums over all tensors depend on it."""
        return {name: self._gradients.array(tensors[name]) for name in sorted(tensors)}

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            self._epochs = {epoch: plan(self._lengths, self._train, self._plan.rows, self._plan.seed, epoch)}
        return self._epochs[epoch]

    def _batch(self, step: int) -> list[int]:
        """Epochs differ in their number of batches by a few; the first one's counts."""
        batches = self._epoch(step // self._size)
        return batches[step % self._size % len(batches)]

    def run(self, tell: Callable[[Progress], None], stop: Callable[[], bool] = lambda: False) -> None:
        """To the last step, or until `stop` says so between two steps; a checkpoint is written either way."""
        saved = monotonic()
        try:
            while self.step < self.steps and not stop():
                tell(self._advance())
                if monotonic() - saved > self._plan.save:
                    self.save()
                    saved = monotonic()
        finally:
            self.save()

    def _advance(self) -> Progress:
        share = self.step / self.steps
        rate = self._plan.optimizer.rate_at((self.step + 1) / self.steps)
        rows = self._reader.rows(self._batch(self.step))

        def loss(params: Params) -> tuple[Any, Outcome]:
            outcome = self._objective.loss(params, rows, share)
            return outcome.total, outcome

        outcome, grads = self._gradients.of(loss, self.params)
        params, state, norm = self._plan.optimizer.step(
            self._ops.xp, self.params, grads, self._state, self.step + 1, rate
        )
        self._gradients.done(*params.values(), *state["m"].values(), *state["v"].values())
        total, norm, losses, hits = self._measures(outcome, norm)
        if not np.isfinite([total, norm]).all():
            raise ModelError(
                f"the loss is no number any more at step {self.step + 1}",
                got=f"loss {total}, gradients {norm}",
                do="take a lower --rate, and --resume from the last good step",
            )
        accepted = acceptance(hits, outcome.at)
        line = {
            "step": self.step + 1,
            "loss": total,
            "losses": losses,
            "norm": norm,
            "rate": rate,
            "acceptance": accepted,
        }
        self._curve.write(json.dumps(line) + "\n")
        self._curve.flush()
        # The line first: one too many is cut off by a resume, one too few would be missing for good.
        self.params, self._state, self.step = params, state, self.step + 1
        self.rows += rows.real
        return Progress(self.step, self.steps, total, tuple(accepted), self.rows)

    def _measures(self, outcome: Outcome, norm: Any) -> tuple[float, float, list[float], list[np.ndarray]]:
        """All numbers of a step in one wait."""
        count = len(outcome.losses)
        got = self._ops.to_host(outcome.total, norm, *outcome.losses, *outcome.hits)
        return got[0], got[1], got[2 : 2 + count], [np.asarray(hit, bool) for hit in got[2 + count :]]

    def held_out(self) -> Iterator[Rows]:
        """Batches of the texts held out."""
        for numbers in plan(self._lengths, self.held_out_texts, self._plan.rows, self._plan.seed, 0):
            yield self._reader.rows(numbers)

    def evaluate(self) -> tuple[float, list[float]]:
        """Loss and acceptance by position on the texts held out."""
        weights, totals = 0, 0.0
        right: list[int] = []
        seen: list[int] = []
        for rows in self.held_out():
            outcome = self._objective.loss(self.params, rows, 1.0)
            total, _, _, hits = self._measures(outcome, outcome.total)
            totals, weights = totals + total * rows.real, weights + rows.real
            for s, (hit, count) in enumerate(chains(hits, outcome.at)):
                if s == len(right):
                    right.append(0)
                    seen.append(0)
                right[s], seen[s] = right[s] + hit, seen[s] + count
        return totals / max(weights, 1), [r / max(c, 1) for r, c in zip(right, seen, strict=True)]

    def save(self) -> None:
        """Write a checkpoint."""
        os.fsync(self._curve.fileno())
        parts = {"p": self.params, "m": self._state["m"], "v": self._state["v"]}
        tensors = {
            f"{kind}.{name}": self._gradients.numpy(value)
            for kind, part in parts.items()
            for name, value in part.items()
        }
        Checkpoint(self.step, tensors, self.settings).write(self._folder)

    def numpy(self) -> dict[str, np.ndarray]:
        """The trained tensors."""
        return {name: self._gradients.numpy(value) for name, value in self.params.items()}


def chains(hits: Sequence[np.ndarray], at: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """For each position: right drafts, and drafts, both only where all earlier ones were right."""
    out, alive = [], None
    for hit, row in zip(hits, at, strict=True):
        fine = np.ones(len(row), bool) if alive is None else np.isin(row, alive)
        out.append((int((hit & fine).sum()), int(fine.sum())))
        alive = row[hit & fine]
    return out


def acceptance(hits: Sequence[np.ndarray], at: Sequence[np.ndarray]) -> list[float]:
    """Conditional acceptance by position."""
    return [hit / count if count else 0.0 for hit, count in chains(hits, at)]


def _part(tensors: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    return {name[2:]: value for name, value in tensors.items() if name[0] == kind}


def _open_curve(path: Path, step: int) -> Any:
    """The curve up to a step; what a killed run wrote after its last checkpoint is written again."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:
            break
    part = path.with_name(path.name + ".part")
    part.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    os.replace(part, path)
    return path.open("a", encoding="utf-8")
