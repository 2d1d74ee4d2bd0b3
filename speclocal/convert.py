"""Weights in other formats become a folder of safetensors: once, in the cache, or where the user wants it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from speclocal.checks import PICKLES, head_files, refuse_pickle
from speclocal.errors import ModelError, UsageError
from speclocal.sources import Local, cache_folder

Notify = Callable[[str], None]


def model_folder(local: Local, backend: ModuleType, allow_pickle: bool, note: Notify) -> Path:
    """A folder in Hugging Face format that the backend can read.

    A GGUF file, and pickles where the backend does not read them, are converted once, into the cache.
    """
    path = local.path
    if path.is_file():
        return _converted(path, [path], _convert_gguf, note)
    if backend.READS_PICKLES or any(path.glob("*.safetensors")):
        return path
    return _converted(path, _pickles(path, allow_pickle), _convert_pickles, note)


def head_folder(local: Local, allow_pickle: bool, note: Notify) -> Path:
    """A folder with the weights of a drafter head in safetensors; pickles are converted once, into the cache."""
    path = local.path
    if path.is_file():
        raise ModelError("a drafter head is a folder", got=path.name, expected="config.json with its weights")
    files = head_files(path)
    if files and files[0].suffix == ".safetensors":
        return path
    refuse_pickle((file.name for file in files), str(path), allow_pickle)
    return _converted(path, files, _convert_pickles, note)


def write_safetensors(path: Path, out: Path, allow_pickle: bool, note: Notify) -> None:
    """Convert the pickles of a model or a drafter head into a new folder `out`.

    UsageError if `out` is there already or nothing is to be converted; ModelError for pickles that are not allowed or
    hold more than tensors.
    """
    if out.exists():
        raise UsageError("the folder to write is there already", got=str(out), do="name a new one")
    if path.is_file():
        raise UsageError("GGUF files are converted when they are loaded", got=path.name, expected="a folder of pickles")
    files = head_files(path)
    if files and files[0].suffix == ".safetensors":
        raise UsageError("the weights are safetensors already", got=files[0].name, expected="pickles (.bin, .pt)")
    _pickles(path, allow_pickle)
    out.parent.mkdir(parents=True, exist_ok=True)
    _make(path, out, _convert_pickles, note)


def _pickles(path: Path, allow_pickle: bool) -> list[Path]:
    files = [file for file in path.iterdir() if file.name.endswith(PICKLES)]
    refuse_pickle((file.name for file in files), str(path), allow_pickle)
    return files


def _converted(path: Path, files: Sequence[Path], convert: Callable[[Path, Path, Notify], None], note: Notify) -> Path:
    """What `convert` makes of `path`, named by the sizes and times of its files."""
    stats = [file.stat() for file in files]
    size, time = sum(stat.st_size for stat in stats), max(int(stat.st_mtime) for stat in stats)
    place = cache_folder() / "converted" / f"{path.stem}-{size:x}-{time:x}"
    if not (place / "config.json").is_file():
        note(f"converting {path.name} once; later starts are fast")
        place.parent.mkdir(parents=True, exist_ok=True)
        _make(path, place, convert, note)
    return place


def _make(path: Path, place: Path, convert: Callable[[Path, Path, Notify], None], note: Notify) -> None:
    """Convert under a temporary name first, so that nothing half made is left."""
    with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        convert(path, made, note)
        shutil.rmtree(place, ignore_errors=True)
        made.rename(place)


def _convert_gguf(path: Path, place: Path, note: Notify) -> None:
    from speclocal.gguf import write_tokenizer

    _torch(path).convert_gguf(path, place)
    if warning := write_tokenizer(path, place):
        note(warning)


def _convert_pickles(path: Path, place: Path, note: Notify) -> None:
    _torch(path).convert_pickles(path, place)


def _torch(path: Path) -> ModuleType:
    """The backend that converts, whichever runs the model."""
    backends = import_module("speclocal.backends")
    if absent := backends.missing("torch"):
        raise ModelError(
            f"{path.name} must be converted first, with {' and '.join(absent)}",
            do=f"{backends.INSTALL['torch']}, or take a model in safetensors",
        )
    return backends.load("torch")
