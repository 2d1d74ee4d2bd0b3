"""What training writes is read back as the same drafter: heads draft the logits of the training's own forward pass."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from speclocal.core.eagle_config import IDS
from speclocal.core.fixed_tree import FixedTree
from speclocal.core.growth import Beam
from speclocal.core.head_spec import Overrides
from speclocal.drafters.medusa import Settings as MedusaDrafting
from speclocal.errors import ModelError
from speclocal.heads import CHOICES, HeadFiles, load
from speclocal.train.eagle_body import Kept, causal
from speclocal.train.objectives import eagle3, medusa, p_eagle
from speclocal.train.published import name_target, write
from speclocal.train.tensors import from_bfloat16, read, to_bfloat16
from tests.backends.bench_heads import Bench
from tests.backends.golden_training import material, states_of, to_numpy
from tests.core.golden_heads import target_folder

TOLERANCE = 1e-4
SHOWS = 100 * TOLERANCE
LENGTH = 12
USUAL, OTHERS = (2, 4, 5), (1, 3, 7, 8)


class Trained:
    """An objective over a golden target, with tensors that are nowhere 0 or 1 and states of uneven sizes."""

    def __init__(self, bench: Bench, name: str, module: Any, settings: Any, taps: tuple[int, ...], place: Any):
        self.target = bench.target(name)
        draw = np.random.default_rng(7)
        config = json.loads((target_folder(name) / "config.json").read_text())
        shape = (len(taps) + 1, self.target.facts.hidden)
        self.material = material(
            self.target,
            name,
            taps,
            config=config,
            counts=draw.permutation(128) + 1,
            scales=draw.uniform(0.5, 4.0, shape).astype(np.float32),
        )
        self.objective = module.make(settings, self.material)
        self.held = {
            key: (value + 0.1 * draw.standard_normal(value.shape)).astype(np.float32)
            for key, value in self.objective.initial(0).items()
        }
        self.params = {key: self.target.ops.array(value) for key, value in self.held.items()}
        ids = draw.integers(0, 128, (1, LENGTH + 1)).astype(np.int32)
        self.tokens = ids[:, 1:]
        self.states = states_of(self.target, ids[:, :-1], taps)
        self.folder = place
        self.tensors, self.config = self.objective.files(self.held)
        write(place, self.tensors, self.config, "float32")

    def fed(self) -> Any:
        """[1, S, A * H] as the training reads them."""
        states = self.states[..., :-1, :] / self.material.scales[:-1]
        return self.target.ops.array(states.reshape(1, LENGTH, -1).astype(np.float32))

    def back(self, lab: Any, spec: Any = None) -> Any:
        """The head as it is loaded from the folder."""
        files = HeadFiles.read(self.folder, "test")
        found, names = files.identify(self.target, Overrides())
        assert found.notices == ()
        backend = import_module(f"speclocal.backends.{lab.__name__.rpartition('_')[2]}")
        return backend.load_head(self.folder, spec or found, names, self.target)

    def spec(self) -> Any:
        return HeadFiles.read(self.folder, "test").identify(self.target, Overrides())[0]

    def taps(self) -> Any:
        return self.target.ops.array(self.states[0, :, :-1])


@pytest.fixture(scope="module")
def bench(lab, tmp_path_factory) -> Bench:
    return Bench(lab, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module", params=[USUAL, OTHERS], ids=["usual", "others"])
def eagle(request, bench, tmp_path_factory) -> Trained:
    settings = eagle3.Settings(draft_vocab=48, steps=2)
    return Trained(bench, "eagle3", eagle3, settings, request.param, tmp_path_factory.mktemp("eagle3"))


def same_head(found: Any, wanted: Any) -> bool:
    """Without what the layout does not store: the trained depth of an EAGLE-3 head."""
    return replace(found, suggested_depth=None) == replace(wanted, suggested_depth=None)


def two_steps(trained: Trained) -> list[np.ndarray]:
    """Logits of the last row at the first step, and at the second on the token that follows."""
    body, params, array = trained.objective._body, trained.params, trained.target.ops.array
    spec = trained.objective.spec
    kept = [Kept() for _ in range(spec.layers)]
    bias = array(causal(np.tril(np.ones((1, LENGTH, LENGTH), bool))))
    hidden, found = body.fuse(params, trained.fed()), []
    for s in range(2):
        ids = np.roll(trained.tokens, -s, 1)
        emb = trained.target.embed(array(ids))
        x = body.step(params, emb, hidden, body.rope(np.arange(LENGTH)[None] + s), kept, bias)
        y, hidden = body.out(params, x)
        found.append(to_numpy(y[0, -1] @ params["lm_head.weight"].T))
    return found


def drafted(trained: Trained, head: Any) -> list[np.ndarray]:
    array = trained.target.ops.array
    first = head.extend(trained.tokens[0].tolist(), trained.taps())
    token = int(np.roll(trained.tokens, -1, 1)[0, -1])
    second = head.step(Beam(array([token]), array([0]), 1, array([[1]])))
    return [to_numpy(first)[0], to_numpy(second)[0]]


def distance(got: Any, wanted: Any) -> float:
    return max(float(np.abs(g - w).max()) for g, w in zip(got, wanted, strict=True))


def replace_folder(trained: Trained, folder: Any) -> Trained:
    other = object.__new__(Trained)
    other.__dict__ |= trained.__dict__ | {"folder": folder}
    return other


def test_eagle3(eagle, lab):
    assert same_head(eagle.spec(), eagle.objective.spec)
    assert distance(drafted(eagle, eagle.back(lab)), two_steps(eagle)) <= TOLERANCE
    head = eagle.back(lab)
    assert to_numpy(head.ids).tolist() == eagle.objective._vocabulary.ids.tolist()


def test_eagle3_that_is_read_otherwise(eagle, lab):
    wanted = two_steps(eagle)
    for changes in ({"rope_theta": 3.0}, {"norm_before_residual": True}, {"norm_output": True}):
        assert distance(drafted(eagle, eagle.back(lab, replace(eagle.spec(), **changes))), wanted) > SHOWS


def test_eagle3_whose_states_are_not_scaled_back(eagle, lab, tmp_path):
    """The tensors as they were trained, without `fold`."""
    write(tmp_path, eagle.tensors | {"fc.weight": eagle.held["fc.weight"]}, eagle.config, "float32")
    assert distance(drafted(eagle, replace_folder(eagle, tmp_path).back(lab)), two_steps(eagle)) > SHOWS


def test_layers_as_every_engine_counts_them(eagle):
    """At the top level states after so many layers; for SGLang outputs of layers, unless they are its own choice."""
    assert eagle.config[IDS] == list(eagle.material.taps[:-1])
    nested = eagle.config.get("eagle_config")
    if eagle.material.taps[:-1] == USUAL:
        assert nested is None
    else:
        assert nested == {IDS: [tap - 1 for tap in OTHERS], "use_aux_hidden_state": True}
    assert not any(name.startswith("layers.0.") for name in eagle.tensors)
    assert {"midlayer.hidden_norm.weight", "d2t", "t2d"} <= set(eagle.tensors)


@pytest.fixture(scope="module", params=[False, True], ids=["mask row", "whole table"])
def parallel(request, bench, tmp_path_factory) -> Trained:
    settings = p_eagle.Settings(depth=4, draft_vocab=48, embedding=request.param)
    return Trained(bench, "eagle3", p_eagle, settings, USUAL, tmp_path_factory.mktemp("p_eagle"))


def test_p_eagle(parallel, lab):
    assert parallel.spec() == parallel.objective.spec
    sample = p_eagle.Sample(np.full(3, LENGTH - 1), np.arange(1, 4))
    true = np.tril(np.ones((LENGTH, LENGTH), bool))
    y = parallel.objective.outputs(parallel.params, parallel.tokens, parallel.fed(), sample, true)
    wanted = to_numpy(y[0, LENGTH - 1 :] @ parallel.params["lm_head.weight"].T)
    got = to_numpy(parallel.back(lab).extend(parallel.tokens[0].tolist(), parallel.taps(), masks=3))
    assert distance(got, wanted) <= TOLERANCE
    for broken in ({"mask_token": 5}, {"layers": 1}):
        head = parallel.back(lab, replace(parallel.spec(), **broken))
        assert distance(to_numpy(head.extend(parallel.tokens[0].tolist(), parallel.taps(), masks=3)), wanted) > SHOWS
    sample = p_eagle.Sample(np.full(3, LENGTH - 1), np.array([1, 2, 2]))
    y = parallel.objective.outputs(parallel.params, parallel.tokens, parallel.fed(), sample, true)
    assert distance(to_numpy(y[0, LENGTH - 1 :] @ parallel.params["lm_head.weight"].T), got) > SHOWS


def medusa_of(bench: Bench, layout: str, place: Any) -> Trained:
    settings = medusa.Settings(heads=3, blocks=2, layout=layout)
    return Trained(bench, "medusa1", medusa, settings, (), place)


@pytest.mark.parametrize("layout", medusa.LAYOUTS)
def test_medusa(bench, lab, layout, tmp_path):
    trained = medusa_of(bench, layout, tmp_path)
    found = HeadFiles.read(tmp_path, "test").identify(trained.target, Overrides())[0]
    stored = layout == "vllm"
    assert found == replace(trained.objective.spec, own_output=layout != "version2", shared_output=stored)
    feature = trained.target.ops.array(trained.states[0, 5, -1])
    wanted = [to_numpy(trained.objective.logits(trained.params, h, feature[None])[0]) for h in range(3)]
    got = to_numpy(trained.back(lab).predict(feature))
    assert distance(got, wanted) <= TOLERANCE
    assert distance(got[[1, 0, 2]], wanted) > SHOWS
    one = trained.back(lab, replace(found, blocks=1))
    assert distance(to_numpy(one.predict(feature)), wanted) > SHOWS


def test_the_calibrated_tree_is_the_default(bench, lab, tmp_path):
    trained = medusa_of(bench, "version2", tmp_path)
    tree = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0), (2,))
    trained.objective.tree = tree
    write(tmp_path, *trained.objective.files(trained.held), "float32")
    files = HeadFiles.read(tmp_path, "test")
    backend = import_module(f"speclocal.backends.{lab.__name__.rpartition('_')[2]}")

    def fixed(**settings: Any) -> FixedTree | None:
        drafter, _ = load(files, "medusa", MedusaDrafting(**settings), trained.target, backend, print)
        return drafter._fixed

    assert fixed() == FixedTree.of(tree)
    assert fixed(nodes=3) == FixedTree.of(tree[:3]) != FixedTree.of(tree).cut(5, 3)
    assert fixed(depth=1, topk=2) == FixedTree.of([(0,), (1,)])
    assert fixed(topk=1) is None
    assert fixed(tree="likeliest") is None
    assert len(fixed(tree="medusa")) > 10
    for wrong in ([[1, 0], [0]], [[0, "a"]], 5, [[]]):
        config = files.config | {CHOICES: wrong}
        with pytest.raises(ModelError, match=CHOICES):
            load(replace(files, config=config), "medusa", MedusaDrafting(), trained.target, backend, print)


def test_bfloat16(tmp_path):
    """Rounded to the nearest, ties to even, as torch does; read back as what was written."""
    halves = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-7, 0.0, -0.0], np.float32)
    assert from_bfloat16(to_bfloat16(halves)).tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7, -1 - 2**-7, 0.0, 0.0]
    odd = np.array([np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    assert np.array_equal(from_bfloat16(to_bfloat16(odd)), [np.inf, -np.inf, np.nan, np.inf], equal_nan=True)
    cut = (halves.view(np.uint32) >> 16).astype(np.uint16)
    assert to_bfloat16(halves).tolist() != cut.tolist()
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    tensors = {"a": values, "d2t": np.arange(3), "t2d": np.array([True, False, True])}
    write(tmp_path, tensors, {}, "bfloat16")
    path = tmp_path / "model.safetensors"
    assert np.array_equal(read(path, "a"), from_bfloat16(to_bfloat16(values)))
    assert read(path, "d2t").dtype == np.int64
    assert read(path, "t2d").tolist() == [True, False, True]
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["config.json", "model.safetensors"]
    with pytest.raises(LookupError):
        read(path, "b")


def test_a_head_in_bfloat16(eagle, lab, tmp_path):
    write(tmp_path, eagle.tensors, eagle.config, "bfloat16")
    head = replace_folder(eagle, tmp_path).back(lab)
    assert TOLERANCE < distance(drafted(eagle, head), two_steps(eagle)) < 0.3


def test_the_target_is_named(bench, tmp_path):
    heads, parallel = medusa_of(bench, "version2", tmp_path), p_eagle.Settings(depth=3, draft_vocab=48)
    assert name_target(heads.config, "a/b")["base_model_name_or_path"] == "a/b"
    trained = Trained(bench, "eagle3", p_eagle, parallel, USUAL, tmp_path / "parallel")
    assert name_target(trained.config, "a/b")["speculators_config"]["verifier"]["name_or_path"] == "a/b"
    assert trained.config["speculators_config"]["verifier"]["name_or_path"] == ""
