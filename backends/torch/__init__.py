"""The PyTorch backend: CUDA, and CPU as the embedded default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_target(folder: Path, notify: Callable[[str], None], **options: Any) -> Any:
    """Load a model folder as a Target; see `loading.load`."""
    from speclocal.backends.torch.loading import load

    return load(folder, notify, **options)


def convert_gguf(path: Path, folder: Path) -> None:
    """De-quantise a GGUF file's weights into a model folder; see `gguf.convert`."""
    from speclocal.backends.torch.gguf import convert

    convert(path, folder)


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
