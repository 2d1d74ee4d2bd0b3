"""The MLX backend: Apple Silicon through Metal; elsewhere MLX's CPU or CUDA build."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speclocal.core.interfaces import Batch, Gradients

READS_PICKLES = False


def load_target(folder: Path, notify: Callable[[str], None], **options: Any) -> Any:
    """Load a model folder as a Target; see `loading.load`."""
    from speclocal.backends.mlx.loading import load

    return load(folder, notify, **options)


def load_head(folder: Path, spec: Any, names: Mapping[str, str], target: Any) -> Any:
    """The drafter head in a folder of safetensors, as a module for that target; see `heads.load`."""
    from speclocal.backends.mlx.heads import load

    return load(folder, spec, names, target)


def load_training(target: Any) -> tuple[Gradients, Callable[[int], Batch]]:
    """What training needs beside a target: gradients, and batches of so many slots on the target's model."""
    from speclocal.backends.mlx import train

    return train.Gradients(target), lambda slots: train.Batch(target, slots)


def on_cpu(device: str) -> bool:
    """Whether a device by this name is the processor; UsageError for one there is not."""
    import mlx.core as mx

    from speclocal.backends.mlx.loading import device_of

    return device_of(device) == mx.cpu


def free_memory(device: str) -> int:
    """Bytes a model may take on this device; see `memory.free`."""
    from speclocal.backends.mlx.memory import free

    return free(device)


def describe() -> dict[str, str]:
    """Versions and devices, for `speclocal doctor`."""
    from importlib.metadata import version

    import mlx.core as mx

    info = mx.device_info()
    size = info.get("memory_size")
    memory = f", {int(size) / 2**30:.0f} GiB" if size else ""
    return {
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "mlx device": f"{info.get('device_name', '?')} ({mx.default_device().type.name}){memory}",
    }
