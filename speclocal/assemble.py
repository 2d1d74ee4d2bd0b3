"""Putting an Engine together: find the weights, load the target, make the drafter fit."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from speclocal import catalogue, hub
from speclocal.checks import PICKLES, read_json, refuse_code, refuse_pickle, weight_sizes
from speclocal.core.anatomy import context_of, first_of, text_of
from speclocal.core.interfaces import Drafter, Target
from speclocal.core.memory import Need, estimate, loaded_bytes, refuse_if_too_large, token_bytes, tokens_that_fit
from speclocal.core.verify import RULES
from speclocal.drafters import find, read_settings
from speclocal.engine import Engine, Header, Load
from speclocal.errors import ModelError, UsageError
from speclocal.sources import Local, Policy, Progress, cache_folder
from speclocal.text import Text, first_difference

Notify = Callable[[str], None]
SURE = 2048
"""Tokens there must be room for where no context is asked for."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Importing the frameworks makes millions of objects that stay: not searching them for garbage saves a quarter."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was:
            gc.enable()


@_no_collection()
def assemble(settings: Load, notify: Notify, progress: Progress | None) -> Engine:
    """Load everything `settings` names; SpeclocalError says what is wrong with it."""
    if settings.verify not in RULES:
        raise UsageError("unknown acceptance rule", got=settings.verify, expected=f"one of {', '.join(RULES)}")
    notices: list[str] = []

    def note(text: str) -> None:
        notices.append(text)
        notify(text)

    name, draft_source = _drafter_of(settings)
    find(name)  # an unknown method is told before anything is fetched
    backend = import_module("speclocal.backends").load(settings.backend)
    backend_name = backend.__name__.rpartition(".")[2]
    known = catalogue.load()
    policy = Policy(settings.offline, settings.allow_pickle, settings.trust_remote_code)
    texts = [settings.target] + ([draft_source] if draft_source else [])
    wanted = [known.sources(text, backend_name) for text in texts]
    locals_ = hub.fetch_all(wanted, policy, progress, note)

    def fetch(source: str) -> Local:
        return hub.fetch(known.sources(source, backend_name), policy, progress, note)

    folders = [model_folder(local, backend, settings.allow_pickle, note) for local in locals_]
    models = {"target": folders[0]} | ({"draft model": folders[1]} if name == "draft_model" else {})
    check_memory(models, settings, backend, note)
    text, target = _load(folders[0], backend, settings, note)
    maker = _DrafterMaker(settings, backend, target, text, note, fetch)
    drafter, verify = maker.make(name, draft_source, settings.options, folders[1] if draft_source else None)
    width = text.size if text.size == target.vocab else f"{target.vocab}, of which {text.size} have a token"
    header = Header(
        target=settings.target,
        revision=locals_[0].revision,
        backend=backend_name,
        device=str(getattr(target, "device", "cpu")),
        dtype=str(getattr(target, "dtype", "float32")).removeprefix("torch."),
        context=target.context,
        drafter=drafter.name,
        verify=verify,
        end_tokens=tuple(text.token(i) or str(i) for i in sorted(text.end_ids)),
        vocabulary=str(width),
        notices=tuple(notices),
        kv_bits=settings.kv_bits,
    )

    def remake(name: str, options: Mapping[str, Any]) -> tuple[Drafter, Header]:
        again = settings.draft_model if name == "draft_model" else None
        name, source = _drafter_of(replace(settings, drafter=name, draft_model=again))
        drafter, verify = maker.make(name, source, options)
        return drafter, replace(header, drafter=drafter.name, verify=verify, notices=tuple(notices))

    return Engine(target, drafter, text, header, remake)


def _drafter_of(settings: Load) -> tuple[str, str | None]:
    """Method and weights of the drafter: `method`, `method:source`, or `--draft-model source` alone."""
    name, _, source = (settings.drafter or ("draft_model" if settings.draft_model else "ngram")).partition(":")
    name = name.replace("-", "_")
    if settings.draft_model and not source and name == "draft_model":
        source = settings.draft_model
    if settings.draft_model and settings.draft_model != source:
        raise UsageError(
            "a draft model and another drafter",
            got=f"{settings.drafter} and {settings.draft_model}",
            do="name one of them",
        )
    if name == "draft_model" and not source:
        raise UsageError(
            "the draft_model drafter needs a model",
            do="name it: --draft-model ALIAS, or --drafter draft_model:org/name",
        )
    return name, source or None


def model_folder(local: Local, backend: ModuleType, allow_pickle: bool, note: Notify) -> Path:
    """A folder in Hugging Face format that the backend can read.

    A GGUF file, and pickles where the backend does not read them, are converted once, into the cache.
    """
    path = local.path
    if path.is_file():
        return _converted(path, [path], _convert_gguf, note)
    if backend.READS_PICKLES or any(path.glob("*.safetensors")):
        return path
    files = [file for file in path.iterdir() if file.name.endswith(PICKLES)]
    refuse_pickle((file.name for file in files), str(path), allow_pickle)
    return _converted(path, files, _convert_pickles, note)


def _converted(path: Path, files: Sequence[Path], convert: Callable[[Path, Path, Notify], None], note: Notify) -> Path:
    """What `convert` makes of `path`, named by the sizes and times of its files. Made under a temporary name first."""
    stats = [file.stat() for file in files]
    size, time = sum(stat.st_size for stat in stats), max(int(stat.st_mtime) for stat in stats)
    place = cache_folder() / "converted" / f"{path.stem}-{size:x}-{time:x}"
    if not (place / "config.json").is_file():
        note(f"converting {path.name} once; later starts are fast")
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as temporary:
            made = Path(temporary) / "model"
            made.mkdir()
            convert(path, made, note)
            shutil.rmtree(place, ignore_errors=True)
            made.rename(place)
    return place


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


def check_memory(folders: Mapping[str, Path], settings: Load, backend: ModuleType, note: Notify) -> None:
    """Refuse, before any weight is read, what cannot fit into memory. folders: what a model is for → where it is.

    Together they must fit with the context asked for, or with 2,048 tokens; where the own context of the first does
    not fit, a notice says what does.
    """
    on_cpu, free = backend.on_cpu(settings.device), backend.free_memory(settings.device)
    configs = {name: read_json(folder / "config.json") for name, folder in folders.items()}
    limits = {name: context_of(config, None, lambda text: None) for name, config in configs.items()}
    wanted = next(iter(limits.values()))
    sure = min(wanted, settings.context or SURE)
    needs: dict[str, Need] = {}
    per_token = 0
    for name, config in configs.items():
        weights, element = _widths(config, settings.dtype, on_cpu)
        bits = settings.kv_bits if name == "target" else None
        loaded = loaded_bytes(weight_sizes(folders[name]), weights)
        needs[name] = estimate(config, loaded, min(sure, limits[name]), bits, element)
        per_token += token_bytes(config, bits, element)
    refuse_if_too_large(needs, free, "cpu" if on_cpu else settings.device)
    if not settings.context and (room := tokens_that_fit(needs.values(), per_token, free)) < wanted:
        note(f"there is memory for about {room} of this model's {wanted} tokens of context; see --context, --kv-bits")


def _widths(config: Mapping[str, Any], dtype: str, on_cpu: bool) -> tuple[int | None, int]:
    """Bytes of a float weight once loaded (None: as stored), and of a number in the cache."""
    quantised = any(config.get(key) for key in ("quantization_config", "quantization"))
    if dtype != "auto":
        return WIDTHS.get(dtype), WIDTHS.get(dtype, 4)
    if on_cpu and not quantised:
        return 4, 4
    stored = str(first_of(text_of(config), "dtype", "torch_dtype") or first_of(config, "dtype", "torch_dtype"))
    return None, WIDTHS.get(stored, 2)


def _load(folder: Path, backend: ModuleType, settings: Load, note: Notify) -> tuple[Text, Target]:
    refuse_code(folder, settings.trust_remote_code)
    text = Text.load(folder, trust_remote_code=settings.trust_remote_code)
    wired = {} if settings.wired_limit is None else {"wired_limit": settings.wired_limit}
    target = backend.load_target(
        folder,
        note,
        dtype=settings.dtype,
        device=settings.device,
        context=settings.context,
        kv_bits=settings.kv_bits,
        allow_pickle=settings.allow_pickle,
        trust_remote_code=settings.trust_remote_code,
        **wired,
    )
    return text, target


class _DrafterMaker:
    """Makes drafters for one loaded target, and refuses those that do not fit it."""

    def __init__(
        self,
        settings: Load,
        backend: ModuleType,
        target: Target,
        text: Text,
        note: Notify,
        fetch: Callable[[str], Local],
    ):
        self._settings, self._backend, self._target, self._text = settings, backend, target, text
        self._note, self._fetch = note, fetch

    def make(
        self, name: str, source: str | None, options: Mapping[str, Any], folder: Path | None = None
    ) -> tuple[Drafter, str]:
        """The drafter, and the acceptance rule really in use with it.

        folder: its weights, if they are here and their need of memory was checked together with the target's.
        """
        method = find(name)
        choices = read_settings(method.Settings, name, options)
        verify = self._settings.verify
        if not self._target.trees and getattr(choices, "topk", 1) > 1:
            choices = replace(choices, topk=1)
            self._note(f"the {name} drafter drafts chains: this target cannot check trees exactly")
        if name != "draft_model":
            if verify == "block":
                self._note(f"block verification is for drawn drafts; those of {name} are checked by rejection sampling")
                verify = "rejection"
            return method.Drafter(choices), verify
        if verify == "block" and choices.topk > 1:
            raise UsageError("block verification checks chains", got=f"topk={choices.topk}", expected="topk=1")
        own = replace(self._settings, context=None, kv_bits=None, wired_limit=None)
        if folder is None:
            folder = model_folder(self._fetch(source or ""), self._backend, own.allow_pickle, self._note)
            check_memory({"draft model": folder}, own, self._backend, self._note)
        text, model = _load(folder, self._backend, own, self._note)
        self._check_vocabulary(text, model)
        return method.Drafter(choices, model, self._note), verify

    def _check_vocabulary(self, text: Text, model: Target) -> None:
        """Both models must mean the same by every id; only padding may differ."""
        difference = first_difference(self._text, text)
        if difference is None and self._text.size != text.size:
            first = min(self._text.size, text.size)
            difference = first, self._text.token(first), text.token(first)
        if difference:
            token, ours, theirs = difference
            raise ModelError(
                f"the draft model has another tokenizer: id {token} differs",
                got=f"{theirs!r} in the draft model" if theirs is not None else "no such token in the draft model",
                expected=f"{ours!r} as in the target" if ours is not None else "no such token, as in the target",
                do="take a draft model of the same family",
            )
        if model.vocab != self._target.vocab:
            shared = min(text.size, self._text.size)
            self._note(f"vocab {self._target.vocab}/{model.vocab}, shared {shared}: padding ids are never proposed")
