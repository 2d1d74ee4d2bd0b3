"""Putting an Engine together: find the weights, load the target, make the drafter fit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from speclocal import catalogue, hub
from speclocal.checks import read_json
from speclocal.choice import AUTO, Choice, asked, choose, choose_best, parted, usual
from speclocal.convert import head_folder, model_folder
from speclocal.core.head_spec import MedusaSpec
from speclocal.core.interfaces import Drafter, Target
from speclocal.core.verify import EXACT, RULES
from speclocal.drafters import HEADS, combined, find, read_settings
from speclocal.engine import Engine, Header, Load
from speclocal.errors import ModelError, UsageError
from speclocal.heads import CHANGED, HeadFiles, load, precision_note, taps_of
from speclocal.loading import check_head_memory, check_memory, load_model
from speclocal.sources import Local, Policy, Progress
from speclocal.text import Text, first_difference

Notify = Callable[[str], None]
TYPICAL = "typical acceptance: not lossless above temperature 0"


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


class Shop:
    """Where the models of one set of settings come from: catalogue, hub, conversion."""

    def __init__(self, settings: Load, note: Notify, progress: Progress | None):
        self.settings, self.note, self.progress = settings, note, progress
        self.backend: ModuleType = import_module("speclocal.backends").load(settings.backend)
        self.backend_name = self.backend.__name__.rpartition(".")[2]
        self.known = catalogue.load()
        self.policy = Policy(settings.offline, settings.allow_pickle, settings.trust_remote_code)

    def target(self) -> Local:
        """The target's files."""
        sources = self.known.sources(self.settings.target, self.backend_name)
        return hub.fetch(sources, self.policy, self.progress, self.note)

    def fetch(self, choice: Choice) -> Local:
        """The files of a drafter that has some of its own."""
        return hub.fetch(choice.sources, self.policy, self.progress, self.note)

    def both(self, choice: Choice) -> tuple[Local, Local | None]:
        """Target and drafter; the disk must have room for both."""
        wanted = [self.known.sources(self.settings.target, self.backend_name)]
        wanted += [choice.sources] if choice.sources else []
        found = hub.fetch_all(wanted, self.policy, self.progress, self.note)
        return found[0], found[1] if choice.sources else None

    def choose(self, settings: Load, target: Local | None = None) -> Choice:
        """The drafter that settings name. target: its files, if they are known."""
        if not (settings.drafter or settings.draft_model):
            settings = replace(settings, drafter=usual(settings, self.known, self.backend_name))
        drafter, lookup = parted(settings.drafter)
        name, source = asked(replace(settings, drafter=drafter))
        if name == AUTO:
            local = target or self.target()
            rest = (self.backend_name, self.policy, self.progress, self.note)
            return choose_best(settings.target, local, self.known, *rest)
        find(name)  # an unknown method is told before anything is fetched
        return replace(choose(name, source, settings.target, self.known, self.backend_name), lookup=lookup)

    def model(self, local: Local) -> Path:
        """A model's folder that the backend can read."""
        return model_folder(local, self.backend, self.settings.allow_pickle, self.note)

    def head(self, local: Local) -> Path:
        """A head's folder with its weights in safetensors."""
        return head_folder(local, self.settings.allow_pickle, self.note)


@_no_collection()
def assemble(settings: Load, notify: Notify, progress: Progress | None) -> Engine:
    """Load everything `settings` names; SpeclocalError says what is wrong with it."""
    if settings.verify not in RULES:
        raise UsageError("unknown acceptance rule", got=settings.verify, expected=f"one of {', '.join(RULES)}")
    notices: list[str] = []

    def note(text: str) -> None:
        notices.append(text)
        notify(text)

    shop = Shop(settings, note, progress)
    choice = shop.choose(settings)
    local, weights = shop.both(choice)
    folder = shop.model(local)
    drafts = shop.model(weights) if weights and choice.method == "draft_model" else None
    head = shop.head(weights) if weights and choice.method in HEADS else None
    check_memory({"target": folder} | ({"draft model": drafts} if drafts else {}), settings, shop.backend, note, head)
    text, target = load_model(folder, shop.backend, settings, note)
    maker = _DrafterMaker(shop, local, folder, target, text)
    made = maker.make(choice, settings.options, weights)
    width = text.size if text.size == target.vocab else f"{target.vocab}, of which {text.size} have a token"
    header = Header(
        target=settings.target,
        revision=local.revision,
        backend=shop.backend_name,
        device=str(getattr(target, "device", "cpu")),
        dtype=str(getattr(target, "dtype", "float32")).removeprefix("torch."),
        context=target.context,
        drafter=made.drafter.name,
        verify=made.verify,
        end_tokens=tuple(text.token(i) or str(i) for i in sorted(text.end_ids)),
        vocabulary=str(width),
        notices=tuple(notices),
        kv_bits=settings.kv_bits,
        head=made.head,
        lossless=made.verify in EXACT,
        caveat=made.caveat,
    )

    def remake(name: str, options: Mapping[str, Any]) -> tuple[Drafter, Header]:
        again = settings.draft_model if name == "draft_model" else None
        made = maker.make(shop.choose(replace(settings, drafter=name, draft_model=again), local), options)
        return made.drafter, replace(
            header,
            drafter=made.drafter.name,
            verify=made.verify,
            notices=tuple(notices),
            head=made.head,
            lossless=made.verify in EXACT,
            caveat=made.caveat,
        )

    return Engine(target, made.drafter, text, header, remake)


@dataclass(frozen=True)
class Made:
    """A drafter that fits.

    verify: the rule in use with it. taps: what it reads of the target. head, caveat: see Header.
    """

    drafter: Drafter
    verify: str
    taps: tuple[int, ...] = ()
    head: str | None = None
    caveat: str = ""


class _DrafterMaker:
    """Makes drafters for one loaded target, and refuses those that do not fit it."""

    def __init__(self, shop: Shop, local: Local, folder: Path, target: Target, text: Text):
        self._shop, self._settings, self._note = shop, shop.settings, shop.note
        self._local, self._folder, self._target, self._text = local, folder, target, text

    def make(self, choice: Choice, options: Mapping[str, Any], weights: Local | None = None) -> Made:
        """The drafter, with the target tapped where it reads.

        weights: its files, if they are here and their need of memory was checked together with the target's.
        """
        kind, lookup = find(choice.method).Settings, None
        if choice.lookup:
            options, lookup = combined.split(kind, choice.lookup, options)
        choices = read_settings(kind, choice.method, {**choice.settings, **options})
        if not self._target.trees:
            choices = self._as_chain(choice.method, choices)
        verify = self._settings.verify
        if choice.method in HEADS:
            made = self._head(choice, choices, verify, weights)
            if choice.lookup:
                made = replace(made, drafter=self._combined(made.drafter, choice.lookup, lookup))
        elif choice.method == "draft_model":
            made = Made(self._draft_model(choice, choices, verify, weights), verify)
        else:
            if verify == "block":
                own = f"those of {choice.method} are checked by rejection sampling"
                self._note(f"block verification is for drawn drafts; {own}")
                verify = "rejection"
            made = Made(find(choice.method).Drafter(choices), verify)
        if verify == "typical":
            made = replace(made, caveat="; ".join(filter(None, (TYPICAL, made.caveat))))
        if made.caveat:
            self._note(made.caveat)
        self._target.tap(made.taps)
        return made

    def _as_chain(self, method: str, choices: Any) -> Any:
        if getattr(choices, "tree", ""):
            raise UsageError("this target cannot check trees exactly", got=f"tree={choices.tree}", do="leave it out")
        if getattr(choices, "topk", 1) == 1:
            return choices
        self._note(f"the {method} drafter drafts chains: this target cannot check trees exactly")
        return replace(choices, topk=1)

    def _combined(self, head: Drafter, method: str, choices: Any) -> Drafter:
        if not self._target.trees:
            choices = self._as_chain(method, choices)
        return combined.Drafter(head, method, choices)

    def _draft_model(self, choice: Choice, choices: Any, verify: str, weights: Local | None) -> Drafter:
        _refuse_block(verify, choices)
        shop, own = self._shop, replace(self._settings, context=None, kv_bits=None, wired_limit=None)
        folder = shop.model(weights or shop.fetch(choice))
        if weights is None:
            check_memory({"draft model": folder}, own, shop.backend, self._note)
        text, model = load_model(folder, shop.backend, own, self._note)
        self._check_vocabulary(text, model)
        return find(choice.method).Drafter(choices, model, self._note)

    def _head(self, choice: Choice, choices: Any, verify: str, weights: Local | None) -> Made:
        _refuse_block(verify, choices, choice.lookup)
        shop, target = self._shop, self._target
        local = weights or (shop.fetch(choice) if choice.sources else self._local)
        folder = shop.head(local)
        head = HeadFiles.read(folder, local.source)
        if not choice.sources and not head.is_medusa:
            raise UsageError(
                f"no {choice.method} drafter is known for {self._settings.target}, and its own files hold none",
                do=f"name its weights: --drafter {choice.method}:org/name",
            )
        if weights is None and choice.sources:
            check_head_memory(folder, target, self._settings, shop.backend)
        drafter, spec = load(head, choice.method, choices, target, shop.backend, self._note)
        changed = isinstance(spec, MedusaSpec) and spec.changes_target
        if changed and local.path.resolve() != self._local.path.resolve():
            raise ModelError(
                "these heads were trained together with their model, which must be the target",
                got=f"--target {self._settings.target}",
                do=f"type --target {local.source} --drafter {choice.method}",
            )
        config = read_json(self._folder / "config.json")
        gguf = self._local.path.is_file()
        if not changed and (
            text := precision_note(head.config, config, self._settings.dtype, gguf, self._local.revision)
        ):
            self._note(text)
        return Made(drafter, verify, taps_of(spec), f"{choice.method}:{local.source}", CHANGED if changed else "")

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


def _refuse_block(verify: str, choices: Any, lookup: str | None = None) -> None:
    """Block verification is for chains that are drawn."""
    if verify == "block" and lookup:
        raise UsageError(
            "block verification checks drawn drafts, a lookup draws none",
            got=f"+{lookup}",
            do=f"leave +{lookup} out, or type --verify rejection",
        )
    if verify == "block" and (choices.topk > 1 or getattr(choices, "tree", "")):
        got = f"topk={choices.topk}" if choices.topk > 1 else f"tree={choices.tree}"
        raise UsageError("block verification checks chains", got=got, expected="topk=1 and no tree")
