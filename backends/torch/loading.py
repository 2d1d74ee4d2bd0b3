"""Loading a model folder: what is refused, which precision, packed layers, the parity probe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from speclocal.backends.torch.kernels.attention import NAME, attention
from speclocal.backends.torch.linear import pack
from speclocal.backends.torch.quantized import make_cache
from speclocal.backends.torch.target import TorchTarget
from speclocal.core.anatomy import context_of, refuse_recurrent
from speclocal.core.parity import probe
from speclocal.errors import ModelError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

AttentionInterface.register(NAME, attention)


def load(
    folder: Path,
    notify: Callable[[str], None],
    *,
    dtype: str = "auto",
    device: str = "auto",
    context: int | None = None,
    kv_bits: int | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    taps: Sequence[int] = (),
) -> TorchTarget:
    """Load a folder in Hugging Face format.

    dtype `auto`: the checkpoint's on CUDA, float32 on CPU (where 16-bit arithmetic is no faster). kv_bits: 4 or 8 bits
    for keys and values, None for the model's own numbers. Raises ModelError for models that cannot be decoded exactly
    or whose requirements are not installed.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    on = device_of(device)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from error
    refuse_recurrent(config.get_text_config().to_dict())
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
    return wrap(model, notify, context, kv_bits, taps)


def _unusable(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"cannot load {folder.name}: {str(error).strip().splitlines()[0]}")


def wrap(
    model: Any,
    notify: Callable[[str], None],
    context: int | None = None,
    kv_bits: int | None = None,
    taps: Sequence[int] = (),
) -> TorchTarget:
    """A Target around a model that is loaded already; probes it and falls back to chains if trees are not exact."""
    model.set_attn_implementation(NAME)
    if model.device.type == "cpu":
        pack(model)
    target = TorchTarget(model, context_of(model.config.get_text_config().to_dict(), context, notify), taps)
    target.cache = make_cache(kv_bits)
    # Rounding differs with the number of rows; in a quantised cache a last bit may decide between two codes.
    fine = target.dtype == torch.float32 and kv_bits is None
    probe(target, type(model).__name__, 1e-3 if fine else 0.15, notify)
    return target


def device_of(name: str) -> torch.device:
    """The device meant by a name; UsageError for one there is not."""
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
