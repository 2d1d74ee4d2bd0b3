"""`speclocal doctor`: works whatever is missing or broken."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from speclocal import __version__
from speclocal.engine import Load
from speclocal.probe import Report, Trial


def backend(monkeypatch: pytest.MonkeyPatch, **contents: Any) -> None:
    """Put a module in the place of the torch backend."""
    module = types.ModuleType("speclocal.backends.torch")
    for name, value in contents.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "speclocal.backends.torch", module)


def test_report(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    backend(monkeypatch, describe=lambda: {"devices": "cpu, cuda:0 (a card)"})
    result = run("doctor")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert f"  version            {__version__}" in lines
    assert "  devices            cpu, cuda:0 (a card)" in lines
    for section in ("speclocal", "machine", "versions", "backend torch", "backend mlx", "folders", "terminal"):
        assert section in lines
    assert result.stderr == ""


def test_json(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    backend(monkeypatch, describe=lambda: {"devices": "cpu"})
    monkeypatch.setenv("SPECLOCAL_CACHE", "/some/cache")
    monkeypatch.setenv("HF_HUB_CACHE", "/hub/cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    report = json.loads(run("doctor", "--json").stdout)
    assert report["backend torch"] == {"state": "ready", "devices": "cpu"}
    assert report["folders"] == {"cache": "/some/cache", "hub cache": "/hub/cache", "offline": "yes"}
    assert report["machine"]["processors"].endswith("OMP_NUM_THREADS=3")
    assert report["terminal"]["stdout"] == "no terminal, no colours, utf-8"
    assert report["versions"]["click"][0].isdigit()


def broken() -> dict[str, str]:
    raise RuntimeError("libcuda.so: wrong\nELF class")


@pytest.mark.parametrize(
    ("contents", "reason"),
    [({"describe": broken}, "libcuda.so: wrong ELF class"), ({}, "has no attribute 'describe'")],
)
def test_a_broken_backend(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, contents: dict[str, Any], reason: str
) -> None:
    backend(monkeypatch, **contents)
    result = run("doctor", "--json")
    assert result.exit_code == 0
    state = json.loads(result.stdout)["backend torch"]
    assert state["state"].startswith("not available: ")
    assert state["state"].endswith(reason)
    assert state["version"][0].isdigit(), "what is installed is said all the same"


def test_a_missing_backend(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from speclocal.cli import doctor

    monkeypatch.setattr(doctor, "BACKENDS", {"mlx": ("click", "no-such-distribution")})
    report = json.loads(run("doctor", "--json").stdout)
    assert report["backend mlx"] == {"state": "not available: no-such-distribution is not installed"}


def test_the_terminal_is_described(console: Callable[..., Any]) -> None:
    shown = console("doctor", TERM="xterm", PYTHONIOENCODING="cp1252")
    assert shown.wait(60) == 0
    assert "stdout             terminal, colours, cp1252" in shown.text


# ---- the acceptance probe


REPORT = Report(
    "org/head",
    200,
    (
        Trial("as given", (0.1, 0.05, 0.02), ((-4.0, None), (-5.0, -5.0), (-6.0, -6.0))),
        Trial("taps=3,5,6", (0.612, 0.5, 0.4), ((-1.0, -2.0), (-2.0, -2.0), (-3.0, -3.0))),
    ),
    {"taps": "3,5,6"},
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Load]:
    """What the probe was asked to do, which it does not do."""
    found: list[Load] = []

    def probe(settings: Load, notify: Callable[[str], None], progress: Any, step: Callable[..., None]) -> Report:
        found.append(settings)
        notify("guessed")
        step("as given", 1, 2)
        return REPORT

    monkeypatch.setattr("speclocal.probe.probe", probe)
    return found


def test_the_probe_says_what_to_type(run: Callable[..., Any], asked: list[Load]) -> None:
    result = run("doctor", "--target", "llama-8b", "--drafter", "eagle3:org/head", "-o", "theta=5", "-o", "taps=1,2,3")
    assert result.exit_code == 0, result.output
    (load,) = asked
    assert (load.target, load.drafter, load.options) == ("llama-8b", "eagle3:org/head", {"theta": "5", "taps": "1,2,3"})
    lines = result.stdout.splitlines()
    assert lines[0] == "CONVENTION  1 AHEAD  2 AHEAD  3 AHEAD  MEAN LOG-PROBABILITY"
    assert lines[2] == "taps=3,5,6      61%      50%      40%  -1.500  -2.000  -3.000"
    assert lines[-1].endswith("type --drafter eagle3:org/head -o theta=5 -o taps=3,5,6")
    assert result.stderr == "note: guessed\n"


def test_nothing_to_change(run: Callable[..., Any], asked: list[Load], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speclocal.probe.probe", lambda *_: replace(REPORT, options={}))
    result = run("doctor", "--target", "llama-8b", "--drafter", "eagle3")
    assert result.stdout.splitlines()[-1] == "no other convention is clearly better: nothing to change"


def test_the_probe_as_json(run: Callable[..., Any], asked: list[Load]) -> None:
    found = json.loads(run("doctor", "--drafter", "eagle3", "--json").stdout)
    assert found["options"] == {"taps": "3,5,6"}
    assert found["trials"][0] == {
        "convention": "as given",
        "agreement": [0.1, 0.05, 0.02],
        "log_probability": [-4.0, -5.0, -6.0],
    }


def test_only_a_typed_drafter_is_probed(
    run: Callable[..., Any], asked: list[Load], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter in the user's settings is for answers."""
    backend(monkeypatch, describe=lambda: {})
    monkeypatch.setenv("SPECLOCAL_DRAFTER", "eagle3")
    assert "versions" in run("doctor").stdout
    assert not asked
    result = run("doctor", "--target", "llama-8b")
    assert result.exit_code == 2
    assert "--drafter" in result.stderr
