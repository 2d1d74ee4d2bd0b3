"""The catalogue: which model an alias means on a backend, and which drafters were published for it."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from speclocal.errors import SpeclocalError, UsageError
from speclocal.sources import Repo, Source, Wheel, parse

BACKENDS = ("torch", "mlx")
QUANTISATIONS = ("bf16", "mxfp4", "8bit", "4bit")
Sources = Mapping[str, tuple[Source, ...]]
"""Backend → where to get it, in order of preference."""


@dataclass(frozen=True)
class Anatomy:
    """Dotted paths into the module tree of a family, and what is unusual about it. Defaults: the usual decoder."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    sliding_window: bool = False
    recurrent: bool = False
    softcap: bool = False


@dataclass(frozen=True)
class Model:
    """One alias: a model in one quantisation.

    base:         the publisher's own repository, the name by which drafters know the model.
    also:         other names of `base`.
    quantisation: one of QUANTISATIONS; the first of a model has the short alias.
    context:      longest context it was made for, None: see the model's own config.
    """

    alias: str
    family: str
    base: str
    quantisation: str
    sources: Sources
    context: int | None = None
    also: tuple[str, ...] = ()
    anatomy: Anatomy = field(default_factory=Anatomy)

    def on(self, backend: str) -> tuple[Source, ...]:
        """Its sources on a backend."""
        if backend not in self.sources:
            raise UsageError(
                f"{self.alias} is not published for {backend}",
                expected=f"backend {' or '.join(self.sources)}",
                do="or give a hub id or a folder",
            )
        return self.sources[backend]


@dataclass(frozen=True)
class Pairing:
    """A published drafter.

    targets:   repositories (`base` of a model) it was made for.
    sources:   empty if its weights lie in the target's own checkpoint.
    settings:  of the drafter, below what the user sets.
    usual:     the `--drafter` that drafts for these targets where none is named, with this one; empty for none. It
               comes with speclocal.
    """

    method: str
    targets: tuple[str, ...]
    sources: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    usual: str = ""


@dataclass(frozen=True)
class Catalogue:
    """All of models/*.toml."""

    models: Mapping[str, Model]
    pairings: tuple[Pairing, ...]

    def find(self, text: str) -> Model | None:
        """The entry of an alias (also with an explicit quantisation), or of a repository that is a source of one."""
        if text in self.models:
            return self.models[text]
        for model in self.models.values():
            if text == f"{model.alias}-{model.quantisation}":
                return model
        source = parse(text)
        return self._of_repo(source.id) if isinstance(source, Repo) else None

    def sources(self, text: str, backend: str) -> tuple[Source, ...]:
        """What the user typed as a model → where to get it. Raises UsageError with near matches."""
        if source := parse(text):
            return (source,)
        if model := self.find(text):
            return model.on(backend)
        near = difflib.get_close_matches(text.lower(), self.models, n=4, cutoff=0.5)
        raise UsageError(
            "unknown model",
            got=repr(text),
            expected=f"perhaps {', '.join(near)}" if near else None,
            do="see `speclocal models`; or give a hub id (org/name), a folder or a GGUF file",
        )

    def base(self, target: str) -> str:
        """The publisher's repository of a target (alias, hub id); what was typed if the catalogue does not know it."""
        model = self.find(target)
        return model.base if model else target

    def pairings_of(self, target: str) -> tuple[Pairing, ...]:
        """Every published drafter of a target (alias, hub id)."""
        names = self._names(target)
        return tuple(p for p in self.pairings if names & {t.lower() for t in p.targets})

    def published(self, target: str, method: str, backend: str) -> list[tuple[Pairing, tuple[Source, ...]]]:
        """The drafters of that method for a target, best first, and their sources (none: inside the target)."""
        found = []
        for pairing in self.pairings_of(target):
            if pairing.method == method and (not pairing.sources or backend in pairing.sources):
                texts = pairing.sources.get(backend, ())
                found.append((pairing, tuple(source for text in texts for source in self.sources(text, backend))))
        return found

    def drafter(self, target: str, method: str, backend: str) -> tuple[Pairing, tuple[Source, ...]]:
        """The first published drafter of that method for a target; UsageError if there is none."""
        if found := self.published(target, method, backend):
            return found[0]
        methods = sorted({pairing.method for pairing in self.pairings_of(target)})
        raise UsageError(
            f"no {method} drafter is known for {target} on {backend}",
            expected=f"one of {', '.join(methods)}" if methods else None,
            do=f"name its weights: --drafter {method}:org/name",
        )

    def _names(self, target: str) -> set[str]:
        model = self.find(target)
        if model:
            return {name.lower() for name in (model.base, *model.also)}
        source = parse(target)
        return {source.id.lower()} if isinstance(source, Repo) else set()

    def _of_repo(self, repo: str) -> Model | None:
        name = repo.lower()
        for model in self.models.values():
            ids = (source.id for sources in model.sources.values() for source in sources if isinstance(source, Repo))
            if name in {id.lower() for id in (*ids, model.base, *model.also)}:
                return model
        return None


@cache
def load() -> Catalogue:
    """Read models/*.toml."""
    models: dict[str, Model] = {}
    pairings: list[Pairing] = []
    for file in sorted(files("speclocal.models").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            content = tomllib.loads(file.read_text(encoding="utf-8"))
            for model in _models(file.name.removesuffix(".toml"), content):
                if models.setdefault(model.alias, model) is not model:
                    raise SpeclocalError("two models share an alias", got=model.alias, do="fix models/*.toml")
            pairings += [_pairing(entry) for entry in content.get("drafters", ())]
    return Catalogue(models, tuple(pairings))


def _models(family: str, content: Mapping[str, Any]) -> list[Model]:
    models = []
    for name, entry in content.get("models", {}).items():
        anatomy = Anatomy(**(content.get("anatomy", {}) | entry.get("anatomy", {})))
        kinds = [key for key in entry if key in QUANTISATIONS]
        if unknown := set(entry) - {"base", "context", "also", "anatomy", *kinds}:
            raise SpeclocalError(f"unknown key of model {name}", got=", ".join(sorted(unknown)))
        for kind in kinds:
            models.append(
                Model(
                    alias=name if kind == kinds[0] else f"{name}-{kind}",
                    family=family,
                    base=entry["base"],
                    quantisation=kind,
                    sources={b: tuple(map(_source, each)) for b, each in _by_backend(entry[kind]).items()},
                    context=entry.get("context"),
                    also=tuple(entry.get("also", ())),
                    anatomy=anatomy,
                )
            )
    return models


def _pairing(entry: Mapping[str, Any]) -> Pairing:
    sources = {b: tuple(each) for b, each in _by_backend(entry.get("source", {})).items()}
    return Pairing(entry["method"], tuple(entry["targets"]), sources, entry.get("settings", {}), entry.get("usual", ""))


def _by_backend(value: Any) -> dict[str, list[Any]]:
    """A source or a list of them serves every backend; a table names the backends."""
    if isinstance(value, str | list):
        value = dict.fromkeys(BACKENDS, value)
    return {backend: each if isinstance(each, list) else [each] for backend, each in value.items()}


def _source(value: Any) -> Source:
    if isinstance(value, dict):
        return Wheel(**value)
    source = parse(value)
    if not isinstance(source, Repo):
        raise SpeclocalError("not a source", got=repr(value), expected="org/name")
    return source
