"""Weights of a GGUF file, de-quantised once into safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from speclocal.errors import ModelError


def convert(path: Path, folder: Path) -> None:
    """Write config.json and model.safetensors into `folder`; in float32, which holds every value of a block exactly."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except (ValueError, OSError, KeyError, NotImplementedError) as error:
        raise ModelError(f"cannot read {path.name}: {str(error).strip().splitlines()[0]}") from error
    config = model.config.to_diff_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = "float32"
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k not in tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n", encoding="utf-8")
