"""Fixtures of the backend tests: every installed backend's laboratory of tiny models."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest

from speclocal import backends
from speclocal.core.interfaces import Target

INSTALLED = [name for name in backends.NAMES if find_spec(name)]


@pytest.fixture(scope="session", params=INSTALLED)
def lab(request: pytest.FixtureRequest) -> ModuleType:
    """`tests.backends.tiny_<name>`: models of every class, the same models untouched, mutants."""
    return import_module(f"tests.backends.tiny_{request.param}")


@pytest.fixture(scope="session")
def backend_name(lab: ModuleType) -> str:
    return lab.__name__.rpartition("_")[2]


@pytest.fixture
def tiny(lab: ModuleType) -> Callable[..., Target]:
    """(kind, **changes) -> a target with an empty cache."""
    return lab.new


@pytest.fixture
def plain(lab: ModuleType) -> Callable[..., list[int]]:
    """(kind, prompt, n, **changes) -> the greedy continuation by the untouched framework."""
    return lab.plain
