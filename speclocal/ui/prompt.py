"""Input for chat: several lines, history and completion on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import is_dumb_terminal

from speclocal.errors import UsageError
from speclocal.ui.interrupt import Interrupt

FENCE = '"""'
PASTE_GAP = 0.05  # Seconds: Enter so soon after a pasted line end is still part of the paste.


@dataclass(frozen=True)
class Message:
    """What the user entered. `literal`: it was fenced, so it is never a command."""

    text: str
    literal: bool = False


class Prompt(Protocol):
    """A source of messages."""

    editable: bool
    """True if `read(default)` shows `default` for editing."""

    def read(self, default: str = "", multi: bool = False) -> Message:
        """The next message. Raises EOFError at the end of input, KeyboardInterrupt for Ctrl-C with nothing typed.

        multi: Enter makes a new line; a closing fence ends the message.
        """


def open_prompt(commands: Sequence[str]) -> Prompt:
    """The editor if stdin is a terminal, else plain lines."""
    return Editor(commands) if sys.stdin.isatty() else Lines()


def fence_open(text: str) -> bool:
    """True if the text starts a fence that is not closed yet."""
    text = text.strip()
    return text.startswith(FENCE) and not (len(text) >= 2 * len(FENCE) and text.endswith(FENCE))


def unfence(text: str, multi: bool = False) -> Message:
    """The message inside the fence, if there is one; in multi-line input the opening fence is not written."""
    body = text.strip()
    if multi and (body == FENCE or not body.startswith(FENCE)):
        return Message(text.rstrip().removesuffix(FENCE).strip("\n"), literal=True)
    if body.startswith(FENCE) and not fence_open(body):
        return Message(body[len(FENCE) : -len(FENCE)].strip("\n"), literal=True)
    return Message(text.rstrip("\r\n"))


class Lines:
    """Messages from a pipe or file: one a line, or fenced."""

    editable = False

    def read(self, default: str = "", multi: bool = False) -> Message:
        text = self._line()
        while fence_open(text) or (multi and not text.rstrip().endswith(FENCE)):
            try:
                text += self._line()
            except EOFError:
                return Message(text.strip().removeprefix(FENCE).strip("\n"), literal=True)
        return unfence(text, multi)

    @staticmethod
    def _line() -> str:
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise UsageError("stdin cannot be read as text", got=str(error), expected="UTF-8") from error
        if not line:
            raise EOFError
        return line


class Editor:
    """The line editor of a terminal."""

    editable = True

    def __init__(self, commands: Sequence[str]):
        self._commands = tuple(commands)
        self._multi = False
        self._pasted_at = float("-inf")
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            key_bindings=self._keys(),
            history=open_history(state_dir() / "history"),
            completer=WordCompleter(list(self._commands), sentence=True),
            prompt_continuation="… " if "utf" in (sys.stderr.encoding or "").lower() else ". ",
            input_processors=[TabsProcessor(char1=" ", char2=" ")],
            # stdout may be a pipe; the prompt belongs on the terminal. A dumb one is served if no output is named.
            output=None if is_dumb_terminal() else create_output(always_prefer_tty=True),
        )

    def read(self, default: str = "", multi: bool = False) -> Message:
        self._multi = multi
        # Ctrl-C while the editor sets itself up must not break it, but count as pressed in it.
        with Interrupt(patience=sys.maxsize) as early:

            def listen() -> None:
                if early.asked:
                    self._session.app.exit(exception=KeyboardInterrupt)

            text = self._session.prompt("> ", default=default, pre_run=listen)
        return unfence(text, multi)

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()

        @keys.add("enter")
        def enter(event: KeyPressEvent) -> None:
            text = event.current_buffer.document.text
            unfinished = not text.rstrip().endswith(FENCE) if self._multi else fence_open(text)
            if self._pasting(event) or unfinished:
                event.current_buffer.newline(copy_margin=False)
            else:
                event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def newline(event: KeyPressEvent) -> None:
            event.current_buffer.newline(copy_margin=False)

        @keys.add("tab")
        def tab(event: KeyPressEvent) -> None:
            buffer, text = event.current_buffer, event.current_buffer.document.text
            if not text.startswith("/"):
                buffer.insert_text("\t")
            elif len(matches := [name for name in self._commands if name.startswith(text)]) == 1:
                buffer.insert_text(matches[0].removeprefix(text))
            elif buffer.complete_state:
                buffer.complete_next()
            else:
                buffer.start_completion()

        @keys.add("c-c")
        @keys.add("<sigint>")
        def cancel(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        return keys

    def _pasting(self, event: KeyPressEvent) -> bool:
        """True if Enter came out of a paste that the terminal did not mark as one: faster than anybody types."""
        now = time.monotonic()
        pasting = bool(event.app.key_processor.input_queue) or now - self._pasted_at < PASTE_GAP
        if pasting:
            self._pasted_at = now
        return pasting


def state_dir() -> Path:
    """Where this platform keeps a program's own state."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return base / "speclocal"


class PrivateHistory(FileHistory):
    """A file only the user can read. Trouble with it must not end a conversation: entries then live in memory."""

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError:
            return

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []


def open_history(path: Path) -> History:
    """History kept in a file; in memory where the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return PrivateHistory(str(path))
