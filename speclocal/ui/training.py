"""What a training shows on stderr: a bar with loss and acceptance on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from speclocal.ui.terminal import Terminal

if TYPE_CHECKING:
    from speclocal.train.loop import Progress as Step

EVERY = 30.0
"""Seconds between lines where there is no bar."""
SMOOTH = 0.95
"""How much of the shown values stays from step to step."""


class TrainingView:
    """Implements `train.run.Show`. check: called with every news; may raise KeyboardInterrupt."""

    def __init__(self, terminal: Terminal, check: Callable[[], None]):
        self._terminal, self._check = terminal, check
        console = terminal.err.console
        self._live = terminal.err.tty and not console.is_dumb_terminal and not terminal.quiet
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[news]}", markup=False),
            console=console,
        )
        self._task: tuple[str, TaskID] | None = None
        self._began = self._said = monotonic()
        self._loss: float | None = None
        self._shares: list[float] = []
        self._rows = 0

    def __enter__(self) -> TrainingView:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live and self._task:
            self._bar.stop()

    def note(self, text: str) -> None:
        """See Show."""
        self._terminal.note(text)

    def written(self, texts: int, wanted: int, tokens: int) -> None:
        """See Show."""
        self._check()
        self._tell("writing texts", texts, wanted, lambda seconds: _speed(tokens, seconds))

    def trained(self, progress: Step) -> None:
        """See Show. Ctrl-C is obeyed between steps, by the training itself."""
        self._loss = _mix(self._loss, progress.loss)
        old = [*self._shares, *progress.acceptance[len(self._shares) :]]
        self._shares = [_mix(a, b) for a, b in zip(old, progress.acceptance, strict=False)]
        shares = " ".join(f"{share:.0%}" for share in self._shares)
        rows = progress.rows

        def news(seconds: float) -> str:
            return f"loss {self._loss:.3f}  accepted {shares}  {_speed(rows, seconds)}"

        self._tell("training", progress.step, progress.steps, news)

    def _tell(self, name: str, done: int, total: int, news: Callable[[float], str]) -> None:
        now = monotonic()
        fresh = self._task is None or self._task[0] != name
        if fresh:
            self._began = now
        if self._live:
            if fresh:
                self._bar.start()
                self._task = name, self._bar.add_task(name, total=total, news="")
            assert self._task
            self._bar.update(self._task[1], completed=done, total=total, news=news(now - self._began))
        elif fresh or now - self._said >= EVERY or done == total:
            self._task = self._task if not fresh else (name, TaskID(0))
            self._said = now
            self._terminal.statistics(f"{name}: {done} of {total}  {news(now - self._began)}")


def _speed(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:.0f} tokens/s" if seconds > 1 else ""


def _mix(old: float | None, new: float) -> float:
    return new if old is None else SMOOTH * old + (1 - SMOOTH) * new
