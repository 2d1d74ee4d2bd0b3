"""`speclocal doctor`: works whatever is missing or broken."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from speclocal import __version__


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
