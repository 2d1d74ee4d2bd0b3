"""The end of a training: measured on the texts held out, written as it is published, described on a card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from speclocal.heads import ORIGIN
from speclocal.train.card import Card, write_card
from speclocal.train.loop import Training
from speclocal.train.material import Calibrated, Objective
from speclocal.train.published import name_target, write
from speclocal.train.store import Store
from speclocal.train.tensors import DType

FOLDER = "result"
PRECISION: DType = "bfloat16"


@dataclass(frozen=True)
class Result:
    """folder: what was written. loss, acceptance: on the texts held out; drafts that are right, by position, where all
    before them are."""

    folder: Path
    loss: float
    acceptance: tuple[float, ...]


@dataclass(frozen=True)
class Origin:
    """What a card says of a training.

    method, target, revision: what was trained for which model. command: that did it. settings: lines of text.
    """

    method: str
    target: str
    revision: str | None
    precision: str
    backend: str
    command: str
    prompts: str
    settings: Sequence[str]


def write_result(out: Path, origin: Origin, training: Training, objective: Objective, store: Store) -> Result:
    """Weights in bfloat16, config.json and README.md in `out`/result."""
    loss, acceptance = training.evaluate()
    if isinstance(objective, Calibrated):
        objective.calibrate(training.params, training.held_out())
    tensors, config = objective.files(training.numpy())
    config[ORIGIN] = {"target": origin.target, "revision": origin.revision, "precision": origin.precision}
    folder = out / FOLDER
    own = sum(len(text.ids) - text.own for text in store.texts)
    text = write_card(
        Card(
            method=origin.method,
            target=origin.target,
            revision=origin.revision or "",
            data=f"{len(store.texts):,} texts of {own:,} tokens that the target wrote itself ({origin.prompts})",
            held_out=len(training.held_out_texts),
            precision=f"trained in {origin.precision} on {origin.backend}, written in {PRECISION}",
            settings=tuple(origin.settings),
            command=origin.command,
            loss=loss,
            acceptance=tuple(acceptance),
            parameters=sum(value.size for value in tensors.values() if value.dtype.kind == "f"),
            version=version("speclocal"),
        )
    )
    write(folder, tensors, name_target(config, origin.target), PRECISION)
    (folder / "README.md").write_text(text, encoding="utf-8")
    return Result(folder, loss, tuple(acceptance))
