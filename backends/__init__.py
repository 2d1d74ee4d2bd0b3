"""Backends by folder name. Each offers `describe`, `load_target` and `convert_gguf`; `load` imports one on demand."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from speclocal.errors import SpeclocalError, UsageError

NAMES = ("torch",)


def load(name: str = "auto") -> ModuleType:
    """The backend's package. UsageError for an unknown name, SpeclocalError if its framework is not installed."""
    name = NAMES[0] if name == "auto" else name
    if name not in NAMES:
        raise UsageError("unknown backend", got=name, expected=f"auto or one of {', '.join(NAMES)}")
    if find_spec(name) is None:
        raise SpeclocalError(f"the {name} backend cannot start: {name} is not installed", do=f"pip install {name}")
    return import_module(f"speclocal.backends.{name}")
