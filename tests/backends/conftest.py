"""Fixtures of the backend tests: every installed backend's laboratory of tiny models."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest

import speclocal
from speclocal.core.interfaces import Target
from speclocal.engine import Engine, Load
from tests.backends.folders import SIZE, model_folder
from tests.conftest import INSTALLED


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


@pytest.fixture(scope="session")
def folder(lab, tmp_path_factory):
    return model_folder(lab, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def draft_folder(lab, tmp_path_factory):
    return model_folder(lab, tmp_path_factory.mktemp("draft"), noise=0.05)


@pytest.fixture(scope="session")
def build(folder, draft_folder, backend_name):
    """(drafter, text=, depth=, **Load fields) -> Engine"""

    def make(name="none", text=(), depth=4, notify=None, **more) -> Engine:
        method, options, model = name, {}, None
        if name.startswith("draft"):
            method, model = "draft_model", str(draft_folder)
            options = {"depth": str(depth)} | ({"topk": "3", "nodes": "8"} if name.endswith("tree") else {})
        elif name in ("oracle", "wrong", "mixed"):
            method = "scripted"
            options = {"preset": name, "text": ",".join(map(str, text)), "depth": str(depth), "vocab": str(SIZE)}
        fields = {"target": str(folder), "draft_model": model, "backend": backend_name, "device": "cpu", **more}
        return speclocal.load(Load(drafter=method, options=options, **fields), notify)

    return make
