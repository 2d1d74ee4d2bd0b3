"""Consoles for tests of the command line: pipes in this process, and real terminals around another one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.fake_engine import FakeEngine

HERE = Path(__file__).parent
SGR = re.compile(r"\x1b\[[\d;]*m")
ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[=>])")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A known environment for child processes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHON", "SPECLOCAL"))}
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TERM_PROGRAM"):
        kept.pop(name, None)
    return kept | {
        "PYTHONPATH": str(HERE.parents[1]),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HOME": str(tmp_path),
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def command() -> list[str]:
    """speclocal with the fake engine, as another process."""
    return [sys.executable, str(HERE / "fake_engine.py")]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """The fake engine, in place of a real one in this process."""
    fake = FakeEngine()
    monkeypatch.setattr("speclocal.engine.load", lambda *args, **kwargs: fake.load(*args, **kwargs))
    for name in os.environ:
        if name.startswith("SPECLOCAL_") or name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    return fake


@pytest.fixture
def run(engine: FakeEngine) -> Callable[..., Result]:
    """Run a command line in this process with pipes: `run("generate", "hi", input="")`."""

    def call(*args: str, input: str | bytes | None = None) -> Result:
        from speclocal.cli import main

        return CliRunner().invoke(main, list(args), input=input)

    return call


class Console:
    """A process on a terminal of a fixed size. Standard streams can be taken off it one by one."""

    def __init__(self, args: list[str], env: dict[str, str], columns: int = 80, lines: int = 24, **streams: Any):
        self._master, slave = pty.openpty()
        self.resize(columns, lines)
        self.output = ""
        self._seen = 0
        self.process = subprocess.Popen(
            args,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(slave, termios.TIOCSCTTY, 0),
            **{"stdin": slave, "stdout": slave, "stderr": slave} | streams,
        )
        os.close(slave)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    @property
    def text(self) -> str:
        """What was shown, without escape sequences."""
        return ESCAPES.sub("", self.output).replace("\r\n", "\n")

    def expect(self, text: str, seconds: float = 15.0) -> None:
        """Wait until `text` was shown after what earlier calls waited for."""
        start = self._seen
        deadline = time.monotonic() + seconds
        while (at := self.text.find(text, start)) < 0:
            running = self._read(0.1)
            assert running, f"ended without {text!r}:\n{self.text[start:]}"
            assert time.monotonic() < deadline, f"no {text!r} in:\n{self.text[start:]}"
        self._seen = at + len(text)

    def wait(self, seconds: float = 15.0) -> int:
        """The exit code; reads the output to its end."""
        deadline = time.monotonic() + seconds
        while self._read(0.1):
            assert time.monotonic() < deadline, f"still running:\n{self.text}"
        return self.process.wait(5)

    def _read(self, seconds: float) -> bool:
        """Take what is there; False at the end."""
        if not select.select([self._master], [], [], seconds)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._master, 65536)
        except OSError:  # how Linux reports that the other side is closed
            return False
        self.output += data.decode("utf-8", "replace")
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@pytest.fixture
def console(command: list[str], environment: dict[str, str]) -> Iterator[Callable[..., Console]]:
    """Start speclocal on a terminal: `console("chat", FAKE="...", columns=40)`; capitals are environment."""
    opened: list[Console] = []

    def start(*args: str, **settings: Any) -> Console:
        env = environment | {name: str(settings.pop(name)) for name in list(settings) if name.isupper()}
        opened.append(Console([*command, *args], env, **settings))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def spawn(command: list[str], environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run speclocal as another process with pipes; capitals are environment."""

    def call(*args: str, input: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*command, *args], env=environment | env, input=input, capture_output=True, timeout=60, check=False
        )

    return call
