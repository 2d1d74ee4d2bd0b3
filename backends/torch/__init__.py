"""The PyTorch backend: CUDA, and CPU as the embedded default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speclocal.errors import UsageError

if TYPE_CHECKING:
    from speclocal.core.interfaces import Batch, Gradients

READS_PICKLES = True


def load_target(
    folder: Path, notify: Callable[[str], None], *, wired_limit: float | None = None, **options: Any
) -> Any:
    """Load a model folder as a Target; see `loading.load`. UsageError for a wired_limit: only MLX has one."""
    if wired_limit is not None:
        raise UsageError("--wired-limit without effect", got="the torch backend", expected="mlx on Apple Silicon")
    from speclocal.backends.torch.loading import load

    return load(folder, notify, **options)


def load_head(folder: Path, spec: Any, names: Mapping[str, str], target: Any) -> Any:
    """The drafter head in a folder of safetensors, as a module for that target; see `heads.load`."""
    from speclocal.backends.torch.heads import load

    return load(folder, spec, names, target)


def load_training(target: Any) -> tuple[Gradients, Callable[[int], Batch]]:
    """What training needs beside a target: gradients, and batches of so many slots on the target's model."""
    from speclocal.backends.torch import train

    return train.Gradients(target), lambda slots: train.Batch(target, slots)


def on_cpu(device: str) -> bool:
    """Whether a device by this name is the processor; UsageError for one there is not."""
    from speclocal.backends.torch.loading import device_of

    return device_of(device).type == "cpu"


def free_memory(device: str) -> int:
    """Bytes a model may take on this device."""
    import psutil
    import torch

    from speclocal.backends.torch.loading import device_of

    on = device_of(device)
    return psutil.virtual_memory().available if on.type == "cpu" else torch.cuda.mem_get_info(on)[0]


def convert_gguf(path: Path, folder: Path) -> None:
    """De-quantise a GGUF file's weights into a model folder; see `gguf.convert`."""
    from speclocal.backends.torch.gguf import convert

    convert(path, folder)


def convert_pickles(folder: Path, place: Path) -> None:
    """Write a folder's pickled weights as safetensors into another; see `pickles.convert`."""
    from speclocal.backends.torch.pickles import convert

    convert(folder, place)


def describe() -> dict[str, str]:
    """Versions and devices, for `speclocal doctor`."""
    import torch
    import transformers

    from speclocal.backends.torch import linear

    out = {"torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            out[f"cuda:{i}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    packed = "packed linear layers" if linear.available() else "plain linear layers"
    out["cpu"] = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, {packed}"
    return out
