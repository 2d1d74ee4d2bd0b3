"""Texts of the target with the states it had while writing them, in a folder that only grows.

texts.jsonl: a line for each text, in the order they ended: {"job", "ids", "own", "row"}; or {"job", "dropped": why}.
states.f16:  rows of [E, D] float16, one for each token that was processed (all but a text's last).
best.i32:    for each of those rows the target's likeliest next token.
about.json:  what wrote it; another target or other taps are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speclocal.errors import UsageError

LARGEST = 65504.0
"""float16 ends here. States beyond it are those of attention sinks, whose exact size says nothing."""


@dataclass(frozen=True)
class Written:
    """One text.

    ids: all tokens. own: the first of them that the target wrote. row: where its states begin; it has len(ids) - 1.
    """

    ids: tuple[int, ...]
    own: int
    row: int


class Store:
    """A folder of written texts. Whatever interrupts the writing, complete texts stay and the rest is cut off."""

    def __init__(self, folder: Path, about: Mapping[str, Any], states: int, hidden: int):
        self.folder, self._shape = folder, (states, hidden)
        folder.mkdir(parents=True, exist_ok=True)
        self._check(dict(about) | {"states": states, "hidden": hidden})
        self.texts: list[Written] = []
        self.jobs: set[int] = set()
        self.dropped: dict[str, int] = {}
        kept = self._read()
        self.rows = sum(len(text.ids) - 1 for text in self.texts)
        self._lines = self._open("texts.jsonl", kept)
        self._states = self._open("states.f16", self.rows * states * hidden * 2)
        self._best = self._open("best.i32", self.rows * 4)

    def _check(self, about: dict[str, Any]) -> None:
        path = self.folder / "about.json"
        if not path.is_file():
            path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        for key, value in about.items():
            if found.get(key) != value:
                raise UsageError(
                    f"{self.folder} holds texts that were written otherwise: {key}",
                    got=value,
                    expected=f"{found.get(key)}, as in its about.json",
                    do="name another folder",
                )

    def _read(self) -> int:
        """Bytes of the lines that are whole."""
        path = self.folder / "texts.jsonl"
        kept = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            if not line.endswith(b"\n"):
                break
            kept += len(line)
            entry = json.loads(line)
            self.jobs.add(entry["job"])
            if "dropped" in entry:
                self.dropped[entry["dropped"]] = self.dropped.get(entry["dropped"], 0) + 1
            else:
                self.texts.append(Written(tuple(entry["ids"]), entry["own"], entry["row"]))
        return kept

    def _open(self, name: str, size: int) -> Any:
        path = self.folder / name
        path.touch()
        os.truncate(path, size)
        return path.open("ab")

    def add(self, job: int, ids: Sequence[int], own: int, states: np.ndarray, best: np.ndarray) -> None:
        """states [len(ids) - 1, E, D], best [len(ids) - 1]. The line comes last: what it speaks of is there."""
        self._states.write(states.astype(np.float16).tobytes())
        self._best.write(best.astype(np.int32).tobytes())
        self._states.flush()
        self._best.flush()
        text = Written(tuple(ids), own, self.rows)
        self._line({"job": job, "ids": list(ids), "own": own, "row": self.rows})
        self.texts.append(text)
        self.jobs.add(job)
        self.rows += len(ids) - 1

    def drop(self, job: int, why: str) -> None:
        """Remember that a text was not kept."""
        self._line({"job": job, "dropped": why})
        self.jobs.add(job)
        self.dropped[why] = self.dropped.get(why, 0) + 1

    def _line(self, entry: dict[str, Any]) -> None:
        self._lines.write(json.dumps(entry).encode() + b"\n")
        self._lines.flush()

    def states(self) -> np.ndarray:
        """[rows, E, D] float16, mapped from the disk."""
        return self._mapped("states.f16", np.dtype(np.float16), (self.rows, *self._shape))

    def best(self) -> np.ndarray:
        """[rows] int32, mapped from the disk."""
        return self._mapped("best.i32", np.dtype(np.int32), (self.rows,))

    def _mapped(self, name: str, kind: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        return np.memmap(self.folder / name, kind, "r", shape=shape) if self.rows else np.zeros(shape, kind)
