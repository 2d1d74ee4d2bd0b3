"""How trained heads are written: the layouts that other engines load.

Each function takes tensors by normalised name (`core.heads.identify`) and gives those of the file, and config.json.
What a config says of the target by name is left to `name_target`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from speclocal.core.eagle_config import IDS
from speclocal.core.head_spec import EagleSpec, MedusaSpec
from speclocal.heads import CHOICES
from speclocal.train import tensors as stored
from speclocal.train.material import Material
from speclocal.train.vocabulary import DraftVocabulary

Tensors = dict[str, np.ndarray]
Published = tuple[Tensors, dict[str, Any]]
FORMAT = "0.9.0"
"""Version of the speculators layout that is written."""
FIRST = re.compile(r"^layers\.0\.")


def eagle3(
    params: Mapping[str, np.ndarray], spec: EagleSpec, vocabulary: DraftVocabulary, material: Material
) -> Published:
    """SpecForge / SGLang layout, flat: no embedding, tables of the draft vocabulary always.

    The states are named so that every engine reads the same ones. vLLM, speculators and we take the top level, where i
    is the state after i layers; SGLang takes only the nested list, where i is the output of layer i, and without one
    the usual three.
    """
    tensors = {FIRST.sub("midlayer.", name): value for name, value in params.items()}
    layer = _layer(spec, material)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        "draft_vocab_size": spec.draft_vocab,
        "norm_before_residual": spec.norm_before_residual,
        IDS: list(spec.taps),
    }
    if spec.target_hidden != spec.hidden:
        config["target_hidden_size"] = spec.target_hidden
    layers = material.facts.layers
    if spec.taps != (2, layers // 2, layers - 3) and spec.taps[0] > 0:
        config["eagle_config"] = {IDS: [tap - 1 for tap in spec.taps], "use_aux_hidden_state": True}
    return tensors | _tables(vocabulary), config


def p_eagle(
    params: Mapping[str, np.ndarray], spec: EagleSpec, vocabulary: DraftVocabulary, material: Material
) -> Published:
    """Layout of `speculators`, nested: the one P-EAGLE layout an engine serves (vLLM)."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": spec.suggested_depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config: dict[str, Any] = {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_version": FORMAT,
        "draft_vocab_size": spec.draft_vocab,
        "target_hidden_size": None if spec.target_hidden == spec.hidden else spec.target_hidden,
        IDS: list(spec.taps),
        "mask_token_id": spec.mask_token,
        "embed_requires_grad": True,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": "", "architectures": list(material.config.get("architectures") or [])},
        },
        "transformer_layer_config": _layer(spec, material),
    }
    tensors = dict(params)
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    return tensors | (_tables(vocabulary) if spec.mapped else {}), config


MedusaLayout = Literal["version2", "original", "vllm"]


def medusa(
    params: Mapping[str, np.ndarray],
    spec: MedusaSpec,
    layout: MedusaLayout,
    choices: Sequence[Sequence[int]] = (),
    output: np.ndarray | None = None,
) -> Published:
    """`version2`: blocks only, the output matrix is the target's. `original`: a matrix of each head. `vllm`: one matrix
    for all, `output` [V, H]; vLLM loads no other.

    choices: the calibrated tree.
    """
    tensors: Tensors = {}
    for name, value in params.items():
        _, h, rest = name.split(".", 2)
        if rest == "output.weight":
            tensors[f"{h}.{spec.blocks}.weight"] = value
        else:
            _, j, kind = rest.split(".")
            tensors[f"blocks.{h}.layers.{j}.{kind}" if layout == "vllm" else f"{h}.{j}.linear.{kind}"] = value
    config: dict[str, Any] = {"hidden_size": spec.hidden, "vocab_size": spec.vocab, "base_model_name_or_path": ""}
    if layout == "vllm":
        assert output is not None
        tensors["lm_heads.0.weight"] = output
        config |= {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": spec.heads}
        config |= {"num_hidden_layers": spec.blocks, "truncated_vocab_size": spec.vocab}
        config |= {"original_lm_head": True, "medusa_fc_bias": spec.bias}
    else:
        config |= {"medusa_num_heads": spec.heads, "medusa_num_layers": spec.blocks}
        config |= {"version": "2"} if layout == "version2" else {}
    if choices:
        config[CHOICES] = [list(path) for path in choices]
    return tensors, config


def name_target(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The config with the target's name or folder where its layout has a place for it."""
    if "base_model_name_or_path" in config:
        return config | {"base_model_name_or_path": name}
    if "speculators_config" in config:
        about = config["speculators_config"]
        return config | {"speculators_config": about | {"verifier": about["verifier"] | {"name_or_path": name}}}
    return config


def write(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], dtype: stored.DType) -> Path:
    """model.safetensors and config.json, each whole or not at all; the config comes last and so marks a whole folder.

    Medusa heads that are no layout of vLLM's go by the name their readers look for, medusa_lm_head.safetensors. Returns
    the weights' file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("medusa_lm_head.safetensors" if "medusa_num_heads" in config else "model.safetensors")
    stored.write(path, tensors, dtype)
    part = folder / "config.json.part"
    part.write_text(json.dumps({**config, "torch_dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / "config.json")
    return path


def _layer(spec: EagleSpec, material: Material) -> dict[str, Any]:
    """The head's decoder layers as a Llama config. Without scaling `rope_scaling` is null, as older readers want it."""
    target = material.config
    return {
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": dict(spec.rope_scaling) if spec.rope_scaling else None,
        "attention_bias": spec.attention_bias,
        "mlp_bias": False,
        "vocab_size": spec.vocab,
        "max_position_embeddings": int(target.get("max_position_embeddings") or 2048),
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _tables(vocabulary: DraftVocabulary) -> Tensors:
    return {"d2t": vocabulary.d2t.astype(np.int64), "t2d": vocabulary.t2d}
