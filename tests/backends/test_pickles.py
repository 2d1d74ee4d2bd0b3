"""Weights in pickles for backends that read safetensors only: converted once, tensors only (SEC-01)."""

from __future__ import annotations

import importlib
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from speclocal import backends
from speclocal.backends.torch import pickles
from speclocal.convert import model_folder as model_folder_of
from speclocal.errors import ModelError
from speclocal.sources import Local, cache_folder
from tests.backends.folders import answer, model_folder, one_line
from tests.backends.pickles import pickle


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    return made


@pytest.fixture
def source(tmp_path):
    made = tmp_path / "source"
    made.mkdir()
    (made / "config.json").write_text("{}")
    return made


def tensors():
    draw = torch.Generator().manual_seed(1)
    made = {f"w{i}": torch.randn(10, 10, generator=draw) for i in range(6)}
    return {**made, "half": made["w0"].to(torch.bfloat16), "whole": torch.arange(7)}


def same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def stored(place):
    return {name: t for file in place.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_keep_names_types_and_values(source, place, name, zipped):
    torch.save(tensors(), source / name, _use_new_zipfile_serialization=zipped)
    pickles.convert(source, place)
    same(stored(place), tensors())
    assert sorted(file.name for file in place.iterdir()) == ["config.json", "model.safetensors"]


def test_tied_and_transposed_weights(source, place):
    weight = torch.randn(8, 6)
    made = {"embed": weight, "head": weight, "turned": weight.T, "part": weight[2:4]}
    torch.save(made, source / "pytorch_model.bin")
    pickles.convert(source, place)
    same(stored(place), made)


def test_large_models_become_shards(source, place, monkeypatch):
    """Each at most as large as the limit; what the index says is where it is."""
    monkeypatch.setattr(pickles, "SHARD", 900)
    made = tensors()
    names = list(made)
    for i, part in enumerate((names[:3], names[3:])):
        torch.save({name: made[name] for name in part}, source / f"pytorch_model-{i}.bin")
    torch.save({"other": torch.zeros(3)}, source / "pytorch_model-9.bin")  # the index does not name it
    index = {name: f"pytorch_model-{int(i >= 3)}.bin" for i, name in enumerate(names)}
    (source / pickles.INDEX).write_text(json.dumps({"weight_map": index}))
    pickles.convert(source, place)
    same(stored(place), made)
    written = json.loads((place / "model.safetensors.index.json").read_text())
    assert set(written["weight_map"]) == set(made)
    for name, file in written["weight_map"].items():
        held = load_file(place / file)
        assert torch.equal(held[name], made[name])
        assert sum(t.nbytes for t in held.values()) <= 900
    assert written["metadata"]["total_size"] == sum(t.nbytes for t in made.values())
    assert not (place / pickles.INDEX).exists()


@pytest.mark.parametrize("held", [{"w": torch.zeros(2), "epoch": 3}, [torch.zeros(2)], torch.zeros(2)])
def test_more_than_tensors_is_refused(source, place, held):
    torch.save(held, source / "pytorch_model.bin")
    with pytest.raises(ModelError, match="hold more than tensors") as error:
        pickles.convert(source, place)
    assert one_line(error) == 1


@pytest.mark.parametrize("content", [b"", b"no pickle at all", None])
def test_what_cannot_be_read(source, place, content):
    if content is not None:
        (source / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError) as error:
        pickles.convert(source, place)
    assert one_line(error) == 1


def test_other_pickles_are_left_alone(source, place, tmp_path):
    """Trainers leave pickles of their own beside the weights."""
    torch.save(tensors(), source / "pytorch_model.bin")
    (source / "training_args.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    pickles.convert(source, place)
    same(stored(place), tensors())
    assert not (tmp_path / "ran").exists()
    assert not (place / "training_args.bin").exists()


# ---- in the engine, with a backend that reads safetensors only


@pytest.fixture
def pickled(lab, tmp_path, monkeypatch, backend_name):
    monkeypatch.setenv("SPECLOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(importlib.import_module(f"speclocal.backends.{backend_name}"), "READS_PICKLES", False)
    folder = model_folder(lab, tmp_path / "model")
    kept = shutil.copytree(folder, tmp_path / "kept")
    pickle(folder)
    return folder, kept


def test_converted_once(build, pickled):
    folder, kept = pickled
    expected = answer(build(target=str(kept))).token_ids
    notices = []
    for said in (1, 1):
        made = build(target=str(folder), allow_pickle=True, notify=notices.append)
        assert answer(made).token_ids == expected
        assert len(notices) == said, "a later start converts nothing"
    (place,) = (cache_folder() / "converted").iterdir()
    assert (place / "model.safetensors").is_file()
    assert (place / "tokenizer.json").is_file()


def test_changed_weights_are_converted_again(build, pickled, lab):
    folder, _ = pickled
    before = answer(build(target=str(folder), allow_pickle=True)).token_ids
    shutil.rmtree(folder)
    pickle(model_folder(lab, folder, seed=5, hidden_size=96))
    assert answer(build(target=str(folder), allow_pickle=True)).token_ids != before


def test_only_on_request(build, pickled):
    with pytest.raises(ModelError, match="allow-pickle"):
        build(target=str(pickled[0]))
    assert not cache_folder().exists()


def test_code_never_runs(build, pickled, tmp_path):
    folder, marker = pickled[0], tmp_path / "marker"
    pickle(folder, runs=f"open({str(marker)!r}, 'w').close()")
    with pytest.raises(ModelError, match="more than tensors"):
        build(target=str(folder), allow_pickle=True)
    assert not marker.exists()
    assert not any((cache_folder() / "converted").iterdir()), "nothing half made is left"


def test_a_pickled_draft_model(build, pickled, folder):
    got = answer(build("draft chain", draft_model=str(pickled[0]), allow_pickle=True))
    assert got.stats.accepted
    assert got.token_ids == answer(build()).token_ids


@pytest.mark.parametrize("name", ["pickles", "x.gguf"])
def test_without_torch(tmp_path, monkeypatch, name):
    """Said in one line, with what to install; not that some module is missing."""
    monkeypatch.setenv("SPECLOCAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(backends, "find_spec", lambda framework: None if framework == "torch" else framework)
    path = tmp_path / name
    if name == "pickles":
        path.mkdir()
        torch.save(tensors(), path / "pytorch_model.bin")
    else:
        path.write_bytes(b"GGUF")
    reads_safetensors = SimpleNamespace(READS_PICKLES=False)
    with pytest.raises(ModelError, match=rf"{name} must be converted first, with torch; pip install torch") as error:
        model_folder_of(Local(path, None, str(path)), reads_safetensors, True, lambda text: None)
    assert one_line(error) == 1
