"""How commands end when something fails or the user stops them (case TUI-04)."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SLOW = json.dumps({"texts": ["one ", "two ", "three ", "four "], "delay": 0.5})


def test_failures_are_one_line_without_traceback(run: Callable[..., Any]) -> None:
    result = run("generate", "hi", "--target", "missing")
    assert result.exit_code == 1
    assert result.stderr == "error: no such model, got 'missing', expected an alias; see `speclocal models`\n"


@pytest.mark.parametrize("args", [["--debug", "generate", "hi"], ["generate", "hi", "--debug"]])
def test_debug_shows_the_traceback(spawn: Callable[..., Any], args: list[str]) -> None:
    done = spawn(*args, "--target", "missing")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"ModelError" in spawn("generate", "hi", "--target", "missing", SPECLOCAL_DEBUG="1").stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "error: out of memory; take a smaller model"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/cache/x"),
            "error: no space left on device: /cache/x; free",
        ),
    ],
)
def test_machine_failures_are_one_line(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("speclocal.engine.load", fail)
    result = run("generate", "hi")
    assert result.exit_code == 1
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(command: list[str], environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "generate", "hi"], env=environment, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"error: no space left on device; free some space and start again\n"


def test_a_reader_that_leaves_is_no_failure_to_talk_about(command: list[str], environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*command, "generate", "hi", "--quiet"],
        env=environment | {"FAKE": json.dumps({"texts": ["x" * 1000] * 20, "delay": 0.05})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) != 0


def interrupted(command: list[str], environment: dict[str, str], *args: str, presses: int = 1) -> tuple[int, str, str]:
    """Run with a slow engine and press Ctrl-C while it waits for its third step."""
    process = subprocess.Popen(
        [*command, "generate", "hi", "--verbose", *args],
        env=environment | {"FAKE": SLOW},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(2):
        process.stderr.readline()  # what --verbose says once the model is loaded
    first = b""
    if "--json" in args:
        time.sleep(1.25)
    else:
        first = process.stdout.read(len("one two "))
        time.sleep(0.1)
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = process.communicate(timeout=30)
    return process.returncode, (first + out).decode(), err.decode()


def test_tui_04_ctrl_c_keeps_what_there_is(command: list[str], environment: dict[str, str]) -> None:
    code, out, err = interrupted(command, environment)
    assert code == 130
    assert out == "one two three \n"
    assert err.startswith("3 tokens")
    assert err.endswith("ended by interrupted\n")


def test_tui_04_ctrl_c_twice_leaves_at_once(command: list[str], environment: dict[str, str]) -> None:
    code, out, err = interrupted(command, environment, presses=2)
    assert (code, out.strip(), err.strip()) == (130, "one two", "")


def test_tui_04_ctrl_c_in_prompt_work(console: Callable[..., Any]) -> None:
    shown = console("generate", "hi", FAKE='{"prefill": 0.4}')
    shown.expect("reading the prompt: 1 of 4")
    shown.send("\x03")
    assert shown.wait() == 130
    assert "0 tokens" in shown.text
    assert "The sky" not in shown.text
    assert "Traceback" not in shown.text
    assert shown.output.rindex("\x1b[?25h") > shown.output.rindex("\x1b[?25l"), "the cursor is visible again"


def test_json_of_an_interrupted_answer(command: list[str], environment: dict[str, str]) -> None:
    code, out, _ = interrupted(command, environment, "--json")
    made = json.loads(out)
    assert code == 130
    assert made["finish_reason"] == "interrupted"
    assert len(made["token_ids"]) == 3
    assert made["usage"]["completion_tokens"] == len(made["token_ids"])
