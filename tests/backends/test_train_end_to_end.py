"""`speclocal train` from a model folder to a drafter that drafts for it: every method, on every backend."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from speclocal.cli import main
from speclocal.train.result import FOLDER
from tests.backends.folders import model_folder

METHODS = {
    "eagle3": ("-o", "draft_vocab=128", "-o", "steps=2"),
    "p-eagle": ("-o", "draft_vocab=128", "-o", "depth=3"),
    "medusa": ("-o", "heads=2"),
    "draft-model": ("-o", "layers=1"),
}
TALK = {"messages": [{"role": "user", "content": "ab cd"}, {"role": "assistant", "content": "ef gh ij kl"}]}


@pytest.fixture(scope="module")
def target(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(lab, tmp_path_factory.mktemp("target"), num_hidden_layers=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def speclocal(lab: Any, *args: str) -> Any:
    backend = lab.__name__.rpartition("_")[2]
    result = CliRunner().invoke(main, [*args, "--backend", backend])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("method", METHODS)
def test_a_trained_drafter_drafts(lab: Any, target: Path, data: Path, method: str, tmp_path: Path) -> None:
    prompts, talk = tmp_path / "prompts.txt", tmp_path / "talk.jsonl"
    prompts.write_text("one two\nthree\nfour five six\n")
    talk.write_text(json.dumps(TALK) + "\n")
    texts = data / lab.__name__.rpartition(".")[2]  # the first method writes them, the others find them there
    result = speclocal(
        lab, "train", method, "--target", str(target), "--prompts", str(prompts), "--conversations", str(talk),
        "--data", str(texts), "--out", str(tmp_path / "out"), "--texts", "9", "--slots", "4", "--answer-tokens", "12",
        "--passes", "2", "--batch-rows", "64", *METHODS[method],
    )  # fmt: skip
    made = tmp_path / "out" / FOLDER
    assert result.stdout == f"{made}\n"
    assert len((tmp_path / "out" / "curve.jsonl").read_text().splitlines()) > 2
    card = (made / "README.md").read_text()
    assert "9 texts of" in card
    assert f"--drafter {method.replace('-', '_')}:" in card
    ask = ("generate", "one two three", "--target", str(target), "--greedy", "--max-tokens", "16")
    plain, drafted = (
        json.loads(speclocal(lab, *ask, "--drafter", drafter, "--json").stdout)
        for drafter in ("none", f"{method}:{made}")
    )
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["speculation"]["drafted"] > 0


def test_a_finished_training_is_not_repeated(lab: Any, target: Path, data: Path, tmp_path: Path) -> None:
    """--resume of one that is done measures and writes again, and trains nothing."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one two\nthree\nfour five six\n")
    args = (
        "train", "eagle3", "--target", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "out"),
        "--texts", "4", "--slots", "4", "--answer-tokens", "8", "--passes", "1", "--batch-rows", "64",
        "-o", "draft_vocab=128", "--features", "recompute",
    )  # fmt: skip
    speclocal(lab, *args)
    curve = (tmp_path / "out" / "curve.jsonl").read_bytes()
    weights = (tmp_path / "out" / FOLDER / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "out" / FOLDER)
    speclocal(lab, *args, "--resume")
    assert (tmp_path / "out" / "curve.jsonl").read_bytes() == curve
    assert (tmp_path / "out" / FOLDER / "model.safetensors").read_bytes() == weights
