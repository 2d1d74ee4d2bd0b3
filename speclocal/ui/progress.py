"""Download progress on stderr: a bar on a terminal, one line at start and end anywhere else."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class DownloadBar:
    """A `sources.Progress`. stdout stays untouched."""

    def __init__(self, console: Console | None = None):
        self._console = console or Console(stderr=True, highlight=False)
        self._live = self._console.file.isatty() and not self._console.is_dumb_terminal
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._name = ""
        self._count = 0
        self._total: int | None = None
        self._began = 0.0

    def start(self, description: str, total: int | None) -> None:
        """Show that a download begins."""
        self._name, self._count, self._total, self._began = description, 0, total, time.monotonic()
        if not self._live:
            size = f" ({_megabytes(total)})" if total else ""
            self._console.print(f"fetching {description}{size}", markup=False, soft_wrap=True)
            return
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(description, total=total)
        self._bar.start()

    def advance(self, count: int) -> None:
        """Count bytes."""
        self._count += count
        if self._bar:
            self._bar.advance(self._task, count)

    def finish(self) -> None:
        """Close the bar; what came is said even if it was not all."""
        if self._bar:
            self._bar.stop()
            self._bar = None
            return
        word = "fetched" if self._total is None or self._count >= self._total else "stopped after"
        seconds = time.monotonic() - self._began
        self._console.print(
            f"{word} {_megabytes(self._count)} of {self._name} in {seconds:.1f} s", markup=False, soft_wrap=True
        )


class StepBar:
    """A bar for work whose steps have names, on a terminal; nothing anywhere else."""

    def __init__(self, console: Console):
        live = console.file.isatty() and not console.is_dumb_terminal
        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), console=console, transient=True
        )
        self._bar.disable = not live
        self._task: TaskID | None = None

    def __enter__(self) -> StepBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, name: str, done: int, total: int) -> None:
        """So much of the step of this name is done. The bar appears with the first call."""
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(name)
        self._bar.update(self._task, description=name, completed=done, total=total)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
