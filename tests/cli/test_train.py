"""`speclocal train`: what it asks of a training, what it shows, and how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speclocal.cli.train import METHODS
from speclocal.engine import Load
from speclocal.errors import ModelError
from speclocal.train import run as module
from speclocal.train.loop import Progress
from speclocal.train.run import Task
from speclocal.ui import training as view


class Training:
    """In place of `train.run.train`: writes some texts, makes some steps, and says what it was asked."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.load: Load | None = None
        self.press = ""
        self.error: Exception | None = None

    def __call__(self, load: Load, task: Task, show: Any, downloads: Any, stop: Callable[[], bool]) -> Any:
        self.load, self.task = load, task
        if self.error:
            raise self.error
        show.note("states take 1 GiB")
        for texts in range(1, 4):
            if self.press == "writing":
                os.kill(os.getpid(), signal.SIGINT)
            show.written(texts, 3, 50 * texts)
        for step in range(1, 41):
            if self.press == "training" and step == 5:
                os.kill(os.getpid(), signal.SIGINT)
            if stop():
                return None
            show.trained(Progress(step, 40, 5.0 / step, (0.5, 0.25), 10 * step))
        return SimpleNamespace(folder=task.out / "result", loss=1.25, acceptance=(0.5, 0.25))


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    fake = Training()
    monkeypatch.setattr(module, "train", fake)
    return fake


def test_the_result_alone_on_stdout(run: Callable[..., Any], training: Training) -> None:
    result = run("train", "eagle3", "--out", "my-head")
    assert (result.exit_code, result.stdout) == (0, "my-head/result\n")
    assert "note: states take 1 GiB" in result.stderr
    assert "held-out loss 1.250; drafts that are right, by position: 50%, 25%" in result.stderr
    assert "--drafter eagle3:my-head/result" in result.stderr


def test_lines_where_there_is_no_terminal(run: Callable[..., Any], training: Training) -> None:
    """The first and the last of each part, and one now and then; no bar."""
    lines = run("train", "eagle3").stderr.splitlines()
    told = [line.partition("  ")[0] for line in lines if line.startswith(("writing", "training"))]
    assert told == ["writing texts: 1 of 3", "writing texts: 3 of 3", "training: 1 of 40", "training: 40 of 40"]
    assert any("accepted 50% 25%" in line for line in lines)
    assert not any("\x1b" in line or "━" in line or not line for line in lines)


def test_more_lines_as_time_goes_by(
    run: Callable[..., Any], training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "EVERY", 0.0)
    told = [line for line in run("train", "eagle3").stderr.splitlines() if line.startswith("training")]
    assert len(told) == 40


def test_quiet(run: Callable[..., Any], training: Training) -> None:
    result = run("train", "eagle3", "--quiet", "--out", "x")
    assert (result.stdout, result.stderr) == ("x/result\n", "")


def test_what_is_asked(run: Callable[..., Any], training: Training, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("why?\n")
    args = (
        "--texts 7 --answer-tokens 9 --slots 3 --features recompute --passes 2.5 --rate 0.01 --batch-rows 64 --seed 5"
    )
    more = ["--prompts", str(prompts), "--data", "d", "-o", "steps=2", "-o", "decay=0.9", "--target", "somewhere"]
    assert run("train", "p-eagle", *args.split(), *more, "--resume").exit_code == 0
    task = training.task
    assert task is not None
    assert (task.method, task.out, task.data, task.texts) == ("p-eagle", Path("speclocal-p-eagle"), Path("d"), 7)
    assert (task.limits.answer, task.limits.slots, task.limits.seed, task.features) == (9, 3, 5, "recompute")
    assert (task.plan.passes, task.plan.rows, task.plan.seed, task.plan.optimizer.rate) == (2.5, 64, 5, 0.01)
    assert (task.prompts, task.options, task.resume) == (prompts, {"steps": "2", "decay": "0.9"}, True)
    assert training.load is not None
    assert training.load.target == "somewhere"


@pytest.mark.parametrize("when", ["writing", "training"])
def test_ctrl_c_says_how_to_go_on(run: Callable[..., Any], training: Training, when: str) -> None:
    training.press = when
    result = run("train", "eagle3", "--out", "my-head")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "the same command with --resume goes on in my-head" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["eagle"], "'eagle' is not one of"),
        ([], "Missing argument"),
        (["eagle3", "--texts", "1"], "--texts"),
        (["eagle3", "--passes", "0"], "--passes"),
        (["eagle3", "--rate", "0"], "--rate"),
        (["eagle3", "--prompts", "not-there"], "'not-there' does not exist"),
        (["eagle3", "-o", "steps"], "steps"),
    ],
)
def test_wrong_usage(run: Callable[..., Any], training: Training, args: list[str], message: str) -> None:
    result = run("train", *args)
    assert (result.exit_code, result.stdout, training.task) == (2, "", None)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_failure_is_one_line(run: Callable[..., Any], training: Training) -> None:
    training.error = ModelError("the disk has no room", do="write fewer --texts")
    result = run("train", "eagle3")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: the disk has no room; write fewer --texts\n"


def test_help(run: Callable[..., Any]) -> None:
    text = run("train", "--help").stdout
    for section in ("Texts to learn from:", "Training:", "Model:", "Output:"):
        assert f"\n{section}" in text
    for name in ("--prompts", "--features", "--resume", "--option", "--target", *METHODS):
        assert name in text


def test_methods_are_those_that_can_be_run() -> None:
    assert set(METHODS) == set(module.METHODS)


# With the real training, which refuses before any model is touched.


def test_a_folder_that_holds_something_is_refused(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "Shop", pytest.fail)
    (tmp_path / "notes").write_text("mine")
    result = run("train", "eagle3", "--out", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{tmp_path} holds something already; go on with --resume" in result.stderr
    assert result.stderr.count("\n") == 1
    other = tmp_path / "other"
    (other / "data").mkdir(parents=True)
    (other / "curve.jsonl").write_text("")
    assert run("train", "eagle3", "--out", str(other), "--data", str(tmp_path / "shared")).exit_code == 2


def test_an_unknown_setting_is_refused(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "Shop", pytest.fail)
    result = run("train", "eagle3", "--out", str(tmp_path / "new"), "-o", "setps=3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has no setting 'setps', expected one of steps, grow" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("resume", "shared"), [(True, False), (False, True), (True, True)], ids=["resume", "data", "resume data"]
)
def test_what_may_go_on(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resume: bool, shared: bool
) -> None:
    """--resume with anything; texts of another training without it."""

    def shop(*args: Any) -> None:
        raise ModelError("far enough")

    monkeypatch.setattr(module, "Shop", shop)
    (tmp_path / "data").mkdir()
    args = ["--out", str(tmp_path if not shared else tmp_path / "new")]
    args += ["--resume"] * resume + ["--data", str(tmp_path / "data")] * shared
    assert "far enough" in run("train", "eagle3", *args).stderr
