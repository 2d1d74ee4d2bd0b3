"""The console: colours, streams, encodings and control characters (cases TUI-01, TUI-02, TUI-03, TUI-08)."""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from rich.style import Style

from speclocal.ui.terminal import Cleaner, Terminal, clean

BOLD = Style(bold=True)
MARKUP = "[bold]x[/bold] [/] [link=x] list[int] [1] [/INST] :smile: {x} %s"
ATTACKS = {
    "\x1b[2J": "␛[2J",
    "\x1b]52;c;aGk=\x07": "␛]52;c;aGk=␇",
    "\x1b]8;;http://x\x1b\\y": "␛]8;;http://x␛\\y",
    "secret\rpublic": "secret␍public",
    "abc\b\b\b": "abc␈␈␈",
    "\x9b2J\x85": "\\x9b2J\\x85",
    "\x00\x7f\x0b\x0c": "␀\\x7f␋␌",
}


class Tty(io.StringIO):
    """A terminal as far as Python can see."""

    def isatty(self) -> bool:
        return True


def on_tty(**settings: Any) -> tuple[Terminal, Tty, Tty]:
    out, err = Tty(), Tty()
    environ = settings.pop("environ", {"TERM": "xterm-256color"})
    return Terminal(stdout=out, stderr=err, environ=environ, **settings), out, err


def in_encoding(encoding: str, **settings: Any) -> tuple[Terminal, io.BytesIO, io.BytesIO]:
    out, err = io.BytesIO(), io.BytesIO()
    files = [io.TextIOWrapper(stream, encoding=encoding, newline="") for stream in (out, err)]
    return Terminal(stdout=files[0], stderr=files[1], environ={}, **settings), out, err


@pytest.mark.parametrize(("text", "shown"), ATTACKS.items())
def test_tui_02_control_characters_are_visible(text: str, shown: str) -> None:
    assert clean(text) == shown
    terminal, out, _ = on_tty(plain=True)
    terminal.answer(text)
    terminal.end_answer()
    assert out.getvalue() == shown + "\n"


@pytest.mark.parametrize("text", ATTACKS)
def test_tui_02_consoles_without_signs_get_ascii(text: str) -> None:
    shown = clean(text, unicode=False)
    assert shown.isascii()
    assert shown.isprintable()
    assert re.search(r"\\x[0-9a-f]{2}", shown)


def test_tui_02_tabs_and_line_ends_stay() -> None:
    text = "a\tb\r\n\n\tc\n"
    assert clean(text) == text
    terminal, out, _ = on_tty()
    terminal.answer(text, BOLD)
    assert re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()) == text


def test_tui_02_cr_at_the_end_of_a_part_waits_for_what_follows() -> None:
    cleaner = Cleaner(unicode=True)
    assert [cleaner.feed(part) for part in ("a\r", "\nb\r", "c\r")] == ["a", "\r\nb", "␍c"]
    assert cleaner.flush() == "␍"


def test_tui_02_raw_output_passes_everything_on() -> None:
    text = "".join(ATTACKS) + "\r\n\t"
    out = io.StringIO(newline="")
    terminal = Terminal(raw=True, stdout=out, stderr=io.StringIO(), environ={})
    terminal.answer(text, BOLD)
    terminal.end_answer()
    assert out.getvalue() == text


def test_tui_02_notes_and_errors_are_safe_too() -> None:
    terminal, _, err = on_tty(color="never")
    terminal.note("no file \x1b[2J")
    terminal.error("no\nmodel \x1b]52;c;x\x07")
    assert err.getvalue() == "note: no file ␛[2J\nerror: no model ␛]52;c;x␇\n"


@pytest.mark.parametrize("color", ["always", "never"])
def test_tui_01_brackets_are_text(color: Any) -> None:
    terminal, out, err = on_tty(color=color)
    terminal.answer(MARKUP, BOLD)
    terminal.end_answer()
    terminal.note(MARKUP)
    for stream in (out, err):
        assert re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).removeprefix("note: ") == MARKUP + "\n"


@pytest.mark.parametrize(
    ("tty", "environ", "color", "expected"),
    [
        (True, {"TERM": "xterm"}, "auto", True),
        (True, {}, "auto", True),
        (False, {"TERM": "xterm"}, "auto", False),
        (True, {"TERM": "dumb"}, "auto", False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, "auto", False),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, "auto", True),
        (False, {"FORCE_COLOR": "1"}, "auto", True),
        (False, {"FORCE_COLOR": "0"}, "auto", False),
        (True, {"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, "auto", False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, "always", True),
        (False, {"TERM": "dumb"}, "always", True),
        (True, {"TERM": "xterm", "FORCE_COLOR": "1"}, "never", False),
    ],
)
def test_tui_03_who_decides_about_colour(tty: bool, environ: dict[str, str], color: Any, expected: bool) -> None:
    files = [Tty() if tty else io.StringIO() for _ in range(2)]
    terminal = Terminal(color=color, stdout=files[0], stderr=files[1], environ=environ)
    terminal.answer("x", BOLD)
    terminal.note("y")
    assert [("\x1b" in file.getvalue()) for file in files] == [expected, expected]


def test_tui_03_plain_wins_over_colour() -> None:
    terminal, out, err = on_tty(plain=True, color="always")
    terminal.answer("x", BOLD)
    terminal.note("y")
    assert (out.getvalue(), err.getvalue()) == ("x\n", "note: y\n")


def test_a_note_in_mid_answer_starts_its_own_line_on_a_terminal_only() -> None:
    terminal, out, _ = on_tty(plain=True)
    terminal.answer("half")
    terminal.note("hm")
    assert out.getvalue() == "half\n"
    pipe = io.StringIO()
    terminal = Terminal(stdout=pipe, stderr=Tty(), environ={})
    terminal.answer("half")
    terminal.note("hm")
    assert pipe.getvalue() == "half"


def test_quiet_keeps_errors_and_replies() -> None:
    terminal, _, err = on_tty(plain=True, quiet=True, verbose=True)
    terminal.note("a")
    terminal.detail("b")
    terminal.statistics("c")
    terminal.remark(("d", None))
    terminal.reply("asked for")
    terminal.error("failed")
    assert err.getvalue() == "asked for\nerror: failed\n"


def test_details_need_verbose() -> None:
    for verbose, shown in ((False, ""), (True, "context 2048\n")):
        terminal, _, err = on_tty(plain=True, verbose=verbose)
        terminal.detail("context 2048")
        assert err.getvalue() == shown


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp950", "utf-8"])
def test_tui_08_any_encoding(encoding: str) -> None:
    terminal, out, err = in_encoding(encoding)
    terminal.answer("ok ☃ 😀 é 中 \ud800 \x1b\n", BOLD)
    terminal.end_answer()
    terminal.note("… 😀")
    terminal.error("😀 failed")
    text = out.getvalue().decode(encoding)
    assert text.startswith("ok ")
    assert ("😀" in text) == (encoding == "utf-8")
    assert ("中" in text) == (encoding in {"utf-8", "cp950"})
    assert ("␛" in text) == (encoding == "utf-8")
    assert "\x1b" not in text
    assert err.getvalue().decode(encoding).endswith(" failed\n")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_json_is_safe_everywhere_and_loses_nothing(encoding: str) -> None:
    value = {"text": "é😀\x1b[2J\x9b\u2028\u2029\x85\x7f\n"}
    terminal, out, _ = in_encoding(encoding)
    terminal.json(value)
    text = out.getvalue().decode(encoding)
    assert json.loads(text) == value
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", text)
    assert len(text.splitlines()) == 3


def test_tui_03_each_stream_decides_for_itself(console: Callable[..., Any]) -> None:
    """stdout on a terminal, stderr in a file: colours in the one, none in the other, no legend for nobody."""
    shown = console("generate", "hi", stderr=subprocess.PIPE)
    notes = shown.process.stderr.read().decode()
    assert shown.wait() == 0
    assert "\x1b[1;38;5;" in shown.output
    assert "\x1b" not in notes
    assert "drafted and accepted" not in notes
    assert notes.startswith("7 tokens")


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_tui_03_no_escapes_at_all(console: Callable[..., Any], env: dict[str, str]) -> None:
    shown = console("generate", "hi", **env)
    assert shown.wait() == 0
    assert "\x1b" not in shown.output
    assert "The sky is blue because air scatters short waves.\n7 tokens" in shown.text


def test_spinner_gives_the_cursor_back(console: Callable[..., Any]) -> None:
    shown = console("generate", "hi", FAKE='{"prefill": 0.1}')
    shown.expect("reading the prompt: 2 of 4 tokens")
    assert shown.wait() == 0
    assert shown.output.rindex("\x1b[?25h") > shown.output.rindex("\x1b[?25l")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_spinner_on_a_console_that_is_not_utf_8(console: Callable[..., Any], encoding: str) -> None:
    """TUI-08"""
    shown = console("generate", "hi", FAKE='{"prefill": 0.1}', PYTHONIOENCODING=encoding)
    shown.expect("reading the prompt: 2 of 4 tokens")
    assert shown.wait() == 0
    assert "Error" not in shown.text
    assert "7 tokens | 7.0 tokens/s" in shown.text.replace("\xb7", "|").replace("\ufffd", "|")
