"""Disk use: room for downloads, what is there, and removal. No network."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speclocal.errors import DownloadError
from speclocal.sources import cache_folder


@dataclass(frozen=True)
class Item:
    """A folder that holds one model, or one model in another form.

    name: hub id, or `<kind>/<name>` in our own cache (`wheels/…`: unpacked GGUF files; others: made from a model).
    """

    name: str
    path: Path
    size: int


def own_items() -> list[Item]:
    """What our own cache holds: one item a folder of the second level. Listings of the hub are no models."""
    return [
        Item(f"{kind.name}/{folder.name}", folder, size_of(folder))
        for kind in _folders(cache_folder())
        if kind.name != "listings"
        for folder in _folders(kind)
    ]


def remove(item: Item) -> None:
    """Delete an item. Its name goes first: an interrupted removal must not look like a complete model."""
    doomed = item.path.with_name(f".removed-{item.path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        item.path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise DownloadError(f"{item.name} could not be removed", got=error.strerror or str(error)) from error


def need_room(downloads: Sequence[tuple[Path, int]]) -> None:
    """Raise unless every disk has room for the sum of what goes there; `downloads` are (folder, bytes)."""
    needed: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for folder, size in downloads:
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        disk = existing.stat().st_dev
        needed[disk] = needed.get(disk, 0) + size
        folders[disk] = existing
    for disk, size in needed.items():
        free = shutil.disk_usage(folders[disk]).free
        if size > free:
            raise DownloadError(
                f"not enough disk space in {folders[disk]}",
                got=f"{human(free)} free",
                expected=f"{human(size)} for the download",
                do="free some (`speclocal models rm`), or point HF_HOME or SPECLOCAL_CACHE to another disk",
            )


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def human(size: float) -> str:
    """Bytes for people: 1.2 GB."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
