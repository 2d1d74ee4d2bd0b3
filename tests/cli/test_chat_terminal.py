"""`speclocal chat` on real terminals (cases TUI-01, TUI-02, TUI-04, TUI-06, TUI-07, TUI-08)."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SKY = "The sky is blue because air scatters short waves."
PASTE = "def f():\n\treturn [1]\n\n\nfor i in range(3):\n    print(i)\n" + "".join(
    f"line {i} of code\n" for i in range(30)
)
ENTER, NEWLINE, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x03", "\x04"
SLOW = json.dumps({"texts": ["one ", "two ", "three ", "four "], "delay": 0.5})


def open_chat(console: Callable[..., Any], *args: str, **settings: Any) -> Any:
    shown = console("chat", *args, **{"columns": 200, **settings})  # so that no typed line wraps
    shown.expect("/help explains")
    shown.expect(">")
    return shown


def enter(shown: Any, text: str) -> None:
    """Type as people do: Enter comes after the text was seen."""
    shown.send(text)
    shown.expect(text.splitlines()[-1] if text else "")
    shown.send(ENTER)


def saved(shown: Any, tmp_path: Path) -> list[str]:
    """What is in the conversation; ends the session."""
    file = tmp_path / "talk.json"
    enter(shown, f"/save {file}")
    shown.expect("saved")
    enter(shown, "/exit")
    assert shown.wait() == 0
    assert "Traceback" not in shown.text
    return [message["content"] for message in json.loads(file.read_text(encoding="utf-8"))["messages"]]


def test_tui_04_ctrl_c_stops_the_answer_and_keeps_the_session(console: Callable[..., Any], tmp_path: Path) -> None:
    shown = open_chat(console, FAKE=SLOW)
    enter(shown, "hi")
    shown.expect("one two")
    time.sleep(0.1)
    shown.send(CTRL_C)
    shown.expect("ended by interrupted")
    assert "four" not in shown.text
    enter(shown, "more")
    shown.expect("four")
    shown.expect("4 tokens")
    assert saved(shown, tmp_path) == ["hi", "one two three ", "more", "one two three four "]
    assert shown.output.rfind("\x1b[?25h") > shown.output.rfind("\x1b[?25l"), "the cursor is visible again"


def test_tui_04_twice_in_an_answer_keeps_the_session_too(console: Callable[..., Any], tmp_path: Path) -> None:
    shown = open_chat(console, FAKE=SLOW)
    enter(shown, "hi")
    shown.expect("one ")
    shown.send(CTRL_C)
    time.sleep(0.05)
    shown.send(CTRL_C)
    shown.expect("ended by interrupted")
    assert saved(shown, tmp_path)[0] == "hi"


def test_tui_04_three_times_gives_up(console: Callable[..., Any]) -> None:
    shown = open_chat(console, FAKE=json.dumps({"texts": ["one ", "two "], "delay": 4}))
    enter(shown, "hi")
    shown.expect("one ")
    for _ in range(3):
        shown.send(CTRL_C)
        time.sleep(0.1)
    assert shown.wait(3) == 130
    assert "Traceback" not in shown.text


def test_tui_04_ctrl_c_in_prompt_work_gives_the_message_back(console: Callable[..., Any], tmp_path: Path) -> None:
    shown = open_chat(console, FAKE=json.dumps({"texts": ["one"], "prefill": 0.3}))
    enter(shown, "my question")
    shown.expect("reading the prompt: 1 of 4")
    shown.send(CTRL_C)
    shown.expect("0 tokens")
    shown.expect("my question")
    shown.send(", again" + ENTER)
    shown.expect("1 tokens")
    assert saved(shown, tmp_path) == ["my question, again", "one"]


def test_tui_04_at_the_prompt_a_hint_first_then_out(console: Callable[..., Any]) -> None:
    shown = open_chat(console)
    shown.send("half a line")
    shown.expect("half a line")
    shown.send(CTRL_C)  # clears what is typed, is no step towards the exit
    shown.send(CTRL_C)
    shown.expect("Ctrl-C again, Ctrl-D or /exit leaves")
    enter(shown, "hi")
    shown.expect("7 tokens")
    shown.expect(">")
    shown.send(CTRL_C)
    shown.expect("Ctrl-C again")
    shown.send(CTRL_C)
    assert shown.wait() == 130
    assert "Traceback" not in shown.text


def test_tui_04_ctrl_c_just_as_the_answer_ends(console: Callable[..., Any]) -> None:
    """Meant for the answer, it must neither leave nor break the editor that is about to start."""
    shown = open_chat(console)
    for i in range(8):
        enter(shown, "hi")
        shown.expect("prompt 4 tokens in")
        time.sleep(i * 0.003)
        shown.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    enter(shown, "/exit")
    assert shown.wait() == 0
    assert shown.text.count("7 tokens") == 8
    assert "Exception" not in shown.text
    assert "Traceback" not in shown.text


def test_tui_04_ctrl_c_while_loading(command: list[str], console: Callable[..., Any]) -> None:
    shown = console("chat", FAKE=json.dumps({"load": 20}))
    shown.expect("loading smollm2-135m")
    shown.send(CTRL_C)
    assert shown.wait(5) == 130
    assert "Traceback" not in shown.text
    assert shown.output.rindex("\x1b[?25h") > shown.output.rindex("\x1b[?25l")


def test_ctrl_d_leaves(console: Callable[..., Any]) -> None:
    shown = open_chat(console)
    shown.send(CTRL_D)
    assert shown.wait() == 0


@pytest.mark.parametrize(("before", "after"), [("\x1b[200~", "\x1b[201~"), ("", "")])
def test_tui_06_a_paste_is_one_message_and_waits(
    console: Callable[..., Any], tmp_path: Path, before: str, after: str
) -> None:
    """With and without a terminal that marks pastes; terminals send CR for line ends."""
    shown = open_chat(console, lines=50)
    shown.send(before + PASTE.replace("\n", "\r") + after)
    shown.expect("line 29 of code")
    time.sleep(0.3)
    shown._read(0.1)
    assert "7 tokens" not in shown.text, "nothing is sent before Enter"
    shown.send(ENTER)
    shown.expect("7 tokens")
    assert saved(shown, tmp_path) == [PASTE.rstrip("\n"), SKY]


def test_tui_06_alt_enter_and_fences_make_lines(console: Callable[..., Any], tmp_path: Path) -> None:
    shown = open_chat(console)
    shown.send("a")
    shown.send(NEWLINE)
    shown.send("b")
    time.sleep(0.2)
    shown.send(ENTER)
    shown.expect("7 tokens")
    for part in ('"""', "/exit", '"""'):
        enter(shown, part)
        time.sleep(0.1)
    shown.expect("7 tokens")
    enter(shown, "/multi")
    time.sleep(0.3)
    for part in ("c", "d", '"""'):
        enter(shown, part)
        time.sleep(0.1)
    shown.expect("7 tokens")
    assert saved(shown, tmp_path) == ["a\nb", SKY, "/exit", SKY, "c\nd", SKY]


def test_tui_07_a_mistyped_command_stays_editable(console: Callable[..., Any], tmp_path: Path) -> None:
    shown = open_chat(console)
    enter(shown, "/hepl")
    shown.expect("did you mean /help?")
    shown.expect("/hepl")
    shown.send("\x01 " + ENTER)  # Ctrl-A, a space in front
    shown.expect("7 tokens")
    assert saved(shown, tmp_path) == ["/hepl", SKY]


def test_tab_completes_commands(console: Callable[..., Any]) -> None:
    shown = open_chat(console)
    shown.send("/ex\t")
    shown.expect("/exit")
    shown.send(ENTER)
    assert shown.wait() == 0


def test_tui_01_tui_02_text_of_model_and_user_is_literal(console: Callable[..., Any]) -> None:
    text = "[bold]x[/bold] [/] [link=x] list[int] [1] [/INST] \x1b]0;t\x07"
    shown = open_chat(console, columns=150, FAKE=json.dumps({"texts": [text, "\x1b[2J"]}))
    enter(shown, "[/INST] [bold]")
    shown.expect("[bold]x[/bold] [/] [link=x] list[int] [1] [/INST] ␛]0;t␇␛[2J")
    enter(shown, "/exit")
    assert shown.wait() == 0
    assert "\x1b]0;t" not in shown.output
    assert "\x1b[2J" not in shown.output


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_tui_08_a_terminal_that_is_not_utf_8(console: Callable[..., Any], encoding: str) -> None:
    shown = open_chat(console, FAKE=json.dumps({"texts": ["ok 😀"]}), PYTHONIOENCODING=encoding)
    enter(shown, "hi")
    shown.expect("ok ?")
    enter(shown, "/help")
    shown.expect("two more presses leave.")
    enter(shown, "/exit")
    assert shown.wait() == 0
    assert "Error" not in shown.text


def test_dumb_terminals_can_chat(console: Callable[..., Any]) -> None:
    """TUI-03"""
    shown = console("chat", TERM="dumb")
    shown.expect("> ")
    shown.send("hi" + ENTER)
    shown.expect(SKY)
    shown.expect("> ")
    shown.send("/exit" + ENTER)
    assert shown.wait() == 0
