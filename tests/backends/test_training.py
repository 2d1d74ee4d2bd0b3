"""A head is trained on a tiny target's own texts: the loss falls, and whatever interrupts it changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speclocal.core.head_spec import FEATURE
from speclocal.errors import ModelError, UsageError
from speclocal.train import loop
from speclocal.train.checkpoint import Checkpoint
from speclocal.train.jobs import Job
from speclocal.train.loop import CURVE, Progress, Training
from speclocal.train.material import gather
from speclocal.train.specs import usual_taps
from speclocal.train.states import Recomputed, Stored
from speclocal.train.store import Store
from speclocal.train.writing import Limits, Writer
from tests.backends import broken_resumes, trainings
from tests.backends.folders import model_folder
from tests.backends.play import ids
from tests.backends.test_writing import TURNS, VOCAB
from tests.backends.trainings import ignore, training

LAYERS = 4
ROUNDING = 5e-3
"""Of losses, relative: states of a text alone and side by side differ in the last digits, and float16 rounds them."""


@pytest.fixture(scope="module")
def place(lab, tmp_path_factory) -> SimpleNamespace:
    """The target, the texts it wrote, and files to train from."""
    folder, name = tmp_path_factory.mktemp("training"), lab.__name__.rpartition("_")[2]
    model = model_folder(lab, folder / "model", vocab_size=VOCAB, num_hidden_layers=LAYERS, eos_token_id=2)
    target = lab.load(model, dtype="float32", device="cpu")
    gradients, batch = import_module(f"speclocal.backends.{name}").load_training(target)
    taps = (*usual_taps(LAYERS), FEATURE)
    target.tap(taps)
    store = Store(folder / "data", {}, taps, target.facts.hidden)
    limits = Limits(answer=24, slots=8, answer_temperatures=(0.0, 0.3))
    writer = Writer(target.ops, batch(8), gradients.numpy, TURNS, limits, store, lambda tokens: None, 8)
    prompts = [ids(3, seed=n % 8, vocab=VOCAB) for n in range(24)]
    writer.run((Job(n, tuple(prompt), asks=False) for n, prompt in enumerate(prompts)), lambda: False)
    material = gather(store, Stored(store), target, gradients, model, 10**6, 0)
    trainings.keep(folder, material)
    return SimpleNamespace(folder=folder, name=name, store=store, batch=batch, gradients=gradients, material=material)


def curve(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / CURVE).read_text().splitlines()]


def losses(out: Path) -> np.ndarray:
    return np.array([line["loss"] for line in curve(out)])


def make(place: SimpleNamespace, out: Path, **changes: Any) -> Training:
    return training(place.folder, place.name, out, **changes)


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory) -> tuple[Path, Training]:
    """One training without interruption."""
    out = tmp_path_factory.mktemp("whole")
    made = make(place, out)
    first, _ = made.evaluate()
    made.run(ignore)
    made.first = first
    return out, made


def test_the_loss_falls(whole):
    out, made = whole
    lines = curve(out)
    assert [line["step"] for line in lines] == list(range(1, made.steps + 1))
    assert made.steps >= 20
    last, shares = made.evaluate()
    assert last < 0.9 * made.first, "on texts that were held out"
    assert len(shares) == trainings.SETTINGS.steps
    # The number of unrolled steps grows, so the first one's loss is what can be compared.
    begin, end = (np.mean([line["losses"][0] for line in part]) for part in (lines[:5], lines[-5:]))
    assert end < 0.8 * begin
    assert all(0 <= share <= 1 for line in lines for share in line["acceptance"])


def test_weights_from_folder_material_agree_with_kept_ones(place, whole, tmp_path):
    """The files stand for the target: through the target itself the first steps are the same but for rounding."""
    objective = import_module("speclocal.train.objectives.eagle3").make(trainings.SETTINGS, place.material)
    plan = replace(trainings.PLAN, passes=trainings.PLAN.passes)
    made = Training(
        place.material.ops, place.gradients, objective, place.store, Stored(place.store), plan, tmp_path, {"x": 1}
    )
    made.run(ignore, lambda: made.step >= 2)
    assert np.allclose(losses(tmp_path), losses(whole[0])[:2], rtol=ROUNDING)


def interrupted(place: SimpleNamespace, out: Path, stops: tuple[int, ...]) -> None:
    """Stopped at these steps and resumed each time, in the end to the last step."""
    for stop in (*stops, 10**9):
        made = make(place, out)
        made.run(ignore, lambda made=made, stop=stop: made.step >= stop)


def same_curve(a: Path, b: Path) -> bool:
    return (a / CURVE).read_bytes() == (b / CURVE).read_bytes()


def test_stopped_and_resumed(place, whole, tmp_path):
    interrupted(place, tmp_path, (1, 7, 8))
    assert same_curve(tmp_path, whole[0])
    found, wanted = make(place, tmp_path).numpy(), whole[1].numpy()
    assert all(np.array_equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("broken", broken_resumes.ALL)
def test_broken_resumes_are_seen(place, whole, tmp_path, monkeypatch, broken: Callable[[Any], None]):
    broken(monkeypatch)
    interrupted(place, tmp_path, (7,))
    assert not same_curve(tmp_path, whole[0])


def test_killed_and_resumed(place, tmp_path):
    """SIGKILL between steps, without and after a checkpoint, and in the middle of writing one."""
    deaths: list[dict[str, Any]] = [
        {"step": 4, "where": "step"},
        {"step": 6, "where": "step", "saves": 5},
        {"step": 7, "where": "part"},
        {"step": 9, "where": "part", "saves": 2},
        {"step": 11, "where": "replace", "saves": 3},
    ]
    killed, alone = str(tmp_path / "killed"), str(tmp_path / "alone")
    scenarios = [*({"out": killed, **death} for death in deaths), {"out": killed}, {"out": alone}]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.trainings", place.folder, place.name, json.dumps(scenarios)],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(deaths) + ["0", "0"], done.stderr
    assert same_curve(tmp_path / "killed", tmp_path / "alone")
    assert len(curve(tmp_path / "killed")) >= 20
    assert Checkpoint.read(tmp_path / "killed", make(place, tmp_path / "x").settings).step == len(
        curve(tmp_path / "alone")
    )


def test_a_torn_curve_is_mended(place, whole, tmp_path):
    """Lines after the checkpoint, and half a line, are written again."""
    made = make(place, tmp_path)
    made.run(ignore, lambda: made.step >= 5)
    with (tmp_path / CURVE).open("a") as file:
        file.write('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    make(place, tmp_path).run(ignore)
    assert same_curve(tmp_path, whole[0])


def test_the_seed_decides(place, whole, tmp_path):
    make(place, tmp_path / "same").run(ignore)
    assert same_curve(tmp_path / "same", whole[0])
    other = make(place, tmp_path / "other", seed=1)
    other.run(ignore, lambda: other.step >= 3)
    assert not np.allclose(losses(tmp_path / "other"), losses(whole[0])[:3], rtol=ROUNDING)


def test_recomputed_states_give_the_same_losses(place, whole, tmp_path):
    made = make(place, tmp_path, states=lambda store: Recomputed(store, place.batch, place.gradients))
    made.run(ignore, lambda: made.step >= 8)
    assert np.allclose(losses(tmp_path), losses(whole[0])[:8], rtol=ROUNDING)


class Rolled(Recomputed):
    """Every row has the states of the one before."""

    def of(self, numbers: Any, rows: Any) -> list[np.ndarray]:
        return [np.roll(each, 1, 0) for each in super().of(numbers, rows)]


def test_other_states_are_seen(place, whole, tmp_path):
    made = make(place, tmp_path, states=lambda store: Rolled(store, place.batch, place.gradients))
    made.run(ignore, lambda: made.step >= 8)
    assert not np.allclose(losses(tmp_path), losses(whole[0])[:8], rtol=ROUNDING)


def test_ctrl_c_between_steps_leaves_a_checkpoint(place, whole, tmp_path):
    def tell(progress: Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    made = make(place, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        made.run(tell)
    found = Checkpoint.read(tmp_path, made.settings)
    assert found is not None
    assert found.step == 5 == len(curve(tmp_path))
    make(place, tmp_path).run(ignore)
    assert same_curve(tmp_path, whole[0])


def test_ctrl_c_within_a_step_loses_no_line(place, whole, tmp_path, monkeypatch):
    """Impatient: pressed while a step's line is written."""
    dumps = json.dumps

    def press(value: Any, **more: Any) -> str:
        if isinstance(value, dict) and value.get("step") == 5:
            raise KeyboardInterrupt
        return dumps(value, **more)

    made = make(place, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "json", SimpleNamespace(dumps=press, loads=json.loads))
        with pytest.raises(KeyboardInterrupt):
            made.run(ignore)
    make(place, tmp_path).run(ignore)
    assert same_curve(tmp_path, whole[0])


def test_other_settings_are_refused_on_resume(place, tmp_path):
    made = make(place, tmp_path)
    made.run(ignore, lambda: made.step >= 1)
    with pytest.raises(UsageError, match="started otherwise: rows"):
        make(place, tmp_path, rows=64)
    make(place, tmp_path, save=1.0)


def test_a_loss_that_is_no_number_ends_the_training_and_spoils_nothing(place, whole, tmp_path, monkeypatch):
    objective = import_module("speclocal.train.objectives.eagle3").Objective
    real = objective.loss

    def broken(self: Any, params: Any, rows: Any, progress: float) -> Any:
        outcome = real(self, params, rows, progress)
        return replace(outcome, total=outcome.total * float("nan")) if made.step == 4 else outcome

    made = make(place, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(objective, "loss", broken)
        with pytest.raises(ModelError, match="no number any more at step 5"):
            made.run(ignore)
    make(place, tmp_path).run(ignore)
    assert same_curve(tmp_path, whole[0])
