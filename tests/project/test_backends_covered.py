"""A run that was asked to cover a backend fails if it did not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import INSTALLED, WANTED

ROOT = Path(__file__).parents[2]
FAILED = pytest.ExitCode.TESTS_FAILED
TESTS = "def test_pure():\n    pass\n\ndef test_ops(ops):\n    assert ops.to_host(ops.array([1])) == [[1]]\n"


def run(folder: Path, wanted: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of pytest over two tests, with the hooks and fixtures of this project."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_it.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), WANTED: wanted}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_covered(tmp_path):
    code, out = run(tmp_path, ",".join(INSTALLED))
    assert code == 0
    assert f"backends covered: {INSTALLED[0]} " in out


def test_nothing_asked_for(tmp_path):
    code, out = run(tmp_path, "", "-k", "pure")
    assert code == 0
    assert "backends covered" not in out


def test_a_module_names_its_backend(tmp_path):
    """Without the fixtures."""
    (tmp_path / "test_other.py").write_text(f"BACKENDS = ({INSTALLED[-1]!r},)\n\ndef test_pure_too():\n    pass\n")
    code, out = run(tmp_path, INSTALLED[-1], "-k", "pure")
    assert code == 0
    assert f"backends covered: {INSTALLED[-1]} " in out


def test_not_installed(tmp_path):
    code, out = run(tmp_path, f"{INSTALLED[0]},jax")
    assert code == FAILED
    assert f"{WANTED} asks for jax: not installed" in out
    assert f"asks for {INSTALLED[0]}" not in out


def test_no_test_collected(tmp_path):
    code, out = run(tmp_path, INSTALLED[0], "-k", "pure")
    assert code == FAILED
    assert f"{WANTED} asks for {INSTALLED[0]}: no test of it was collected" in out
