"""Fixtures shared by all tests: the array operations of every installed backend, toy targets, golden vectors.

SPECLOCAL_TEST_BACKENDS=torch,mlx fails a run that has no test for one of these backends, instead of leaving it out.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from speclocal import backends
from speclocal.core.interfaces import Ops
from tests.toys import HashTarget

GOLDEN = Path(__file__).parent / "golden"
INSTALLED = [name for name in backends.NAMES if not backends.missing(name)]
WANTED = "SPECLOCAL_TEST_BACKENDS"
COLLECTED = pytest.StashKey[Counter[str]]()


def make_ops(name: str) -> Ops:
    """Operations of a backend, in host memory where it has a choice."""
    module = import_module(f"speclocal.backends.{name}.ops")
    return module.make_ops(import_module("torch").device("cpu")) if name == "torch" else module.make_ops()


@pytest.fixture(scope="session", params=INSTALLED)
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@pytest.fixture
def hash_target(ops: Ops) -> Callable[..., HashTarget]:
    """vocab -> a target of that vocabulary."""
    return lambda vocab, **settings: HashTarget(ops, vocab, **settings)


def golden(name: str) -> Any:
    """One golden file of the acceptance rules."""
    return json.loads((GOLDEN / "verification" / f"{name}.json").read_text())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the tests of each backend: those with its `ops` or `lab`, and of modules that name it in `BACKENDS`."""
    counts = session.config.stash[COLLECTED] = Counter()
    for item in session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        counts.update(getattr(getattr(item, "module", None), "BACKENDS", ()))
        counts.update(parameters[name] for name in ("ops", "lab") if name in parameters)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["backends"] = dict(counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist is done: every worker collects all tests, the process that reports none."""
    counts = getattr(node, "workeroutput", {}).get("backends", {})
    node.config.stash[COLLECTED] = Counter(counts) | node.config.stash.get(COLLECTED, Counter())


def uncovered(config: pytest.Config) -> list[str]:
    """The backends asked for that have no test in this run."""
    wanted = [name.strip() for name in os.environ.get(WANTED, "").split(",") if name.strip()]
    return [name for name in wanted if not config.stash.get(COLLECTED, Counter())[name]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if uncovered(session.config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = config.stash.get(COLLECTED, Counter())
    covered = [f"{name} {version(name)} (cpu)" for name in INSTALLED if counts[name]]
    if covered:
        terminalreporter.write_line(f"backends covered: {', '.join(covered)}")
    for name in uncovered(config):
        why = "no test of it was collected" if name in INSTALLED else "not installed"
        terminalreporter.write_line(f"{WANTED} asks for {name}: {why}", red=True)
