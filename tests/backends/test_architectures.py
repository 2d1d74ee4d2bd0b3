"""The model classes of mlx-lm: which take trees, which only chains, which are refused. Configs as mlx-lm spells them.

`pytest --log-cli-level=INFO` shows the table of differences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from speclocal.backends.mlx import loading
from speclocal.core.anatomy import windows
from speclocal.core.tree import DraftTree
from speclocal.errors import ModelError
from tests.backends import tiny_mlx
from tests.backends.play import SHAPES, drafter, host, ids, leaves, path_tokens, play, tokens_of, tree_of

BACKENDS = ("mlx",)
WINDOW = 8
TOLERANCE = 1e-4
"""Of the logits' spread. Mistakes are seen from 1e-2 on."""
SEEN = 1e-2
LAYERS = ["sliding_attention", "full_attention"] * 2
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 96,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
}
TREES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, llama3 rope": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}},
    "llama, windows": {"layer_types": LAYERS, "sliding_window": WINDOW},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": EXPERTS,
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": 512},
    "gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 16.0,
    },
    "gemma3_text": {
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 1000.0,
    },
    "gemma4_text": {
        "sliding_window": WINDOW,
        "layer_types": LAYERS,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {**EXPERTS, "sliding_window": WINDOW},
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "logit_scale": 1.0},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": LAYERS},
    "glm4": {"partial_rotary_factor": 0.5, "rope_traditional": True, "attention_bias": False},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {"sliding_window": WINDOW, "norm_epsilon": 1e-5},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None},
    "deepseek_v3": LATENT,
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
            "type": "default",
        }
    },
}
"""Name, of which the first word is the class, and what its config says besides BASE."""
WINDOWED = [name for name, config in TREES.items() if "sliding_window" in config]
CHAINS: dict[str, dict[str, Any]] = {
    "nanochat": {},
    "gpt2": {"n_ctx": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "layer_norm_epsilon": 1e-5},
    "internlm3": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}
"""Positions are not given to a rope module: own rotary functions, learned embeddings, ropes that change with length."""


def config_of(name: str, more: dict[str, Any]) -> dict[str, Any]:
    return {**BASE, **more, "model_type": name.partition(",")[0]}


class Reference:
    """mlx-lm's model with mlx-lm's caches, one token at a time."""

    def __init__(self, config: dict[str, Any]):
        self._model = tiny_mlx.filled(config, tiny_mlx.random_weights(config))
        made = (
            self._model.make_cache() if hasattr(self._model, "make_cache") else [KVCache() for _ in self._model.layers]
        )
        if not any(isinstance(cache, RotatingKVCache) for cache in made):
            # Classes that have no window in mlx-lm, though their config does. One token at a time needs no mask for it.
            declared = windows(config) or [None] * len(made)
            made = [RotatingKVCache(max_size=window) if window else KVCache() for window in declared]
        self._caches = made

    def rows(self, text: Sequence[int]) -> np.ndarray:
        """[T, V] logits."""
        caches = deepcopy(self._caches)
        return np.stack([np.array(self._model(mx.array([[token]]), cache=caches)[0, -1]) for token in text])


@cache
def made(name: str) -> tuple[Any, Reference]:
    """A target that takes trees, and what it must agree with."""
    config = config_of(name, TREES[name])
    mx.set_default_device(mx.cpu)
    notices: list[str] = []
    target = loading.wrap(tiny_mlx.filled(config, tiny_mlx.random_weights(config)), config, notices.append)
    assert target.trees, notices
    assert not notices
    return target, Reference(config)


def off(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference as a share of the spread."""
    return float(np.abs(got - expected).max() / expected.std())


def differences(name: str, length: int) -> tuple[float, float]:
    """Of a tree behind a prompt, and of one more token after its deepest path was committed."""
    target, reference = made(name)
    prompt = ids(length, seed=length)
    target.prefill([])
    target.prefill(prompt[:-1])
    tree = tree_of(SHAPES["ragged"], prompt[-1], seed=1)
    scored = host(target, target.score(tree).logits)
    in_tree = 0.0
    for leaf in leaves(tree):
        expected = reference.rows(prompt[:-1] + path_tokens(tree, leaf))[length - 1 :]
        in_tree = max(in_tree, off(scored[[0, *tree.path(leaf)]], expected))
    deepest = max(range(len(tree)), key=lambda node: tree.depth[node])
    target.commit(tree.path(deepest))
    text = [*prompt[:-1], *path_tokens(tree, deepest), 5]
    after = off(host(target, target.score(DraftTree.chain(5)).logits)[0], reference.rows(text)[-1])
    return in_tree, after


@pytest.mark.parametrize("name", TREES)
def test_trees_and_commits(name):
    """Within the window, where there is one, and five windows later."""
    (tree, commit), (far_tree, far_commit) = differences(name, 4), differences(name, 5 * WINDOW)
    logging.info("%-20s tree %.0e, commit %.0e, past the window %.0e", name, tree, commit, max(far_tree, far_commit))
    assert max(tree, commit, far_tree, far_commit) <= TOLERANCE


@pytest.mark.parametrize("name", TREES)
def test_text_with_drafts(name):
    """Greedy, through a window of 8, with drafts that hit and miss."""
    target, reference = made(name)
    prompt = ids(5)
    expected = tokens_of(play(target, drafter("none", None, ""), prompt, 40))
    rounds = play(target, drafter("mixed", None, "", prompt + expected), prompt, 40)
    assert tokens_of(rounds) == expected
    text = prompt + expected
    assert [int(row.argmax()) for row in reference.rows(text[:-1])[len(prompt) - 1 :]] == expected


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("mistake", ["node index as position", "siblings visible", "rows stay"])
def test_mistakes_are_seen(name, mistake):
    """In every class: else its exactness would prove nothing."""
    made(name)
    with tiny_mlx.mutant(mistake):
        assert max(differences(name, 4)) > SEEN


@pytest.mark.parametrize("name", WINDOWED)
def test_an_ignored_window_is_seen(name):
    made(name)
    with tiny_mlx.mutant("window ignored"):
        assert max(differences(name, 5 * WINDOW)) > SEEN


@pytest.mark.parametrize("name", CHAINS)
def test_chains_only(name):
    """One notice says so; what chains give is exact."""
    config = config_of(name, CHAINS[name])
    notices: list[str] = []
    target = loading.wrap(tiny_mlx.filled(config, tiny_mlx.random_weights(config)), config, notices.append)
    assert not target.trees
    assert [("drafts become chains" in notice, name in notice) for notice in notices] == [(True, True)]
    text = ids(24)
    target.prefill(text[:9])
    got = host(target, target.score(DraftTree.chain(text[9], text[10:])).logits)
    assert off(got, Reference(config).rows(text)[9:]) <= TOLERANCE


GATED = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
}
MAMBA = {
    "state_size": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}
INDEXED = {**LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16}


@pytest.mark.parametrize(
    ("name", "more", "what"),
    [
        ("qwen3_next", GATED, "ArraysCache"),
        ("mamba", MAMBA, "ArraysCache"),
        ("deepseek_v32", INDEXED, "CacheList"),
    ],
)
def test_states_that_cannot_be_cut_back_are_refused(name, more, what):
    """By the name of what holds them, before any token is decoded."""
    config = config_of(name, more)
    with pytest.raises(ModelError, match=rf"{name} cannot.*{what}") as error:
        loading.wrap(loading.build(config), config, lambda text: None)
    assert error.value.exit_code == 1


def test_unknown_classes_are_refused():
    with pytest.raises(ModelError, match=r"nothing_known.*--backend torch"):
        loading.build(config_of("nothing_known", {}))
