"""What is wrong with model files on disk, told before anything tries to load them. No network, no framework."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from speclocal.errors import DownloadError, ModelError
from speclocal.sources import Policy, Repo

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_WANTED = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors")
_WEIGHTS = ("model*.safetensors", "medusa_lm_head*.safetensors")
_PICKLED = ("pytorch_model*.bin", "*.pt")
_HEADER_LIMIT = 100_000_000  # the format's own limit


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from disk; {} if the file is missing, unreadable or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def damaged(folder: Path) -> dict[str, str]:
    """File name → what is wrong with it, for every weight file that is there or should be."""
    wrong: dict[str, str] = {}
    names = {path.name for path in folder.glob("*.safetensors")}
    indexed: set[str] = set()
    for index in folder.glob("*.safetensors.index.json"):
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            wrong[index.name] = "is no index of shards"
            continue
        indexed |= {str(name) for name in shards.values()}
    for name in sorted(names | indexed):
        if problem := safetensors_problem(folder / name):
            wrong[name] = problem
    for name in names - indexed:
        if (shard := _SHARD.fullmatch(name)) and int(shard["count"]) > 1:
            index_name = f"{shard['stem']}.safetensors.index.json"
            if not (folder / index_name).exists():
                wrong[index_name] = "is missing"
    return wrong


def safetensors_problem(path: Path) -> str | None:
    """What is wrong with a safetensors file, None if it is whole: its header tells how long it must be."""
    try:
        size = path.stat().st_size
        length, tensors = _header(path, size)
    except OSError:
        return "is missing"
    if not tensors:
        return "has no valid header"
    expected = 8 + length + max(tensor.end for tensor in tensors.values())
    return None if size == expected else f"has {size:,} bytes where its header says {expected:,}"


class _Tensor(NamedTuple):
    """A tensor as the header of its file tells it: number type, shape, first byte and end."""

    kind: str
    shape: list[int]
    start: int
    end: int


def _header(path: Path, size: int) -> tuple[int, dict[str, _Tensor]]:
    """Length of a safetensors header, and its tensors by name; none if it is not valid."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if 0 < length <= min(_HEADER_LIMIT, size) else {}
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            return length, {
                name: _Tensor(str(entry.get("dtype")), list(entry.get("shape", ())), int(span[0]), int(span[1]))
                for name, entry in entries.items()
                for span in [entry["data_offsets"]]
            }
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return length, {}


def stored_tensors(files: Iterable[Path]) -> dict[str, tuple[list[int], str]]:
    """Shape and number type of every tensor in safetensors files, by name."""
    return {
        name: (tensor.shape, tensor.kind)
        for path in files
        for name, tensor in _header(path, path.stat().st_size)[1].items()
    }


def head_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a model or drafter head; [] for none.

    Safetensors of the usual names, else pickles of the usual names, else whatever safetensors there are: folders of
    heads hold other tensors beside the weights.
    """
    for patterns in (_WEIGHTS, _PICKLED, ("*.safetensors",)):
        if files := sorted(path for pattern in patterns for path in folder.glob(pattern)):
            return files
    return []


def weight_sizes(folder: Path, files: Iterable[Path] | None = None) -> dict[str, int]:
    """Number type, as safetensors names it → bytes of a folder's weights that are stored in it.

    files: those that count; None: all safetensors of the folder. Pickles do not tell: theirs count as the type that
    config.json names.
    """
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors") if files is None else files:
        for tensor in _header(path, path.stat().st_size)[1].values():
            sizes[tensor.kind] = sizes.get(tensor.kind, 0) + tensor.end - tensor.start
    if not sizes:
        config = read_json(folder / "config.json")
        named = str(config.get("dtype") or config.get("torch_dtype"))
        kind = {"float32": "F32", "float16": "F16"}.get(named, "BF16")
        sizes[kind] = sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith(PICKLES))
    return sizes


def gguf_problem(path: Path) -> str | None:
    """What is wrong with a GGUF file, as far as its first bytes tell."""
    try:
        with path.open("rb") as file:
            return None if file.read(4) == b"GGUF" else "is no GGUF file"
    except OSError:
        return "is missing"


def check_path(path: Path, allow_pickle: bool = False) -> None:
    """Raise ModelError unless `path` is a whole GGUF file or a whole model folder in Hugging Face format."""
    if path.is_file():
        wrong = {path.name: problem} if (problem := gguf_problem(path)) else {}
    else:
        wrong = {} if read_json(path / "config.json") else {"config.json": "is missing or unreadable"}
        wrong |= damaged(path)
    if wrong:
        raise ModelError(f"model {path} is incomplete", got=describe(wrong), do="fetch or copy it again")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        refuse_pickle((file.name for file in path.iterdir()), str(path), allow_pickle)


def choose(listing: Iterable[str], source: Repo, policy: Policy) -> list[str]:
    """Of the files of a repository, those to have. Subfolders (other formats) and duplicates are left out."""
    names = list(listing)
    if source.file:
        if source.file not in names:
            others = ", ".join(name for name in names if name.endswith(".gguf")) or "none"
            raise DownloadError(f"{source.id} has no file {source.file}", expected=f"one of its GGUF files: {others}")
        return [source.file]
    names = [name for name in names if "/" not in name and not name.startswith("consolidated")]
    endings: tuple[str, ...] = (*_WANTED, ".py") if policy.trust_remote_code else _WANTED
    if not any(name.endswith(".safetensors") for name in names):
        refuse_pickle(names, source.id, policy.allow_pickle)
        endings += PICKLES
    return [name for name in names if name.endswith(endings)]


def size_problem(path: Path, size: int | None) -> str | None:
    """Compare a file with the size it should have (None: unknown)."""
    if not path.is_file():
        return "is missing"
    got = path.stat().st_size
    return None if size is None or got == size else f"has {got:,} bytes instead of {size:,}"


def refuse_pickle(names: Iterable[str], where: str, allow_pickle: bool) -> None:
    """For a model without safetensors: raise unless there are pickles and the user allowed them."""
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if not pickles:
        raise ModelError(f"no weights in {where}", expected="*.safetensors, or org/name:file.gguf")
    if not allow_pickle:
        raise ModelError(
            f"the weights of {where} are pickles, which can run code when they are opened",
            got=pickles[0],
            expected="safetensors",
            do="pass --allow-pickle to read tensors only from them",
        )


def refuse_code(folder: Path, trust_remote_code: bool) -> None:
    """Raise ModelError if the folder asks for Python of its own and the user does not trust it.

    For targets and draft models; heads never run code of their folder, whatever their config says.
    """
    if trust_remote_code or not folder.is_dir():
        return
    for config in ("config.json", "tokenizer_config.json"):
        if code := next(_code_files(read_json(folder / config)), None):
            raise ModelError(
                f"model {folder} wants to run its own code",
                got=f"{code} named in {config}",
                expected="a model class that transformers ships",
                do="read the file, then pass --trust-remote-code if you trust it",
            )


def _code_files(config: dict[str, Any]) -> Iterator[str]:
    if model_file := config.get("model_file"):
        yield str(model_file)
    auto_map = config.get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, dict) else ():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str):
                # `module.Class`, or `org/name--module.Class` for code of another repository
                yield reference.rsplit(".", 1)[0] + ".py"


def describe(wrong: dict[str, str], most: int = 3) -> str:
    """`{file: problem}` as a part of one line."""
    parts = [f"{name} {problem}" for name, problem in sorted(wrong.items())]
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")
