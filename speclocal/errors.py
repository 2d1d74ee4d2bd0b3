"""The errors a user can cause. One line each: what failed, what was got, what was expected, what to do."""

from __future__ import annotations


class SpeclocalError(Exception):
    """Base of every expected failure; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, what: str, *, got: object = None, expected: str | None = None, do: str | None = None):
        parts = [what]
        if got is not None:
            parts.append(f"got {got}")
        if expected:
            parts.append(f"expected {expected}")
        self.what = what
        super().__init__("; ".join([", ".join(parts)] + ([do] if do else [])))


class UsageError(SpeclocalError):
    """A value the user typed is impossible: refused before any model is touched (exit code 2)."""

    exit_code = 2


class ModelError(SpeclocalError):
    """A model or drafter cannot be found, read or used."""


class DownloadError(SpeclocalError):
    """A download failed, or is needed while offline."""


class ContextError(SpeclocalError):
    """The prompt does not fit the context."""
