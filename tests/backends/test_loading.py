"""Which model folders are loaded, what is refused, and in which words."""

from __future__ import annotations

import json
import shutil

import pytest

from speclocal.core.sampling import Sampling
from speclocal.errors import ModelError, SpeclocalError, UsageError
from tests.backends.folders import SIZE, answer, model_folder, one_line


def test_the_header_says_what_is_in_use(build, backend_name, folder):
    header = build("draft tree").header
    assert (header.target, header.backend, header.revision) == (str(folder), backend_name, None)
    assert (header.drafter, header.verify, header.context) == ("draft_model", "coupled", 4096)
    assert (header.device, header.dtype) == ("cpu", "float32")
    assert header.end_tokens == ("</s>",)
    assert header.vocabulary == f"512, of which {SIZE} have a token"
    assert header.notices == ()


def test_recommended_settings_are_the_models(lab, tmp_path, build):
    made = build(
        target=str(model_folder(lab, tmp_path, recommended={"do_sample": True, "temperature": 0.7, "top_k": 9}))
    )
    assert made.sampling({"seed": 5}) == Sampling(temperature=0.7, top_k=9, seed=5)
    assert build().sampling({}) == Sampling()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(build, dtype):
    made = build(dtype=dtype)
    assert made.header.dtype == dtype
    assert len(answer(made, n=5).token_ids) == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int3"), ("device", "gpu"), ("device", "meta"), ("verify", "lucky"), ("backend", "jax")],
)
def test_impossible_values(build, field, value):
    with pytest.raises(UsageError, match=value) as error:
        build(**{field: value})
    assert one_line(error) == 2


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_no_cuda_here(lab, build, device):
    if lab.has_cuda():
        pytest.skip("needs a machine without CUDA")
    with pytest.raises(UsageError, match="no CUDA device") as error:
        build(device=device)
    assert one_line(error) == 2


def test_context_can_be_cut_but_not_stretched(build):
    notices = []
    assert build(context=100).header.context == 100
    assert build(context=10_000, notify=notices.append).header.context == 4096
    assert len(notices) == 1
    assert "10000" in notices[0]


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def damage(copy, how):
    weights = copy / "model.safetensors"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no weights":
        weights.unlink()
    elif how == "empty weights":
        weights.write_bytes(b"")
    elif how == "no config":
        (copy / "config.json").unlink()
    elif how == "broken config":
        (copy / "config.json").write_text("{")
    elif how == "no tokenizer":
        (copy / "tokenizer.json").unlink()
    elif how == "broken tokenizer":
        (copy / "tokenizer.json").write_text("{}")
    elif how == "shard missing":
        (copy / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}})
        )
    elif how == "unknown class":
        (copy / "config.json").write_text(json.dumps({"model_type": "nothing_known", "vocab_size": 512}))
    elif how == "tensor missing":
        import safetensors.numpy as io

        tensors = io.load_file(weights)
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        io.save_file(tensors, weights, metadata={"format": "pt"})


DAMAGES = ["cut", "no weights", "empty weights", "no config", "broken config", "no tokenizer", "broken tokenizer"]


@pytest.mark.parametrize(
    "how",
    [
        *DAMAGES,
        "shard missing",
        "unknown class",
        "tensor missing",
    ],
)
def test_damaged_folders(build, copy, how):
    damage(copy, how)
    with pytest.raises(SpeclocalError) as error:
        build(target=str(copy))
    assert one_line(error) == 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused(build, copy, name):
    (copy / "model.safetensors").rename(copy / name)
    with pytest.raises(ModelError, match=rf"pickle.*{name}.*allow-pickle") as error:
        build(target=str(copy))
    assert one_line(error) == 1


def test_pickles_on_request(lab, build, copy):
    expected = answer(build(target=str(copy))).token_ids
    lab.pickle(copy)
    assert answer(build(target=str(copy), allow_pickle=True)).token_ids == expected


def test_pickles_never_run_code(lab, build, copy, tmp_path):
    """Tensors only, even when pickles are allowed (SEC-01)."""
    marker = tmp_path / "marker"
    lab.pickle(copy, runs=f"open({str(marker)!r}, 'w').close()")
    with pytest.raises(ModelError, match="more than tensors"):
        build(target=str(copy), allow_pickle=True)
    assert not marker.exists()


def test_code_of_the_folder_is_refused(build, copy):
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match=r"evil\.py.*trust-remote-code"):
        build(target=str(copy))


def test_recurrent_models_are_refused_by_name(lab, build, tmp_path):
    lab.save_config("qwen3_next", tmp_path)
    shutil.copy(model_folder(lab, tmp_path / "other") / "model.safetensors", tmp_path)
    shutil.copy(tmp_path / "other" / "tokenizer.json", tmp_path)
    with pytest.raises(ModelError, match="qwen3_next"):
        build(target=str(tmp_path))
