"""What users type as a model, and what is refused of files on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speclocal import hub
from speclocal.checks import refuse_code
from speclocal.errors import ModelError, UsageError
from speclocal.sources import Policy, Repo, parse
from tests.core.mock_hub import safetensors, sharded

pytestmark = pytest.mark.usefixtures("caches")
SHARD = "model-00002-of-00002.safetensors"


def _folder(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


# ---- what users type


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", Repo("org/name")),
        ("org/name@main", Repo("org/name", "main")),
        ("org/name@refs/pr/1", Repo("org/name", "refs/pr/1")),
        ("org/name:file.gguf", Repo("org/name", None, "file.gguf")),
        ("org/name@v1:sub/file.gguf", Repo("org/name", "v1", "sub/file.gguf")),
        ("smollm2-135m", None),
    ],
)
def test_parse(text, expected):
    assert parse(text) == expected
    assert expected is None or str(expected) == text


@pytest.mark.parametrize("text", ["./nowhere", "/nowhere/at/all", "lost.gguf", "a/b/c", "org/name:../x.gguf", "~/x"])
def test_parse_refuses_what_is_nowhere(text):
    with pytest.raises(UsageError, match="no such model"):
        parse(text)


def test_a_folder_on_disk_beats_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse("org/name") == Path("org/name")


# ---- safety


def test_pickles_in_a_local_folder(tmp_path):
    folder = _folder(tmp_path / "m", {"config.json": b'{"a": 1}', "head.pt": b"pickled"})
    with pytest.raises(ModelError, match=r"got head\.pt"):
        hub.fetch([folder])
    assert hub.fetch([folder], Policy(allow_pickle=True)).path == folder
    (folder / "model.safetensors").write_bytes(safetensors())
    assert hub.fetch([folder]).path == folder


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling_odd.OddModel"}}, "modeling_odd.py"),
        ({"auto_map": {"AutoConfig": "other/repo--config_odd.OddConfig"}}, "other/repo--config_odd.py"),
        ({"auto_map": {"AutoTokenizer": [None, "fast_odd.Tok"]}}, "fast_odd.py"),
        ({"model_file": "run_me.py"}, "run_me.py"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_model_needs_the_switch(tmp_path, config, named, file):
    folder = _folder(tmp_path / "m", {file: json.dumps(config).encode()})
    with pytest.raises(ModelError, match=f"got {named} named in {file}.*--trust-remote-code"):
        refuse_code(folder, trust_remote_code=False)
    refuse_code(folder, trust_remote_code=True)


def test_plain_configs_ask_for_no_code(tmp_path):
    refuse_code(_folder(tmp_path / "m", {"config.json": b'{"auto_map": {}}', "tokenizer_config.json": b"[]"}), False)


# ---- broken files


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.safetensors": safetensors()}, r"config\.json is missing"),
        ({"config.json": b"{}"}, r"config\.json is missing or unreadable"),
        ({"config.json": b'{"a": 1}'}, "no weights"),
        ({"config.json": b'{"a": 1}', "model.safetensors": safetensors()[:-7]}, "1,0[0-9]{2} bytes where its header"),
        ({"config.json": b'{"a": 1}', "model.safetensors": b"\xff" * 100}, "no valid header"),
        ({"config.json": b'{"a": 1}', "model.safetensors": b""}, "no valid header"),
        ({"config.json": b'{"a": 1}', "m-00001-of-00002.safetensors": safetensors()}, r"m\.safetensors\.index\.json"),
        ({"config.json": b'{"a": 1}', "m.safetensors.index.json": b"[]"}, "no index of shards"),
        ({k: v for k, v in sharded().items() if k != SHARD}, f"{SHARD} is missing"),
    ],
)
def test_broken_folders_are_refused_by_name(tmp_path, files, message):
    with pytest.raises(ModelError, match=message):
        hub.fetch([_folder(tmp_path / "m", files)])


def test_local_folder_and_gguf(tmp_path, no_network):
    no_network()
    folder = _folder(tmp_path / "m", sharded())
    assert hub.fetch([folder]) == hub.Local(folder, None, str(folder))
    (folder / "x.gguf").write_bytes(b"GGUF....")
    (folder / "y.gguf").write_bytes(b"<html>")
    assert hub.fetch([folder / "x.gguf"]).path == folder / "x.gguf"
    with pytest.raises(ModelError, match=r"y\.gguf is no GGUF file"):
        hub.fetch([folder / "y.gguf"])
