"""One training at a time writes in a folder."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from speclocal.errors import UsageError

NAME = ".lock"


def hold(folder: Path) -> FileLock:
    """The folder's lock, until it is released or what is returned is gone; a killed process holds none.

    UsageError if another one holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / NAME, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(
            f"another training is writing in {folder}", do="wait until it has ended, or name another folder"
        ) from error
    return lock
