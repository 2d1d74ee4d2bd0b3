"""`speclocal doctor`: what this machine offers, for users and for bug reports."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil

from speclocal import __version__
from speclocal.cli.command import Command, Option, debug_option
from speclocal.cli.options import model_options, read_load, was_typed
from speclocal.errors import SpeclocalError, UsageError
from speclocal.sources import Policy, cache_folder
from speclocal.ui.progress import DownloadBar, StepBar
from speclocal.ui.terminal import Terminal

if TYPE_CHECKING:
    from speclocal.engine import Load
    from speclocal.probe import Report

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "gguf",
    "mlx",
    "mlx-lm",
    "numpy",
    "click",
    "rich",
    "prompt_toolkit",
)
BACKENDS = {"torch": ("torch", "transformers"), "mlx": ("mlx", "mlx-lm")}
"""Backend -> the distributions it needs."""


@click.command(cls=Command)
@click.option("--json", "as_json", cls=Option, section="Output", is_flag=True, help="Print one JSON object.")
@model_options
@debug_option
@click.pass_context
def doctor(context: click.Context, /, as_json: bool, **params: Any) -> None:
    """Show versions, backends, devices, memory and folders; or, with --drafter, examine a drafter head.

    A head can be read in several ways that its files do not always tell. The acceptance probe tries them on texts that
    the target writes, and says which option to type.

    \b
      speclocal doctor
      speclocal doctor --target llama-8b --drafter eagle3
    """
    terminal = Terminal()
    if was_typed(context, "target") and not was_typed(context, "drafter"):
        raise UsageError("--target without effect", do="name the head to examine too: --drafter NAME[:SOURCE]")
    if was_typed(context, "drafter"):
        from speclocal.probe import probe

        load = read_load(context, params)
        with StepBar(terminal.err.console) as bar:
            found = probe(load, terminal.note, DownloadBar(terminal.err.console), bar.step)
        show_probe(terminal, found, load, as_json)
        return
    report = examine(terminal)
    if as_json:
        terminal.json(report)
        return
    for section, facts in report.items():
        terminal.line(section)
        for name, value in facts.items():
            terminal.line(f"  {name:<18} {value}")


def show_probe(terminal: Terminal, found: Report, load: Load, as_json: bool) -> None:
    """The conventions that were tried, and what to type."""
    options = {**load.options, **found.options}
    typed = "".join(f" -o {name}={value}" for name, value in options.items())
    if as_json:
        trials = [
            {
                "convention": trial.name,
                "agreement": [round(share, 4) for share in trial.agreement],
                "log_probability": [round(trial.mean(depth), 4) for depth in range(len(trial.logs))],
            }
            for trial in found.trials
        ]
        terminal.json(
            {"head": found.head, "positions": found.positions, "trials": trials, "options": dict(found.options)}
        )
        return
    depths = len(found.trials[0].agreement)
    width = max(len("CONVENTION"), *(len(trial.name) for trial in found.trials))
    ahead = "  ".join(f"{d} AHEAD" for d in range(1, depths + 1))
    terminal.line(f"{'CONVENTION':<{width}}  {ahead}  MEAN LOG-PROBABILITY")
    for trial in found.trials:
        shares = "  ".join(f"{share:>7.0%}" for share in trial.agreement)
        nats = "  ".join(f"{trial.mean(depth):.3f}" for depth in range(depths))
        terminal.line(f"{trial.name:<{width}}  {shares}  {nats}")
    terminal.line()
    terminal.line(f"agreement with the target's next tokens, at {found.positions} positions of its own text")
    if found.options:
        terminal.line(f"another convention is clearly better; type --drafter {load.drafter}{typed}")
    else:
        terminal.line("no other convention is clearly better: nothing to change")


def examine(terminal: Terminal) -> dict[str, dict[str, str]]:
    """All facts by section. Works whatever is missing or broken."""
    return {
        "speclocal": {"version": __version__, "folder": str(Path(__file__).resolve().parents[1])},
        "machine": {
            "system": platform.platform(),
            "python": f"{platform.python_version()} ({sys.executable})",
            "processors": _processors(),
            "memory": _memory(),
        },
        "versions": {name: _version(name) for name in LIBRARIES},
        **{f"backend {name}": _backend(name, needs) for name, needs in BACKENDS.items()},
        "folders": {
            "cache": str(cache_folder()),
            "hub cache": _hub_folder(),
            "offline": "yes" if Policy().is_offline else "no",
        },
        "terminal": {
            "stdout": _channel(terminal.out.tty, terminal.out.color, terminal.out.encoding),
            "stderr": _channel(terminal.err.tty, terminal.err.color, terminal.err.encoding),
        },
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _backend(name: str, needs: Sequence[str]) -> dict[str, str]:
    """What the backend says of itself; else why it cannot."""
    for needed in needs:
        if _version(needed) == "not installed":
            return {"state": f"not available: {needed} is not installed"}
    try:
        describe: Callable[[], dict[str, str]] = importlib.import_module(f"speclocal.backends.{name}").describe
        return {"state": "ready", **describe()}
    except (ImportError, AttributeError, OSError, RuntimeError, SpeclocalError) as error:
        reason = " ".join(str(error).split())
        return {"state": f"not available: {reason}", "version": _version(needs[0])}


def _processors() -> str:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    return f"{usable} of {os.cpu_count()}" + (f", OMP_NUM_THREADS={threads}" if threads else "")


def _memory() -> str:
    memory = psutil.virtual_memory()
    return f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free"


def _hub_folder() -> str:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or base / "huggingface")
    return os.environ.get("HF_HUB_CACHE") or str(home / "hub")


def _channel(tty: bool, color: bool, encoding: str) -> str:
    return f"{'terminal' if tty else 'no terminal'}, {'colours' if color else 'no colours'}, {encoding}"
