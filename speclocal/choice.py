"""Which drafter is meant: method, where its weights are, and the settings it was published with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from speclocal import hub
from speclocal.catalogue import Catalogue
from speclocal.checks import head_files, stored_tensors
from speclocal.core.medusa_layout import is_medusa
from speclocal.drafters import HEADS, LOOKUPS, find
from speclocal.errors import DownloadError, ModelError, SpeclocalError, UsageError
from speclocal.sources import Bundled, Local, Policy, Progress, Source

if TYPE_CHECKING:
    from speclocal.engine import Load

Notify = Callable[[str], None]
AUTO = "auto"
MIXING = ("coupled", "rejection")
"""Rules under which a head and a lookup may draft in turns."""
BUNDLED_METHOD = "eagle3"
"""What comes with speclocal is of this kind."""


@dataclass(frozen=True)
class Choice:
    """A drafter to load.

    sources:  where its weights are, in order of preference; () if it has none, or they lie in the target's folder.
    settings: it was published with; below what the user sets.
    lookup:   the method that drafts beside this one where it can, None for none.
    """

    method: str
    sources: tuple[Source, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    lookup: str | None = None


def parted(drafter: str | None) -> tuple[str | None, str | None]:
    """What a user named without its lookup, and the lookup: `eagle3:source+ngram` → `eagle3:source` and `ngram`.

    The second is None where none is named. UsageError for anything else that is added up.
    """
    text = drafter or ""
    if "+" not in text:
        return drafter, None
    rest, _, lookup = text.rpartition("+")
    if lookup in LOOKUPS and rest.partition(":")[0].replace("-", "_") in HEADS:
        return rest, lookup
    if lookup not in LOOKUPS and "+" not in text.partition(":")[0]:
        return drafter, None  # a source may have a plus in its name
    lookups = " or ".join(f"+{name}" for name in LOOKUPS)
    raise UsageError(
        "no such combination of drafters",
        got=text,
        expected=f"a head ({', '.join(HEADS)}), its weights if they are to be named, and {lookups}",
        do="for example --drafter eagle3:org/name+ngram",
    )


def usual(settings: Load, known: Catalogue, backend: str) -> str:
    """The drafter where none is named: a head that comes with speclocal and is usual for this target, else `ngram`.

    Settings that only n-gram lookup has, and rules that a lookup beside a head cannot have, mean that one alone.
    """
    if settings.verify not in MIXING:
        return "ngram"
    for pairing, sources in known.published(settings.target, BUNDLED_METHOD, backend):
        own = {field.name for field in fields(find(pairing.method).Settings)}
        _, lookup = parted(pairing.usual)
        fits = all(name in own or (lookup and name.startswith(f"{lookup}.")) for name in settings.options)
        if pairing.usual and fits and all(isinstance(source, Bundled) for source in sources):
            return pairing.usual
    return "ngram"


def asked(settings: Load) -> tuple[str, str | None]:
    """Method and weights as the user named them: `method`, `method:source`, or `--draft-model source` alone."""
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


def choose(name: str, source: str | None, target: str, known: Catalogue, backend: str) -> Choice:
    """The drafter the user named; the catalogue knows the weights of a head that was published for the target.

    UsageError if it knows none. Medusa heads may lie in the target's folder.
    """
    if source and name not in ("draft_model", *HEADS):
        raise UsageError(f"the {name} drafter has no weights", got=source, do=f"leave it out: --drafter {name}")
    if source:
        return Choice(name, known.sources(source, backend))
    if name not in HEADS or (name == "medusa" and not known.published(target, name, backend)):
        return Choice(name)
    pairing, sources = known.drafter(target, name, backend)
    return Choice(name, sources, pairing.settings)


def choose_best(
    target: str, local: Local, known: Catalogue, backend: str, policy: Policy, progress: Progress | None, note: Notify
) -> Choice:
    """For `auto`: a head made for the target, else a draft model that is on this machine, else n-gram.

    local: the target. Heads of the catalogue are fetched. One notice says what was chosen and why.
    """
    if local.path.is_dir() and is_medusa(stored_tensors(head_files(local.path))):
        note("drafter auto: medusa, whose heads come with this model")
        return Choice("medusa")
    failed: list[str] = []
    for method in HEADS:
        for pairing, sources in known.published(target, method, backend):
            try:
                found = hub.fetch(sources, policy, progress)
            except (DownloadError, ModelError) as error:
                failed.append(error.what)
                continue
            note(f"drafter auto: {method}, whose head {found.source} was made for this target")
            return Choice(method, sources, pairing.settings)
    why = f"no head for this target can be had ({failed[0]})" if failed else "no head is published for this target"
    for pairing, sources in known.published(target, "draft_model", backend):
        for source in sources:
            try:
                hub.look(source, policy)
            except SpeclocalError:
                continue
            note(f"drafter auto: draft_model with {source}, which is on this machine; {why}")
            return Choice("draft_model", (source,), pairing.settings)
    note(f"drafter auto: ngram; {why}")
    return Choice("ngram")
