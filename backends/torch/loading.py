"""Loading a model folder: what is refused, which precision, packed layers, the parity probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging as transformers_logging

from speclocal.backends.torch.kernels.attention import NAME, attention
from speclocal.backends.torch.linear import pack
from speclocal.backends.torch.probe import probe
from speclocal.backends.torch.target import TorchTarget
from speclocal.errors import ModelError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DENSE_LAYERS = {"full_attention", "sliding_attention"}

AttentionInterface.register(NAME, attention)


def load(
    folder: Path,
    notify: Callable[[str], None],
    *,
    dtype: str = "auto",
    device: str = "auto",
    context: int | None = None,
    taps: Sequence[int] = (),
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> TorchTarget:
    """Load a folder in Hugging Face format.

    dtype `auto`: the checkpoint's on CUDA, float32 on CPU (where 16-bit arithmetic is no faster). Raises ModelError for
    models that cannot be decoded exactly or whose requirements are not installed.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    on = _device(device)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    refuse_recurrent(config)
    if dtype not in ("auto", *DTYPES):
        raise UsageError("unknown dtype", got=dtype, expected=f"auto, {', '.join(DTYPES)}")
    quantised = getattr(config, "quantization_config", None) is not None
    precision: Any = "auto" if dtype == "auto" else DTYPES[dtype]
    if dtype == "auto" and on.type == "cpu" and not quantised:
        precision = torch.float32
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            config=config,
            dtype=precision,
            attn_implementation=NAME,
            use_safetensors=None if allow_pickle else True,
            weights_only=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            device_map=None if on.type == "cpu" and not quantised else {"": on},
        )
    except UnpicklingError as error:
        raise ModelError(f"the pickled weights of {folder.name} hold more than tensors: not opened") from error
    except (ImportError, OSError, ValueError) as error:  # ImportError: names the quantisation package that is missing
        raise _unusable(folder, error) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers would fill them with random numbers.
        raise ModelError(f"{folder.name} lacks {len(missing)} weights", got=f"no {missing[0]}", do="fetch it again")
    model.eval().requires_grad_(False)
    return wrap(model, notify, context, taps)


def _unusable(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"cannot load {folder.name}: {str(error).strip().splitlines()[0]}")


def wrap(
    model: Any, notify: Callable[[str], None], context: int | None = None, taps: Sequence[int] = ()
) -> TorchTarget:
    """A Target around a model that is loaded already; probes it and falls back to chains if trees are not exact."""
    model.set_attn_implementation(NAME)
    if model.device.type == "cpu":
        pack(model)
    target = TorchTarget(model, context_of(model.config, context, notify), taps)
    probe(target, notify)
    return target


def refuse_recurrent(config: PreTrainedConfig) -> None:
    """ModelError naming the layer type if a layer keeps a state that cannot be cut back."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    odd = sorted(kinds - DENSE_LAYERS - {"attention"})
    if odd or text.model_type in ("mamba", "mamba2", "rwkv", "falcon_mamba", "recurrent_gemma"):
        raise ModelError(
            f"{config.model_type} cannot be decoded speculatively yet: refused drafts would stay in its state",
            got=f"layers of type {', '.join(odd) or text.model_type}",
            expected="attention layers only",
        )


def context_of(config: PreTrainedConfig, asked: int | None, notify: Callable[[str], None]) -> int:
    """Positions the model may use: its own limit, less where longer texts would change the rope of earlier keys."""
    text = config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or 2048)
    rope = getattr(text, "rope_parameters", None) or {}
    original = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in ("longrope", "dynamic") and original and original < limit:
        notify(f"context cut from {limit} to {original} tokens: beyond, this model's rope changes for earlier tokens")
        limit = int(original)
    if asked is not None:
        if asked > limit:
            notify(f"context of {asked} tokens asked for; this model has {limit}")
        limit = min(asked, limit)
    return limit


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError("unknown device", got=name, expected="auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError("unknown device", got=name, expected="auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device", got=name, expected="a machine with CUDA", do="use --device cpu")
    return device
