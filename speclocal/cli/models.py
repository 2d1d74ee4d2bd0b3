"""`speclocal models`: what can be had, what is on disk, fetching and removing."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from speclocal import catalogue, hub
from speclocal.catalogue import BACKENDS, Model
from speclocal.cli.command import Command, Option, debug_option
from speclocal.disk import Item, human, remove, size_of
from speclocal.errors import SpeclocalError, UsageError
from speclocal.sources import Policy, Repo, Source, Wheel, cache_folder, parse
from speclocal.ui.progress import DownloadBar
from speclocal.ui.terminal import Terminal

ANY = Policy(allow_pickle=True)  # to look at what is there, not to load it


@dataclass(frozen=True)
class State:
    """A source on this machine: `yes`, `part` or `no`."""

    source: str
    on_disk: str
    size: int = 0
    path: str | None = None
    revision: str | None = None


def _option(*names: str, **kwargs: Any) -> Any:
    return click.option(*names, cls=Option, **kwargs)


_backend = _option(
    "--backend", type=click.Choice(["auto", *BACKENDS]), default="auto", show_default=True, help="Whose sources."
)
_json = _option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> None:
    """List, fetch, convert and remove models."""
    if context.invoked_subcommand is None:
        context.invoke(list_)


@models.command("list", cls=Command)
@_option("--all", "everything", is_flag=True, help="Every quantisation, and everything else on disk.")
@_backend
@_json
@debug_option
def list_(everything: bool, backend: str, as_json: bool) -> None:
    """Show aliases, their sources, and what is on disk (the default)."""
    backend = _pick(backend)
    items = hub.items()
    rows = [(model, _state(model.on(backend), items)) for model in _on(backend)]
    others = [item for item in items if not _belongs(item, [s for m in _all() for s in _sources(m)])]
    if as_json:
        known = [{"alias": m.alias, "quantisation": m.quantisation, **asdict(state)} for m, state in rows]
        rest = [{"name": item.name, "size": item.size, "path": str(item.path)} for item in others]
        Terminal().json({"backend": backend, "models": known, "others": rest})
        return
    shown = [(m, state) for m, state in rows if everything or state.on_disk != "no" or _is_short(m)]
    table = [("MODEL", "ALSO AS", "SOURCE", "ON DISK")]
    table += [(m.alias, "" if everything else _variants(m, rows), s.source, _disk(s)) for m, s in shown]
    _print_table(table)
    if others:
        _print_table([("OTHERS ON DISK", "SIZE"), *((item.name, human(item.size)) for item in others)], gap=True)
    terminal = Terminal()
    terminal.line()
    terminal.line(f"{human(sum(item.size for item in items))} on disk; own cache {cache_folder()}")


@models.command(cls=Command)
@click.argument("names", nargs=-1, required=True, metavar="MODEL...")
@_option("--drafter", metavar="METHOD", help="Also the published drafter of each model, e.g. eagle3.")
@_option("--update", is_flag=True, help="Ask the hub for a newer version even if a complete one is here.")
@_option("--offline", is_flag=True, help="No network at all: only check what is here.")
@_option("--allow-pickle", is_flag=True, help="Accept pickled weights.")
@_option("--trust-remote-code", is_flag=True, help="Fetch Python code that comes with the model too.")
@_backend
@debug_option
def pull(names: Sequence[str], drafter: str | None, update: bool, backend: str, **policy: bool) -> None:
    """Fetch models: aliases or hub ids."""
    backend = _pick(backend)
    known = catalogue.load()
    wanted = [known.sources(name, backend) for name in names]
    if drafter:
        pairs = [known.drafter(name, drafter.replace("-", "_"), backend) for name in names]
        wanted += [sources for _, sources in pairs if sources]
    terminal = Terminal()
    for local in hub.fetch_all(wanted, Policy(refresh=update, **policy), DownloadBar(), terminal.note):
        terminal.line(f"{local.source}  {local.path}")


@models.command(cls=Command)
@click.argument("names", nargs=-1, required=True, metavar="MODEL...")
@_option("--yes", "-y", is_flag=True, help="Do not ask.")
@debug_option
def rm(names: Sequence[str], yes: bool) -> None:
    """Remove models from disk: aliases, hub ids, or names as `models list` shows them."""
    terminal = Terminal()
    doomed = list({item.path: item for name in names for item in _items_of(name)}.values())
    for item in doomed:
        terminal.line(f"{item.name}  {human(item.size)}  {item.path}")
    if not yes:
        total = human(sum(item.size for item in doomed))
        click.confirm(f"Remove {'this' if len(doomed) == 1 else 'these'} ({total})?", abort=True, err=True)
    for item in doomed:
        remove(item)


@models.command(cls=Command)
@click.argument("name", metavar="MODEL")
@_json
@debug_option
def show(name: str, as_json: bool) -> None:
    """Show all that is known of a model, with its published drafters."""
    facts = _facts(name)
    terminal = Terminal()
    if as_json:
        terminal.json(facts)
        return
    for key, value in facts.items():
        if isinstance(value, str | int):
            terminal.line(f"{key:<13} {value}")
    for backend, states in facts["sources"].items():
        for state in states:
            detail = "  ".join(str(state[key]) for key in ("revision", "path") if state[key])
            terminal.line(f"{backend:<13} {state['source']}  {_disk(State(**state))}  {detail}".rstrip())
    table = [("DRAFTER", "WEIGHTS")]
    table += [(each["method"], each["source"] or "in the model's own checkpoint") for each in facts["drafters"]]
    if len(table) > 1:
        _print_table(table, gap=True)


@models.command(cls=Command)
@click.argument("source", metavar="SOURCE")
@click.argument("out", type=click.Path(path_type=Path), metavar="FOLDER")
@_option("--offline", is_flag=True, help="No network at all; only what is on disk.")
@_option("--allow-pickle", is_flag=True, help="Needed: read pickles, tensors only.")
@_backend
@debug_option
def convert(source: str, out: Path, backend: str, **policy: bool) -> None:
    """Write the pickled weights (.bin, .pt) of a model or drafter head as safetensors.

    SOURCE is an alias, a hub id or a folder; FOLDER is made. Nothing but tensors is read from the pickles.

    \b
      speclocal models convert yuhuili/EAGLE3-LLaMA3.1-Instruct-8B ./eagle3 --allow-pickle
    """
    from speclocal.convert import write_safetensors

    if out.exists():
        raise UsageError("the folder to write is there already", got=str(out), do="name a new one")
    terminal = Terminal()
    sources = catalogue.load().sources(source, _pick(backend))
    local = hub.fetch(sources, Policy(**policy), DownloadBar(), terminal.note)
    write_safetensors(local.path, out, policy["allow_pickle"], terminal.note)
    terminal.line(str(out))


def _facts(name: str) -> dict[str, Any]:
    known = catalogue.load()
    model = known.find(name)
    items = hub.items()
    facts: dict[str, Any] = {"name": name}
    if model:
        facts |= {
            "alias": model.alias,
            "base": model.base,
            "family": model.family,
            "quantisation": model.quantisation,
            "context": model.context,
        }
        facts["sources"] = {b: [asdict(_state([s], items)) for s in each] for b, each in model.sources.items()}
    else:
        facts["sources"] = {"any": [asdict(_state(known.sources(name, "torch"), items))]}
    drafters = known.pairings_of(name)
    facts["drafters"] = [
        {"method": p.method, "source": " or ".join(dict.fromkeys(s for each in p.sources.values() for s in each))}
        for p in drafters
    ]
    return facts


def _pick(backend: str) -> str:
    if backend != "auto":
        return backend
    return "mlx" if importlib.util.find_spec("mlx") else "torch"


def _all() -> list[Model]:
    return list(catalogue.load().models.values())


def _on(backend: str) -> list[Model]:
    return [model for model in _all() if backend in model.sources]


def _sources(model: Model) -> list[Source]:
    return [source for each in model.sources.values() for source in each]


def _is_short(model: Model) -> bool:
    return not model.alias.endswith(f"-{model.quantisation}")


def _variants(model: Model, rows: Sequence[tuple[Model, State]]) -> str:
    """Suffixes of the other quantisations, beside the short alias."""
    if not _is_short(model):
        return ""
    return " ".join(f"-{other.quantisation}" for other, _ in rows if other.base == model.base and not _is_short(other))


def _state(sources: Sequence[Source], items: Sequence[Item]) -> State:
    for source in sources:
        try:
            local = hub.look(source, ANY)
        except SpeclocalError:
            continue
        return State(str(source), "yes", size_of(local.path), str(local.path), local.revision)
    for source in sources:
        if part := sum(item.size for item in items if _is_of(item, source)):
            return State(str(source), "part", part)
    return State(str(sources[0]), "no")


def _disk(state: State) -> str:
    return {"yes": human(state.size), "part": f"{human(state.size)}, not complete", "no": "no"}[state.on_disk]


def _is_of(item: Item, source: Source) -> bool:
    if isinstance(source, Repo):
        return item.name.lower() == source.id.lower()
    return isinstance(source, Wheel) and item.path == hub.place(source).parent


def _belongs(item: Item, sources: Sequence[Source]) -> bool:
    """Whether an item is a source, or was made from the file of one."""
    files = [Path(s.file).stem for s in sources if isinstance(s, Repo | Wheel) and s.file]
    made = any(item.path.name.startswith(stem) for stem in files) and "/" in item.name
    return made or any(_is_of(item, source) for source in sources)


def _items_of(name: str) -> list[Item]:
    items = hub.items()
    if exact := [item for item in items if item.name == name]:
        return exact
    model = catalogue.load().find(name)
    source = parse(name) if not model else None
    if isinstance(source, Path):
        raise UsageError("speclocal removes only what it fetched", got=name, do="remove your own files yourself")
    if not model and not source:
        catalogue.load().sources(name, BACKENDS[0])  # says what is near
    sources = _sources(model) if model else [source] if source else []
    if not (found := [item for item in items if _belongs(item, sources)]):
        raise SpeclocalError(f"{name} is not on this machine", do="see `speclocal models`")
    return found


def _print_table(rows: Sequence[Sequence[str]], gap: bool = False) -> None:
    terminal = Terminal()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if gap:
        terminal.line()
    for row in rows:
        terminal.line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
