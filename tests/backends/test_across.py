"""The same model folder in every backend: the same logits, the same text, the same draws of a seed."""

from __future__ import annotations

import json
import shutil
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from speclocal.core.interfaces import Target
from speclocal.core.noise import Purpose
from speclocal.core.sampling import Sampling
from speclocal.core.tree import DraftTree
from tests.backends.kinds import KINDS
from tests.backends.play import drafter, host, ids, play, tokens_of
from tests.conftest import INSTALLED

BACKENDS = ("torch", "mlx")
if set(BACKENDS) - set(INSTALLED):
    pytest.skip("needs the torch and the mlx backend", allow_module_level=True)

TOLERANCE = 1e-4
"""Of the logits' spread."""
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32.0, "beta_slow": 1.0}
CHANGES: dict[str, dict[str, Any]] = {
    # No output layer of their own in mlx-lm, nor in any published model.
    "gemma2": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    # mlx-lm computes the exact GELU whatever the config says: with the usual approximation, logits differ by 1e-3.
    "starcoder2": {"hidden_act": "gelu"},
    # mlx-lm rounds the limits of YaRN's ramp whatever the config says.
    "gpt_oss": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": True, **YARN}},
}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 rope": ("llama", {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3}),
    "linear rope": ("llama", {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}),
    "yarn rope": ("qwen3", {"rope_type": "yarn", "rope_theta": 10000.0, **YARN}),
}
"""Models that differ from the tiny one of a class in their rope."""
MODELS = (*KINDS, *ROPES)
SEED = 11


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """model -> a folder as transformers writes it."""

    @cache
    def make(model: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        kind, rope = ROPES.get(model, (model, None))
        changes = CHANGES.get(kind, {}) | ({"rope_parameters": rope} if rope else {})
        import_module("tests.backends.tiny_torch").save(kind, folder, **changes)
        return folder

    return make


def load(name: str, folder: Path) -> Target:
    """The folder in one backend. gpt_oss needs its experts unpacked for mlx-lm, which knows only the quantised ones."""
    if name == "mlx" and json.loads((folder / "config.json").read_text())["model_type"] == "gpt_oss":
        made = folder / "unpacked"
        made.mkdir(exist_ok=True)
        shutil.copy(folder / "config.json", made)
        weights = unpacked(load_file(folder / "model.safetensors"))
        save_file(weights, made / "model.safetensors", metadata={"format": "mlx"})
        folder = made
    return import_module(f"tests.backends.tiny_{name}").load(folder, device="cpu")


def unpacked(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt_oss's experts: `gate_up_proj` [E, D, 2F], columns of both by turns -> [E, F, D] each, as in mlx-lm."""
    out = {}
    for name, value in weights.items():
        part, _, bias = name.rpartition("_bias")
        part, kind = (part, "bias") if part else (bias, "weight")
        if not part.endswith("_proj") or ".experts." not in part:
            out[name] = value
            continue
        value = value if kind == "bias" else value.swapaxes(1, 2)
        if part.endswith("gate_up_proj"):
            stem = part.removesuffix("gate_up_proj")
            out |= {f"{stem}gate_proj.{kind}": value[:, ::2].copy(), f"{stem}up_proj.{kind}": value[:, 1::2].copy()}
        else:
            out[f"{part}.{kind}"] = value.copy()
    return out


def rows(target: Target) -> np.ndarray:
    """[40, V] logits of a text more than twice as long as the window."""
    text = ids(40, seed=4)
    target.prefill([])
    return host(target, target.score(DraftTree.chain(text[0], text[1:])).logits)


def same_logits(torch_folder: Path, mlx_folder: Path) -> None:
    """Off by no more than rounding."""
    expected, got = rows(load("torch", torch_folder)), rows(load("mlx", mlx_folder))
    off = np.abs(got - expected).max() / expected.std()
    assert off <= TOLERANCE, f"logits differ by {off:.1e} of their spread"


def same_text(folder: Path, sampling: Sampling, n: int = 60) -> list[int]:
    """Plain decoding by torch; drafts that hit and miss by mlx, and the other way round."""
    prompt = ids(9, seed=6)
    targets = {name: load(name, folder) for name in BACKENDS}
    expected = tokens_of(play(targets["torch"], drafter("none", None, ""), prompt, n, sampling))
    for name in ("mlx", "torch"):
        made = drafter("mixed", None, "", prompt + expected)
        got = tokens_of(play(targets[name], made, prompt, n, sampling))
        same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), n)
        assert same == n, (
            f"{name} parts at token {same}, {margin(targets['torch'], prompt + expected[:same], sampling)}"
        )
    return expected


def margin(target: Target, text: list[int], sampling: Sampling) -> str:
    """By how much the best next token leads: near 0, rounding decides."""
    target.prefill(text[:-1])
    row = host(target, target.score(DraftTree.chain(text[-1])).logits)[0]
    if sampling.temperature:
        noise = target.ops.noise(sampling.seed, [len(text)], Purpose.TARGET, target.vocab)
        row = row / sampling.temperature + host(target, noise)[0]
    second, first = np.sort(row)[-2:]
    return f"where the best token leads by {first - second:.1e}"


@pytest.mark.parametrize("model", MODELS)
def test_same_logits(folder_of, model):
    folder = folder_of(model)
    assert "rope_theta" not in json.loads((folder / "config.json").read_text()), "the spelling of transformers 5"
    same_logits(folder, folder)


@pytest.mark.parametrize("model", MODELS)
def test_same_greedy_text(folder_of, model):
    same_text(folder_of(model), Sampling())


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_draws_the_same(folder_of, model):
    """Coupled sampling: noise is keyed by seed and position, so text does not depend on the backend."""
    text = same_text(folder_of(model), Sampling(temperature=1.0, seed=SEED))
    assert len(set(text)) >= 12


def older(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 wrote it."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            config[name] = rope.pop(name)
    config["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    if config["model_type"] in ("cohere2", "gemma3_text"):
        config["sliding_window_pattern"] = 1 + config.pop("layer_types").index("full_attention")
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    return config


def changed(folder: Path, place: Path, change) -> Path:
    """A copy with another config."""
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(change(config)))
    return place


@pytest.mark.parametrize("model", MODELS)
def test_older_spelling(folder_of, tmp_path, model):
    """Of both, torch still reads the newer one: the older must mean the same."""
    same_logits(folder_of(model), changed(folder_of(model), tmp_path / "older", older))


def other_theta(config):
    rope = config["rope_parameters"]
    return {**config, "rope_parameters": {**rope, "rope_theta": rope["rope_theta"] / 2}}


def no_scaling(config):
    return {
        **config,
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]},
    }


def other_window(config):
    return {**config, "sliding_window": 15}


def other_layers_slide(config):
    return {**config, "layer_types": config["layer_types"][::-1]}


@pytest.mark.parametrize(
    ("model", "wrong"),
    [
        ("llama", other_theta),
        ("gemma2", other_theta),
        ("llama3 rope", no_scaling),
        ("yarn rope", no_scaling),
        ("mistral", other_window),
        ("gemma2", other_window),
        ("gpt_oss", other_layers_slide),
    ],
)
def test_a_config_read_wrongly_is_seen(folder_of, tmp_path, model, wrong):
    folder = folder_of(model)
    with pytest.raises(AssertionError, match="logits differ"):
        same_logits(folder, changed(folder, tmp_path / "wrong", wrong))


def test_another_seed_draws_otherwise(folder_of):
    folder = folder_of("llama")
    texts = [same_text(folder, Sampling(temperature=1.0, seed=seed), 20) for seed in (SEED, SEED + 1)]
    assert texts[0] != texts[1]
