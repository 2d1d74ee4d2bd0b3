"""Small trainings from files alone, and a program that runs some of them and kills itself at given moments.

A folder holds `data` (a store) and `target.pickle` (what an objective asks of a target, as arrays). The program imports
a framework once and runs each scenario in a process of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from speclocal.train import checkpoint
from speclocal.train.loop import Plan, Progress, Training
from speclocal.train.material import Material
from speclocal.train.objectives.eagle3 import Settings, make
from speclocal.train.optimizer import AdamW
from speclocal.train.states import States, Stored
from speclocal.train.store import Store

NORM = "model.norm.weight"
SETTINGS = Settings(steps=3, draft_vocab=48)
PLAN = Plan(passes=4, rows=128, held_out=0.2, save=3600.0, optimizer=AdamW(rate=3e-3, warmup=0.1))


def keep(folder: Path, material: Material) -> None:
    """Write what `material_of` reads."""
    vocab = np.arange(material.facts.vocab, dtype=np.int32)
    held = {
        **{name: getattr(material, name) for name in ("facts", "config", "taps", "counts", "scales")},
        "embedding": material.numpy(material.embed(material.array(vocab))),
        "weights": {NORM: material.weights(NORM)},
        "output": material.numpy(material.output_rows(vocab)),
    }
    (folder / "target.pickle").write_bytes(pickle.dumps(held))


def ops_of(name: str) -> Any:
    module = import_module(f"speclocal.backends.{name}.ops")
    return module.make_ops(import_module("torch").device("cpu")) if name == "torch" else module.make_ops()


def gradients_of(name: str) -> Any:
    device = import_module("torch").device("cpu") if name == "torch" else None
    return import_module(f"speclocal.backends.{name}.train").Gradients(SimpleNamespace(device=device))


def material_of(folder: Path, name: str) -> Material:
    """The target that was kept, on a backend."""
    held = pickle.loads((folder / "target.pickle").read_bytes())
    gradients = gradients_of(name)
    embedding, output = gradients.array(held.pop("embedding")), gradients.array(held.pop("output"))
    weights = held.pop("weights")
    return Material(
        **held,
        ops=ops_of(name),
        embed=lambda ids: embedding[ids],
        unembed=lambda hidden: hidden @ output.T,
        weights=lambda key: weights[key],
        array=gradients.array,
        numpy=gradients.numpy,
        lend=lambda ids: output[ids],
    )


def store_of(folder: Path, material: Material) -> Store:
    return Store(folder / "data", {}, material.taps, material.facts.hidden)


def training(
    folder: Path, name: str, out: Path, states: Callable[[Store], States] = Stored, **changes: Any
) -> Training:
    """A training in `out`, new or resumed. changes: of the plan."""
    material = material_of(folder, name)
    store, gradients = store_of(folder, material), gradients_of(name)
    objective = make(SETTINGS, material)
    plan = replace(PLAN, **changes)
    return Training(material.ops, gradients, objective, store, states(store), plan, out, {"method": "eagle3"})


def ignore(progress: Progress) -> None:
    pass


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_a_file(tensors: Any, path: Path, about: Any) -> None:
    path.write_bytes(b"\x40\x00\x00\x00\x00")
    die()


def run(folder: Path, name: str, out: Path, step: int = 0, where: str = "", saves: int = 10**9) -> None:
    """To the end, or to a death at this step. where: `step` between two steps; `part` while a checkpoint's new file is
    written; `replace` before it takes the place of the old one. saves: a checkpoint after so many steps."""
    made = training(folder, name, out)

    def tell(progress: Progress) -> None:
        dies = progress.step == step
        if dies and where == "part":
            checkpoint.save_file = half_a_file
        if dies and where == "replace":
            checkpoint.os = SimpleNamespace(replace=die, fsync=os.fsync)
        if dies and where == "step":
            die()
        if progress.step % saves == 0 or (dies and where):
            made.save()

    made.run(tell)


def main() -> None:
    """Arguments: folder, backend, scenarios as JSON. A line with the exit status of each."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    import_module(f"speclocal.backends.{name}.train")
    for scenario in json.loads(sys.argv[3]):
        if not (child := os.fork()):
            run(folder, name, Path(scenario.pop("out")), **scenario)
            os._exit(0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
