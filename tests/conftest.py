"""Fixtures shared by all tests: the array operations of every installed backend, toy targets, golden vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from speclocal import backends
from speclocal.core.interfaces import Ops
from tests.toys import HashTarget

GOLDEN = Path(__file__).parent / "golden"
INSTALLED = [name for name in backends.NAMES if find_spec(name)]


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
