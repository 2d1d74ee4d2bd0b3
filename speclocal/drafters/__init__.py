"""Drafting procedures, framework-free. A method is a module of its name with `Settings` and `Drafter`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any

from speclocal.errors import UsageError

METHODS = ("none", "ngram", "draft_model", "eagle3", "p_eagle", "eagle", "medusa", "scripted")
HEADS = ("eagle3", "p_eagle", "eagle", "medusa")
"""Methods whose weights were trained for one target: from the one that usually accepts most."""
SHARED = {"eagle3": "eagle"}
"""Methods that are another one's module."""
LOOKUPS = ("ngram",)
"""Methods that may draft beside a head: `eagle3+ngram`."""
MOST_NODES = 128
"""Most tokens a round may draft, for every method."""


def find(method: str) -> ModuleType:
    """The module of a method (`p-eagle` is `p_eagle`); UsageError with near matches for an unknown one."""
    name = method.replace("-", "_")
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=2)
        raise UsageError(
            "unknown drafter",
            got=repr(method),
            expected=f"one of {', '.join(METHODS)}",
            do=f"did you mean {' or '.join(near)}?" if near else None,
        )
    return import_module(f"speclocal.drafters.{SHARED.get(name, name)}")


EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def read_settings(kind: type, method: str, options: Mapping[str, Any]) -> Any:
    """A drafter's `Settings` from option strings; an unknown key is an error that lists the known ones."""
    known = {f.name: f.type for f in fields(kind)}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise UsageError(
                f"the {method} drafter has no setting {name!r}",
                expected=f"one of {', '.join(known)}" if known else "no settings at all",
            )
        values[name] = _read(name, value, str(known[name]))
    return kind(**values)


def _read(name: str, value: Any, type_name: str) -> Any:
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    text = value.strip()
    try:
        if type_name == "int":
            return int(text)
        if type_name == "float":
            return float(text)
        if type_name == "bool":
            return {"true": True, "yes": True, "false": False, "no": False}[text.lower()]
        if type_name.startswith("Literal"):
            return {word: word for word in re.findall(r"[\w]+", type_name.removeprefix("Literal"))}[text]
        if type_name.startswith("tuple"):
            return tuple(int(part) for part in text.split(",") if part)
    except (ValueError, KeyError) as error:
        expected = EXPECTED.get(type_name, "whole numbers separated by commas")
        if type_name.startswith("Literal"):
            expected = "one of " + ", ".join(re.findall(r"\w+", type_name.removeprefix("Literal")))
        raise UsageError(f"impossible {name}", got=repr(value), expected=expected) from error
    return text


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """UsageError unless `value` is a whole number in the range."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"impossible {name}", got=value, expected=f"a whole number from {low} to {high}")


def check_tree(depth: Any, nodes: Any, topk: Any) -> None:
    """UsageError unless a tree of this size can be drafted."""
    check_whole("depth", depth, 0, MOST_NODES)
    check_whole("nodes", nodes, 0, MOST_NODES)
    check_whole("topk", topk, 1, MOST_NODES)


def check_share(name: str, value: Any) -> None:
    """UsageError unless `value` is a number from 0 to 1."""
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"impossible {name}", got=value, expected="a number from 0 to 1")
