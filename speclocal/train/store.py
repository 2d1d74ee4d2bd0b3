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

from speclocal.errors import ModelError, UsageError
from speclocal.train.lock import hold

ABOUT, LINES, STATES, BEST = "about.json", "texts.jsonl", "states.f16", "best.i32"
LARGEST = 65504.0
"""float16 ends here. States beyond it are those of attention sinks, whose exact size says nothing."""


def as_stored(states: np.ndarray) -> np.ndarray:
    """States in float16, the largest cut to what that holds."""
    return np.clip(states, -LARGEST, LARGEST).astype(np.float16)


@dataclass(frozen=True)
class Written:
    """One text.

    ids: all tokens. own: the first of them that the target wrote. row: where its states begin; it has len(ids) - 1.
    """

    ids: tuple[int, ...]
    own: int
    row: int


class Store:
    """A folder of written texts. Whatever interrupts the writing, complete texts stay and the rest is cut off.

    Opening it changes nothing, so that a folder may be read while texts are added to it; the first `add` or `drop` cuts
    off what was interrupted. taps: what the states are, see `Target.tap`. hidden: D. keep: False for texts without
    states. UsageError if the folder's texts were written otherwise, ModelError if they cannot be read.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], taps: Sequence[int], hidden: int, keep: bool = True):
        self.folder, self.taps, self._shape, self._keep = folder, tuple(taps), (len(taps), hidden), keep
        self._about = {**about, "taps": list(taps), "states": len(taps) if keep else 0, "hidden": hidden}
        self._check()
        self.texts: list[Written] = []
        self.jobs: set[int] = set()
        self.dropped: dict[str, int] = {}
        self.rows = 0
        self._kept = self._read()
        self._lines: Any = None
        self._lock: Any = None
        self._states: Any = None
        self._best: Any = None

    def _check(self) -> None:
        path = self.folder / ABOUT
        if not path.is_file():
            if (self.folder / LINES).is_file():
                raise ModelError(f"{path} is missing: nothing says who wrote these texts", do="name another folder")
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        for key, value in self._about.items():
            if found.get(key) != value:
                raise UsageError(
                    f"{self.folder} holds texts that were written otherwise: {key}",
                    got=value,
                    expected=f"{found.get(key)}, as in its about.json",
                    do="name another folder",
                )

    def _read(self) -> int:
        """Bytes of the lines that are whole and whose rows are there: after a power cut files may lack their ends."""
        path = self.folder / LINES
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        held, kept = self._held_rows(), 0
        for number, line in enumerate(lines, 1):
            entry = _entry(line)
            if entry is None and number == len(lines):
                break
            if entry is None or entry.get("row", self.rows) != self.rows:
                raise ModelError(f"line {number} of {path} is broken", do="name another folder")
            rows = len(entry.get("ids", ("",))) - 1
            if self.rows + rows > held:
                break
            kept += len(line)
            self.jobs.add(entry["job"])
            if "dropped" in entry:
                self.dropped[entry["dropped"]] = self.dropped.get(entry["dropped"], 0) + 1
            else:
                self.texts.append(Written(tuple(entry["ids"]), entry["own"], entry["row"]))
                self.rows += rows
        return kept

    def _sizes(self) -> dict[str, int]:
        """Bytes a row takes in each file."""
        return {BEST: 4} | ({STATES: 2 * self._shape[0] * self._shape[1]} if self._keep else {})

    def _held_rows(self) -> int:
        paths = {self.folder / name: size for name, size in self._sizes().items()}
        return min(path.stat().st_size // size if path.is_file() else 0 for path, size in paths.items())

    def _begin(self) -> None:
        if self._lines:
            return
        self._lock = hold(self.folder)
        about = self.folder / ABOUT
        if not about.is_file():
            part = about.with_name(ABOUT + ".part")
            part.write_text(json.dumps(self._about, indent=1) + "\n", encoding="utf-8")
            os.replace(part, about)
        files = {name: self._open(name, self.rows * size) for name, size in self._sizes().items()}
        self._best, self._states = files[BEST], files.get(STATES)
        self._lines = self._open(LINES, self._kept)

    def _open(self, name: str, size: int) -> Any:
        path = self.folder / name
        path.touch()
        os.truncate(path, size)
        return path.open("ab")

    def add(self, job: int, ids: Sequence[int], own: int, states: np.ndarray, best: np.ndarray) -> None:
        """states [len(ids) - 1, E, D], best [len(ids) - 1]. The line comes last: what it speaks of is there."""
        self._begin()
        if self._states:
            self._states.write(states.astype(np.float16).tobytes())
            self._states.flush()
        self._best.write(best.astype(np.int32).tobytes())
        self._best.flush()
        text = Written(tuple(ids), own, self.rows)
        self._line({"job": job, "ids": list(ids), "own": own, "row": self.rows})
        self.texts.append(text)
        self.jobs.add(job)
        self.rows += len(ids) - 1

    def drop(self, job: int, why: str) -> None:
        """Remember that a text was not kept."""
        self._begin()
        self._line({"job": job, "dropped": why})
        self.jobs.add(job)
        self.dropped[why] = self.dropped.get(why, 0) + 1

    def _line(self, entry: dict[str, Any]) -> None:
        self._lines.write(json.dumps(entry).encode() + b"\n")
        self._lines.flush()

    def states(self) -> np.ndarray:
        """[rows, E, D] float16, mapped from the disk."""
        return self._mapped(STATES, np.dtype(np.float16), (self.rows, *self._shape))

    def best(self) -> np.ndarray:
        """[rows] int32, mapped from the disk."""
        return self._mapped(BEST, np.dtype(np.int32), (self.rows,))

    def _mapped(self, name: str, kind: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        return np.memmap(self.folder / name, kind, "r", shape=shape) if self.rows else np.zeros(shape, kind)


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it was cut."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    whole = isinstance(entry, dict) and "job" in entry and ("dropped" in entry or {"ids", "own", "row"} <= entry.keys())
    return entry if whole else None
