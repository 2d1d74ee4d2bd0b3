"""Ctrl-C during an answer: asked for now, obeyed between two rounds, so that the cache is never left half-written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While active, the first `patience` presses of Ctrl-C only set `asked`; the next one raises KeyboardInterrupt."""

    def __init__(self, patience: int = 1):
        self._patience = patience
        self._presses = 0
        self._previous: Any = signal.SIG_IGN

    @property
    def asked(self) -> bool:
        """True once the user wants to stop."""
        return self._presses > 0

    def take(self) -> bool:
        """Whether the user wanted to stop since the last look; from now on it is as if nobody had pressed."""
        asked, self._presses = self.asked, 0
        return asked

    def check(self) -> None:
        """Raise KeyboardInterrupt if the user wants to stop; for places where stopping is safe."""
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        # Only the main thread may set handlers, and a process told to ignore the signal goes on ignoring it.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
        if self._previous not in (None, signal.SIG_IGN):
            signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._previous not in (None, signal.SIG_IGN):
            signal.signal(signal.SIGINT, self._previous)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._presses += 1
        if self._presses > self._patience:
            raise KeyboardInterrupt
