"""The package map, the dependency direction, and what `--help` may import."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = {
    "speclocal": ROOT / "speclocal",
    "speclocal.backends": ROOT / "backends",
    "speclocal.models": ROOT / "models",
}

# What the modules of an area may import of the project. An area is the longest matching prefix.
ALLOWED = {
    "speclocal.errors": set(),
    "speclocal.core": {"core", "errors"},
    "speclocal.drafters": {"drafters", "core", "errors"},
    "speclocal.backends": {"backends", "core", "errors"},
    "speclocal.models": set(),
    "speclocal.sources": {"errors"},
    "speclocal.checks": {"errors", "sources"},
    "speclocal.disk": {"errors", "sources", "checks"},
    "speclocal.wheel": {"errors", "sources", "checks", "disk"},
    "speclocal.hub": {"errors", "sources", "checks", "disk", "wheel"},
    "speclocal.catalogue": {"errors", "sources"},
    "speclocal.config": {"errors", "sources"},
    "speclocal.detokenize": {"errors"},
    "speclocal.text": {"errors", "detokenize"},
    "speclocal.gguf": {"errors", "text"},
    "speclocal.stream": {"core", "errors", "text"},
    "speclocal.engine": {"core", "errors", "sources", "stream", "text", "assemble"},
    "speclocal.convert": {"checks", "errors", "gguf", "sources"},
    "speclocal.loading": {"core", "checks", "text"},
    "speclocal.heads": {"core", "drafters", "checks", "errors", "loading"},
    "speclocal.choice": {"core", "drafters", "catalogue", "checks", "errors", "hub", "sources"},
    "speclocal.assemble": {
        "engine", "core", "drafters", "catalogue", "checks", "choice", "convert", "errors", "heads", "hub", "loading",
        "sources", "text",
    },
    "speclocal.train": {
        "train", "engine", "assemble", "core", "drafters", "catalogue", "checks", "errors", "heads", "loading",
        "sources", "text",
    },
    "speclocal.probe": {"assemble", "core", "drafters", "engine", "errors", "heads", "loading", "sources"},
    "speclocal.ui": {"ui", "core", "engine", "errors", "sources"},
    "speclocal.cli": {
        "cli", "ui", "engine", "core", "config", "catalogue", "convert", "disk", "drafters", "errors", "hub", "probe",
        "sources", "train", "__version__",
    },
    "speclocal.__main__": {"cli"},
    "speclocal": {"engine"},
}  # fmt: skip

# Which area alone may import a library.
OWNERS = {
    "torch": ("speclocal.backends.torch",),
    "triton": ("speclocal.backends.torch",),
    "mlx": ("speclocal.backends.mlx",),
    "mlx_lm": ("speclocal.backends.mlx",),
    "transformers": ("speclocal.backends.torch", "speclocal.text"),
    "rich": ("speclocal.ui",),
    "prompt_toolkit": ("speclocal.ui",),
    "click": ("speclocal.cli",),
    "huggingface_hub": ("speclocal.hub",),
    "gguf": ("speclocal.gguf",),
    "filelock": ("speclocal.train.lock",),
}


def modules() -> dict[str, Path]:
    """Every module of the project by dotted name."""
    out = {}
    for name, folder in PACKAGE.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            out[".".join([name, *(p for p in parts if p != "__init__")])] = path
    return out


def imported(path: Path) -> set[str]:
    """Dotted names a file imports, type-checking blocks left out, imports inside functions included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def area_of(module: str) -> str:
    return max((a for a in ALLOWED if module == a or module.startswith(a + ".")), key=len)


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_follow_the_dependency_direction(module: str) -> None:
    allowed = ALLOWED[area_of(module)]
    for name in imported(modules()[module]):
        parts = name.split(".")
        if parts[0] == "speclocal":
            assert len(parts) > 1, f"{module} imports the whole package"
            part = parts[1]
            assert part in allowed, f"{module} may not import {name}"
            if part == "backends" and module.count(".") > 1:
                assert parts[2] == module.split(".")[2], f"{module} imports another backend: {name}"
        elif parts[0] in OWNERS:
            owners = OWNERS[parts[0]]
            assert any(module == o or module.startswith(o + ".") for o in owners), f"{module} may not import {parts[0]}"


def test_the_checker_sees_a_forbidden_import(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from speclocal.engine import Engine\n    import torch\n")
    assert {"speclocal.engine.Engine", "torch"} <= imported(file)


def test_packages_listed_are_the_folders_there_are() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {
        ".".join([name, *path.parent.relative_to(folder).parts])
        for name, folder in PACKAGE.items()
        for path in folder.rglob("__init__.py")
    }
    assert listed == found


def test_no_place_or_tool_of_a_workplace_is_named() -> None:
    words = ("/work" + "/", "farm" + "-", "/root" + "/")
    for folder in ("speclocal", "backends", "models", "scripts", "tests", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".toml", ".md", ".sh", ""} and path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                assert not any(word in text for word in words), path
