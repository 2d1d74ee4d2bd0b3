"""`speclocal doctor`: what this machine offers, for users and for bug reports."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import click
import psutil

from speclocal import __version__
from speclocal.cli.command import Command, Option, debug_option
from speclocal.errors import SpeclocalError
from speclocal.sources import Policy, cache_folder
from speclocal.ui.terminal import Terminal

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
@debug_option
def doctor(as_json: bool) -> None:
    """Show versions, backends, devices, memory and folders."""
    terminal = Terminal()
    report = examine(terminal)
    if as_json:
        terminal.json(report)
        return
    for section, facts in report.items():
        terminal.line(section)
        for name, value in facts.items():
            terminal.line(f"  {name:<18} {value}")


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
