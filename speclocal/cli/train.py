"""`speclocal train`: fit a drafter to a target, from texts that the target writes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speclocal.cli.command import INTERRUPTED, Command, Option
from speclocal.cli.options import open_terminal, output_options, read_target, target_options
from speclocal.cli.values import Pair
from speclocal.ui.interrupt import Interrupt
from speclocal.ui.progress import DownloadBar
from speclocal.ui.training import TrainingView

if TYPE_CHECKING:
    from speclocal.train.run import Task

METHODS = ("eagle3", "p-eagle", "medusa", "draft-model")
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


def _data(*names: str, **kwargs: Any) -> Any:
    return click.option(*names, cls=Option, section="Texts to learn from", **kwargs)


def _training(*names: str, **kwargs: Any) -> Any:
    return click.option(*names, cls=Option, section="Training", show_default="default" in kwargs, **kwargs)


@click.command(cls=Command)
@click.argument("method", type=click.Choice(METHODS), metavar="METHOD")
@_data("--prompts", type=_FILE, metavar="FILE", help="Prompts, a line each or JSON lines. Without: its own questions.")
@_data("--conversations", type=_FILE, metavar="FILE", help="Conversations with the target that exist, as JSON lines.")
@_data("--openers", type=_FILE, metavar="FILE", help="First words of its own questions, a line each.")
@_data("--texts", type=click.IntRange(min=2), default=2000, show_default=True, metavar="N", help="Texts to write.")
@_data(
    "--answer-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N", help="Longest answer."
)
@_data("--slots", type=click.IntRange(min=1), default=96, show_default=True, metavar="N", help="Texts written at once.")
@_data("--data", type=_FOLDER, metavar="DIR", help="Folder of the texts, to share them.  [default: data in --out]")
@_data(
    "--features",
    type=click.Choice(["store", "recompute"]),
    default="store",
    show_default=True,
    help="Keep the target's hidden states on disk, or compute them again in every pass.",
)
@_training("--out", type=_FOLDER, metavar="DIR", help="Folder of this training.  [default: speclocal-METHOD]")
@_training("--passes", type=click.FloatRange(min=0, min_open=True), default=5.0, metavar="N", help="Over all texts.")
@_training("--rate", type=click.FloatRange(min=0, min_open=True), default=1e-3, metavar="N", help="Learning rate.")
@_training("--batch-rows", type=click.IntRange(min=1), default=1024, metavar="N", help="Tokens of a step.")
@_training("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of texts, order and first weights.")
@_training("-o", "--option", "options", type=Pair(), multiple=True, help="A setting of the objective by name.")
@_training("--resume", is_flag=True, help="Go on with what is in --out: after Ctrl-C, kill or a power cut.")
@target_options
@output_options
@click.pass_context
def train(context: click.Context, /, **params: Any) -> None:
    """Fit a drafter to the model you use, from nothing but the model. METHOD: eagle3, p-eagle, medusa, draft-model.

    The target writes questions and answers (or answers your prompts); the drafter learns to say what it would say. The
    result is a folder in the published format, with a card that states how many drafts were right on texts held out.

    \b
      speclocal train eagle3 --target smollm2-135m --out my-head
      speclocal train eagle3 --target smollm2-135m --out my-head --resume
      speclocal train medusa --target ./my-model --prompts questions.txt --data my-head/data
      speclocal chat --target smollm2-135m --drafter eagle3:my-head/result
    """
    terminal = open_terminal(context, params)
    task, load = _task(params), read_target(params)
    from speclocal.train.run import train as run

    bar = None if terminal.quiet else DownloadBar(terminal.err.console)
    with Interrupt() as interrupt, TrainingView(terminal, interrupt.check) as view:
        try:
            result = run(load, task, view, bar, lambda: interrupt.asked)
        except KeyboardInterrupt:
            result = None
    if result is None:
        terminal.note(
            f"stopped; nothing that was complete is lost: the same command with --resume goes on in {task.out}"
        )
        context.exit(INTERRUPTED)
    terminal.line(str(result.folder))
    shares = ", ".join(f"{share:.0%}" for share in result.acceptance)
    terminal.note(f"held-out loss {result.loss:.3f}; drafts that are right, by position: {shares}")
    name = {"draft-model": "draft_model", "p-eagle": "p_eagle"}.get(task.method, task.method)
    terminal.note(f"use it: speclocal chat --target {load.target} --drafter {name}:{result.folder}")


def _task(params: dict[str, Any]) -> Task:
    from speclocal.train.loop import Plan
    from speclocal.train.optimizer import AdamW
    from speclocal.train.run import Task
    from speclocal.train.writing import Limits

    method = params["method"]
    return Task(
        method=method,
        out=params["out"] or Path(f"speclocal-{method}"),
        data=params["data"],
        texts=params["texts"],
        features=params["features"],
        prompts=params["prompts"],
        conversations=params["conversations"],
        openers=params["openers"],
        options=dict(params["options"]),
        resume=params["resume"],
        limits=Limits(answer=params["answer_tokens"], slots=params["slots"], seed=params["seed"]),
        plan=Plan(
            passes=params["passes"],
            rows=params["batch_rows"],
            seed=params["seed"],
            optimizer=AdamW(rate=params["rate"]),
        ),
        command=shlex.join(["speclocal", *(arg for arg in sys.argv[1:] if arg != "--resume")]),
    )
