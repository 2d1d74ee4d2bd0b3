"""Targets in 4 and 8 bits, as mlx-community publishes them: loaded as they are, exact with every drafter."""

from __future__ import annotations

import json
import threading

import pytest

from speclocal.core.sampling import Sampling
from speclocal.core.tree import DraftTree
from tests.backends.play import SHAPES, Shaped, accepted_length, host, ids, play, tokens_of, tree_of

mx = pytest.importorskip("mlx.core")

from mlx_lm.models.cache import KVCache  # noqa: E402
from mlx_lm.utils import load_model, quantize_model, save_config, save_model  # noqa: E402

from speclocal.backends.mlx.loading import load, read_config, spelled_for  # noqa: E402
from tests.backends import tiny_mlx  # noqa: E402
from tests.backends.random_heads import attach  # noqa: E402

BACKENDS = ("mlx",)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """(bits, dtype) -> a folder written with mlx-lm's own functions, as its converter does."""
    plain = tmp_path_factory.mktemp("plain")
    tiny_mlx.save("llama", plain, num_hidden_layers=3, head_dim=32)

    def make(bits, dtype="float32"):
        config = read_config(plain)
        model, config = load_model(plain, lazy=True, model_config=spelled_for(config, untied=True))
        model.set_dtype(getattr(mx, dtype))
        model, config = quantize_model(model, config, group_size=32, bits=bits)
        folder = tmp_path_factory.mktemp(f"bits{bits}")
        save_model(folder, model)
        save_config(config, folder / "config.json")
        return folder

    return make


def plain_by_mlx_lm(folder, prompt, n):
    """Greedy text by mlx-lm's model with mlx-lm's cache, token by token."""
    model, _ = load_model(folder, model_config=spelled_for(read_config(folder), untied=True))
    cache, out, todo = [KVCache() for _ in model.layers], [], list(prompt)
    while len(out) < n:
        for token in todo:
            logits = model(mx.array([[token]]), cache=cache)
        todo = [int(mx.argmax(logits[0, -1]))]
        out += todo
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_text_is_that_of_the_same_quantised_model(quantised, bits, kv_bits):
    folder, prompt = quantised(bits), ids(7)
    target = load(folder, pytest.fail, kv_bits=kv_bits)
    assert target.trees
    assert "quantization" in json.loads((folder / "config.json").read_text())
    expected = tokens_of(play(target, Shaped(((),), [], luck=0.0), prompt, 40))
    if kv_bits is None:
        assert expected == plain_by_mlx_lm(folder, prompt, 40)
    for shape in SHAPES.values():
        rounds = play(target, Shaped(shape, prompt + expected, luck=0.8), prompt, 40)
        assert tokens_of(rounds) == expected
        assert accepted_length(rounds) > 1.3


@pytest.mark.parametrize("name", ["eagle", "eagle3", "p_eagle", "medusa", "medusa shared"])
def test_heads_read_a_quantised_target(quantised, name):
    """The text stays that of the quantised target (DRF-05)."""
    target, prompt = load(quantised(4), pytest.fail), ids(7)
    expected = tokens_of(play(target, Shaped(((),), [], luck=0.0), prompt, 24))
    for sampling in (Sampling(), Sampling(temperature=2.0, seed=4)):
        if not sampling.greedy:
            expected = tokens_of(play(target, Shaped(((),), [], luck=0.0), prompt, 24, sampling))
        rounds = play(target, attach(tiny_mlx, target, name, "tree"), prompt, 24, sampling)
        assert tokens_of(rounds) == expected
        assert any(len(r.tree) > 2 for r in rounds)
        target.tap(())


def test_bits_matter(quantised):
    """Else the folder was not read as it is."""
    rows = {}
    for bits in (4, 8):
        target = load(quantised(bits), pytest.fail)
        target.prefill(ids(9))
        rows[bits] = host(target, target.score(DraftTree.chain(1)).logits)
    assert abs(rows[4] - rows[8]).max() > 1e-2


def test_16_bit_scales_stay(quantised):
    """On request other number types; by itself a quantised checkpoint keeps its own, on a CPU too."""
    folder = quantised(4, "bfloat16")
    assert load(folder, pytest.fail).dtype == "bfloat16"
    assert load(folder, pytest.fail, dtype="float32").dtype == "float32"


def test_work_belongs_to_one_thread():
    target = tiny_mlx.new("llama")
    errors = []

    def elsewhere():
        try:
            target.score(tree_of(SHAPES["full"], 1))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert errors == ["MLX work belongs to the thread that loaded the model"]
