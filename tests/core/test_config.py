"""Defaults from the user file and the environment."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from speclocal import config
from speclocal.errors import UsageError

KNOWN = {"generate": {"target", "temperature", "greedy", "stop"}, "chat": {"target", "system"}, "doctor": set()}


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """The user file, at the platform's place; not there yet."""
    for name in ("TARGET", "TEMPERATURE", "GREEDY", "STOP", "SYSTEM", "CONFIG"):
        monkeypatch.delenv(f"SPECLOCAL_{name}", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "speclocal" / "config.toml"
    path.parent.mkdir()
    return path


def test_nothing_is_set():
    assert config.defaults(KNOWN) == {"generate": {}, "chat": {}, "doctor": {}}


def test_shared_and_own_settings(file):
    file.write_text('target = "llama-8b"\ntemperature = 0.5\n[generate]\ntarget = "qwen3-8b"\n')
    assert config.defaults(KNOWN) == {
        "generate": {"target": "qwen3-8b", "temperature": 0.5},
        "chat": {"target": "llama-8b"},
        "doctor": {},
    }


def test_environment_beats_the_file(file, monkeypatch):
    file.write_text('target = "llama-8b"\n[generate]\ntarget = "qwen3-8b"\n')
    monkeypatch.setenv("SPECLOCAL_TARGET", "gemma3-4b")
    monkeypatch.setenv("SPECLOCAL_SYSTEM", "")
    found = config.defaults(KNOWN)
    assert (found["generate"], found["chat"]) == ({"target": "gemma3-4b"}, {"target": "gemma3-4b"})


def test_another_file(tmp_path, monkeypatch):
    other = tmp_path / "other.toml"
    monkeypatch.setenv("SPECLOCAL_CONFIG", str(other))
    with pytest.raises(UsageError, match=r"no such settings file, got .*other\.toml"):
        config.defaults(KNOWN)
    other.write_text('system = "Be brief."')
    assert config.defaults(KNOWN)["chat"] == {"system": "Be brief."}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature = 1", "got temprature, expected perhaps temperature; known are: greedy, stop, system, target"),
        ("[generate]\nsystem = 1", r"got \[generate\] system, expected .*greedy, stop, target, temperature"),
        ("[genrate]\ntarget = 1", "got genrate"),
        ("target = ", "is not TOML"),
    ],
)
def test_mistakes_are_told(file, text, message):
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        config.defaults(KNOWN)


def test_precedence_in_click(file, monkeypatch):
    """Flag > environment > file > built-in, for numbers, switches and repeated options."""

    @click.group()
    def program(): ...

    @program.command()
    @click.option("--target", default="built-in")
    @click.option("--temperature", type=float, default=1.0)
    @click.option("--greedy", is_flag=True)
    @click.option("--stop", multiple=True)
    def generate(target, temperature, greedy, stop):
        click.echo([target, temperature, greedy, list(stop)])

    def run(*args):
        found = config.defaults(KNOWN, lists={"stop"})
        return (
            CliRunner().invoke(program, ["generate", *args], default_map=found, catch_exceptions=False).output.strip()
        )

    assert run() == "['built-in', 1.0, False, []]"
    file.write_text('target = "file"\ntemperature = 0.5\nstop = ["a", "b c"]')
    assert run() == "['file', 0.5, False, ['a', 'b c']]"
    monkeypatch.setenv("SPECLOCAL_TARGET", "env")
    monkeypatch.setenv("SPECLOCAL_GREEDY", "1")
    monkeypatch.setenv("SPECLOCAL_STOP", "x y")
    assert run() == "['env', 0.5, True, ['x y']]"
    assert run("--target", "flag", "--temperature", "0.25", "--stop", "z") == "['flag', 0.25, True, ['z']]"


@pytest.mark.parametrize(
    ("platform", "variable", "ends"),
    [
        ("linux", "XDG_CONFIG_HOME", "cfg/speclocal/config.toml"),
        ("win32", "APPDATA", "cfg/speclocal/config.toml"),
        ("darwin", None, "Library/Application Support/speclocal/config.toml"),
    ],
)
def test_the_platforms_place(monkeypatch, platform, variable, ends):
    monkeypatch.setattr("sys.platform", platform)
    if variable:
        monkeypatch.setenv(variable, "/cfg")
    assert config.user_file().as_posix().endswith(ends)
