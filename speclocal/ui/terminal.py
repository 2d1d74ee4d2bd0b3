"""The one object that owns the console: what goes where, what may be coloured, and what is safe to show."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.status import Status
from rich.style import Style
from rich.text import Text

Color = Literal["auto", "always", "never"]

MARKS = "·…⟦⟧↵␛"
_UNSAFE = re.compile(r"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_UNSAFE_IN_JSON = re.compile(r"[\x7f-\x9f\u2028\u2029]")
_UNSTYLED = re.compile(r"(^\s+|\s*\n\s*)")


def clean(text: str, unicode: bool = True) -> str:
    """Control characters made visible (`␛`, or `\\x1b` for consoles without such signs); tabs and line ends stay."""

    def show(match: re.Match[str]) -> str:
        code = ord(match.group())
        return chr(0x2400 + code) if unicode and code < 0x20 else f"\\x{code:02x}"

    return _UNSAFE.sub(show, text)


class Cleaner:
    """`clean` for a stream: a CR at the end of a part waits, because only what follows tells if it is a line end."""

    def __init__(self, unicode: bool):
        self._unicode = unicode
        self._held = ""

    def feed(self, text: str) -> str:
        """The part of the text so far that is ready to show."""
        text = self._held + text
        self._held = text[-1:] if text.endswith("\r") else ""
        return clean(text[: len(text) - len(self._held)], self._unicode)

    def flush(self) -> str:
        """What was held back; the text ends here."""
        held, self._held = self._held, ""
        return clean(held, self._unicode)


class Channel:
    """One output stream: whether it is a terminal, takes colours, and which characters it can carry."""

    def __init__(self, file: TextIO, color: Color, environ: Mapping[str, str]):
        self.tty = file.isatty()
        self.encoding = getattr(file, "encoding", None) or "utf-8"
        self.unicode = self.fit(MARKS) == MARKS
        dumb = environ.get("TERM", "").lower() in {"dumb", "unknown"}
        self.color = _wants_color(self.tty, dumb, color, environ)
        self.console = Console(
            file=file,
            force_terminal=self.color,
            force_jupyter=False,
            color_system="standard" if dumb else "auto",
            no_color=False,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
            _environ=environ,
        )

    def fit(self, text: str) -> str:
        """The text with `?` for what the encoding of the stream cannot carry."""
        return text.encode(self.encoding, "replace").decode(self.encoding)

    def write(self, text: str, style: Style | None = None) -> None:
        """Append to the stream as it is: no markup, no wrapping, tabs kept. Flushed at once."""
        segments = [
            Segment(part, None if i % 2 else style) for i, part in enumerate(_UNSTYLED.split(self.fit(text))) if part
        ]
        if segments:
            self.console.print(Segments(segments), end="")

    def pick(self, unicode: str, ascii: str) -> str:
        """A mark, or its stand-in on consoles that cannot show it."""
        return unicode if self.unicode else ascii


def _wants_color(tty: bool, dumb: bool, color: Color, environ: Mapping[str, str]) -> bool:
    if color != "auto":
        return color == "always"
    if environ.get("NO_COLOR"):
        return False
    if force := environ.get("FORCE_COLOR"):
        return force.lower() not in {"0", "false", "no"}
    return tty and not dumb


class Spinner:
    """Shows that work goes on. Leaves nothing behind."""

    def __init__(self, channel: Channel, text: str | None):
        self._status: Status | None = None
        if text is not None:
            self._status = channel.console.status(Text(clean(text)), spinner=channel.pick("dots", "line"))
            self._status.start()

    def update(self, text: str) -> None:
        """Change the text beside it."""
        if self._status:
            self._status.update(Text(clean(text)))

    def hide(self) -> None:
        """Make room for other output; it does not come back."""
        if self._status:
            self._status.stop()
            self._status = None


class Terminal:
    """Everything a command shows. The answer goes to stdout; notes, legend, statistics and errors to stderr.

    plain: no colours and no marks.     raw: control characters of the answer are passed on, and nothing is added.
    quiet: errors only.                 verbose: details too.
    """

    def __init__(
        self,
        *,
        plain: bool = False,
        color: Color = "auto",
        raw: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
    ):
        environ = os.environ if environ is None else environ
        color = "never" if plain else color
        self.out = Channel(stdout or sys.stdout, color, environ)
        self.err = Channel(stderr or sys.stderr, color, environ)
        self.plain, self.raw, self.quiet, self.verbose = plain, raw, quiet, verbose
        self.styled = self.out.color and not raw
        self._cleaner = Cleaner(self.out.unicode)
        self._line_open = False

    def answer(self, text: str, style: Style | None = None) -> None:
        """Append a part of the answer to stdout."""
        self._answer(text if self.raw else self._cleaner.feed(text), style)

    def aside(self, text: str, style: Style | None = None) -> None:
        """Put text that is no part of the answer between its parts."""
        self._answer(self._cleaner.flush(), None)
        self._answer(clean(text, self.out.unicode), style)

    def end_answer(self) -> None:
        """The answer is complete: end its last line."""
        self._answer(self._cleaner.flush(), None)
        if self._line_open and not (self.raw and not self.out.tty):
            self._answer("\n", None)
        self._line_open = False

    def _answer(self, text: str, style: Style | None) -> None:
        if text:
            self.out.write(text, style if self.styled else None)
            self._line_open = not text.endswith("\n")

    def line(self, text: str = "", style: Style | None = None) -> None:
        """One line of a command's own result, on stdout."""
        self.out.write(clean(text, self.out.unicode), style if self.styled else None)
        self.out.write("\n")

    def json(self, value: Any, indent: int | None = 2) -> None:
        """One JSON value on stdout, with everything escaped that a terminal or a line-based reader could trip over."""
        text = json.dumps(value, indent=indent, ensure_ascii=not self.out.unicode, allow_nan=False)
        self.out.write(_UNSAFE_IN_JSON.sub(lambda m: f"\\u{ord(m.group()):04x}", text) + "\n")

    def note(self, text: str) -> None:
        """Something the user should know but did not ask for."""
        if not self.quiet:
            self._aloud("note: ", Style(color="cyan"), text)

    def reply(self, text: str) -> None:
        """What a command inside a session was asked to show; stdout is only for answers."""
        self._aloud("", None, text)

    def detail(self, text: str) -> None:
        """Only with `verbose`."""
        if self.verbose and not self.quiet:
            self._aloud("", None, text, Style(dim=True))

    def statistics(self, text: str) -> None:
        """The line after an answer."""
        if not self.quiet:
            self._aloud("", None, text, Style(dim=True))

    def error(self, text: str) -> None:
        """What failed: one line, also when quiet."""
        self._aloud("error: ", Style(color="red", bold=True), " ".join(text.split()))

    def remark(self, *parts: tuple[str, Style | None]) -> None:
        """A line of differently styled parts on stderr."""
        if not self.quiet:
            self._close_line()
            for text, style in parts:
                self._say(text, style)
            self._say("\n")

    def _aloud(self, label: str, label_style: Style | None, text: str, style: Style | None = None) -> None:
        self._close_line()
        self._say(label, label_style)
        self._say(text + "\n", style)

    def _say(self, text: str, style: Style | None = None) -> None:
        self.err.write(clean(text, self.err.unicode), style if self.err.color else None)

    def _close_line(self) -> None:
        if self._line_open and self.out.tty and self.err.tty:
            self._answer("\n", None)

    @contextmanager
    def status(self, text: str) -> Iterator[Spinner]:
        """A spinner on stderr while the block runs, if that is a terminal."""
        shown = self.err.tty and self.err.color and not self.quiet
        spinner = Spinner(self.err, text if shown else None)
        try:
            yield spinner
        finally:
            spinner.hide()

    def restore(self) -> None:
        """Bring colours back to normal after an interrupt, which may have cut a write in two."""
        for channel in (self.out, self.err):
            if channel.color and channel.tty:
                channel.console.file.write("\x1b[0m")
                channel.console.file.flush()
