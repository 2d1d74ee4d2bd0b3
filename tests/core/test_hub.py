"""Fetching from a hub: complete, in part, refused, without network, without room."""

from __future__ import annotations

import shutil
import socket
import time
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from speclocal import hub
from speclocal.errors import DownloadError, ModelError
from speclocal.sources import Policy, Repo, parse
from tests.core.mock_hub import GOOD_TOKEN, Recorder, Repository, safetensors, sharded

pytestmark = pytest.mark.usefixtures("caches")
SHARD = "model-00002-of-00002.safetensors"
OFFLINE = Policy(offline=True)
MODEL = Repo("org/model")


# ---- a complete download


def test_download_with_progress_then_no_network(mock, no_network):
    progress = Recorder()
    local = hub.fetch([MODEL], progress=progress)
    total = sum(map(len, sharded().values()))
    assert {file.name: file.read_bytes() for file in local.path.iterdir()} == sharded()
    assert (local.revision, local.source) == ("a" * 40, "org/model")
    assert progress.started == [("org/model", total)]
    assert (progress.count, progress.finished) == (total, 1)
    no_network()
    assert hub.fetch([MODEL]) == local
    assert hub.fetch([MODEL], OFFLINE) == local


def test_only_wanted_files_are_fetched(mock):
    extra = {
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": safetensors(10),
        "original/model.safetensors": safetensors(10),
        "model.gguf": b"GGUF",
        "code.py": b"",
        "image.png": b"",
        "chat_template.jinja": b"x",
        "merges[1].txt": b"y",
    }
    mock.repositories["org/model"].files |= extra
    local = hub.fetch([MODEL])
    assert {file.name for file in local.path.iterdir()} == {*sharded(), "chat_template.jinja", "merges[1].txt"}
    trusted = hub.fetch([MODEL], Policy(trust_remote_code=True))
    assert (trusted.path / "code.py").exists()


def test_one_gguf_file(mock, no_network):
    mock.repositories["org/model"].files["sub/small.gguf"] = b"GGUF" + bytes(100)
    source = Repo("org/model", None, "sub/small.gguf")
    local = hub.fetch([source])
    assert local.path.read_bytes() == b"GGUF" + bytes(100)
    assert local.revision == "a" * 40
    assert mock.fetched() == ["small.gguf"]
    no_network()
    assert hub.fetch([source], OFFLINE) == local
    with pytest.raises(DownloadError, match=r"config\.json of org/model is missing"):
        hub.fetch([MODEL], OFFLINE)


def test_unknown_gguf_file_names_the_others(mock):
    mock.repositories["org/model"].files["small.gguf"] = b"GGUF"
    with pytest.raises(DownloadError, match=r"no file big\.gguf.*small\.gguf"):
        hub.fetch([Repo("org/model", None, "big.gguf")])


def test_refresh_asks_again_and_gets_the_new_commit(mock):
    old = hub.fetch([MODEL])
    mock.repositories["org/model"].sha = "b" * 40
    mock.repositories["org/model"].files["config.json"] = b'{"model_type": "qwen3"}'
    assert hub.fetch([MODEL]) == old
    mock.requests.clear()
    new = hub.fetch([MODEL], Policy(refresh=True))
    assert new.revision == "b" * 40
    assert b"qwen3" in (new.path / "config.json").read_bytes()


# ---- half-finished downloads


def test_a_cut_connection_is_resumed(mock):
    mock.cut[SHARD] = 200_000
    local = hub.fetch([MODEL])
    assert (local.path / SHARD).read_bytes() == sharded()[SHARD]
    assert mock.ranges
    assert all(int(each[6:-1]) > 0 for each in mock.ranges)


def test_an_interrupted_download_goes_on_with_what_is_missing(mock):
    progress = Recorder(stop=450_000)
    with pytest.raises(KeyboardInterrupt):
        hub.fetch([MODEL], progress=progress)
    assert progress.finished == 1
    snapshot = Path(constants.HF_HUB_CACHE) / "models--org--model" / "snapshots" / ("a" * 40)
    kept = {file.name for file in snapshot.iterdir()} if snapshot.exists() else set()
    assert len(kept) < len(sharded())
    with pytest.raises(DownloadError, match="missing"):
        hub.fetch([MODEL], OFFLINE)
    mock.requests.clear()
    again = Recorder()
    local = hub.fetch([MODEL], progress=again)
    assert {file.name for file in local.path.iterdir()} == set(sharded())
    assert set(mock.fetched()) == set(sharded()) - kept
    assert again.count == again.started[0][1] == sum(len(sharded()[name]) for name in set(sharded()) - kept)


@pytest.mark.parametrize("how", ["deleted", "truncated", "garbage", "tokenizer deleted"])
def test_damage_is_told_offline_and_mended_online(mock, how):
    local = hub.fetch([MODEL])
    name = "tokenizer.json" if how == "tokenizer deleted" else SHARD
    victim = (local.path / name).resolve()
    if "deleted" in how:
        (local.path / name).unlink()
        victim.unlink()
    elif how == "truncated":
        victim.write_bytes(victim.read_bytes()[:-1])
    else:  # right size, no header
        victim.write_bytes(bytes(len(victim.read_bytes())))
    with pytest.raises(DownloadError, match=name) as error:
        hub.fetch([MODEL], OFFLINE)
    assert "\n" not in str(error.value)
    mock.requests.clear()
    assert hub.fetch([MODEL]) == local
    assert mock.fetched() == [name]
    assert (local.path / name).read_bytes() == sharded()[name]


@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        ([SHARD], f"{SHARD} is missing"),
        (["*.index.json"], "index.json is missing"),
        (["model*"], "weights are missing"),
        (["config.json"], "config.json of org/model is missing"),
    ],
)
def test_a_snapshot_without_our_listing_is_checked_by_what_it_is(mock, left_out, missing):
    huggingface_hub.snapshot_download("org/model", ignore_patterns=left_out)
    with pytest.raises(DownloadError, match=missing):
        hub.fetch([MODEL], OFFLINE)
    assert len(list(hub.fetch([MODEL]).path.iterdir())) == len(sharded())


# ---- refusals of the hub


@pytest.mark.parametrize(
    ("repo", "token", "gated", "message"),
    [
        ("org/other", None, False, r"no public repository org/other.*if it is private, no token is set"),
        ("org/other", GOOD_TOKEN, False, r"the hub has no repository org/other"),
        ("org/model", "hf_expiredexpiredexpired", False, r"refused the token.*a valid one"),
        ("org/model", None, True, r"gated and no token is set.*accept the licence.*HF_TOKEN"),
        ("org/model", GOOD_TOKEN, True, r"licence of org/model is not accepted.*accept the licence at"),
        ("org/model@v9", None, False, r"org/model has no revision v9"),
        ("org/model@" + "c" * 40, None, False, r"org/model has no revision ccc"),
    ],
)
def test_each_refusal_says_what_it_is(mock, monkeypatch, repo, token, gated, message):
    mock.repositories["org/model"].gated = gated
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(DownloadError, match=message) as error:
        hub.fetch([parse(repo)])
    assert "\n" not in str(error.value)
    assert "hf_good" not in str(error.value)
    assert "hf_exp" not in str(error.value)


def test_a_pin_never_falls_back(mock, no_network):
    mock.repositories["org/model"].revisions = ("main", "v1")
    pinned = hub.fetch([parse("org/model@v1")])
    assert pinned.revision == "a" * 40
    no_network()
    assert hub.fetch([parse("org/model@" + "a" * 40)], OFFLINE).path == pinned.path
    for missing in ("org/model@" + "d" * 40, "org/model@v2", "org/model"):
        with pytest.raises(DownloadError, match="missing on this machine"):
            hub.fetch([parse(missing)], OFFLINE)


def test_no_hub_is_noticed_fast_and_in_one_line():
    began = time.monotonic()
    with pytest.raises(DownloadError, match="hub cannot be reached") as error:
        hub.fetch([MODEL])
    assert time.monotonic() - began < 5
    assert "\n" not in str(error.value)


def test_a_hanging_name_service_is_noticed(monkeypatch):
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(1))
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(DownloadError, match="hub cannot be reached"):
        hub.fetch([MODEL])


@pytest.mark.parametrize("name", ["SPECLOCAL_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_by_environment_makes_no_call(monkeypatch, no_network, name):
    monkeypatch.setenv(name, "1")
    no_network()
    with pytest.raises(DownloadError, match=r"config\.json of org/model is missing.*offline"):
        hub.fetch([MODEL], Policy(refresh=True))


# ---- disk


def test_room_for_all_is_checked_before_the_first_byte(mock, monkeypatch):
    mock.repositories["org/draft"] = Repository(sharded(), sha="e" * 40)
    one = sum(map(len, sharded().values()))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, one + 10))
    with pytest.raises(DownloadError, match=r"not enough disk space.*got 900 kB free, expected 2 MB"):
        hub.fetch_all([[MODEL], [Repo("org/draft")]])
    assert mock.fetched() == []
    assert len(hub.fetch_all([[MODEL]])) == 1


def test_a_disk_that_fills_up_is_told(mock, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(DownloadError, match="is full"):
        hub.fetch([MODEL])


# ---- safety


def test_pickles_need_the_switch(mock):
    mock.repositories["org/model"].files = {"config.json": b'{"a": 1}', "pytorch_model.bin": b"pickled"}
    with pytest.raises(ModelError, match=r"pickles.*got pytorch_model\.bin.*--allow-pickle"):
        hub.fetch([MODEL])
    assert mock.fetched() == []
    local = hub.fetch([MODEL], Policy(allow_pickle=True))
    assert (local.path / "pytorch_model.bin").exists()
    with pytest.raises(ModelError, match="--allow-pickle"):
        hub.fetch([MODEL])
