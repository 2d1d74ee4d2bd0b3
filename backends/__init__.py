"""Backends by folder name. `load` imports one on demand; each package offers the same functions:

`load_target(folder, notify, *, dtype, device, context, kv_bits, allow_pickle, trust_remote_code, taps)` gives a
Target, `load_head(folder, spec, names, target)` the module of a drafter head, `describe()` versions and devices;
`on_cpu(device)` says whether a device is the processor, `free_memory(device)` how many bytes a model may take there,
`READS_PICKLES` whether it loads weights from pickles. `torch` converts what others cannot read:
`convert_gguf(file, folder)`, `convert_pickles(folder, folder)`.
"""

from __future__ import annotations

import platform
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from speclocal.errors import SpeclocalError, UsageError

NAMES = ("torch", "mlx")
FRAMEWORKS = {"torch": ("torch", "transformers"), "mlx": ("mlx", "mlx_lm")}
"""What a backend imports."""
INSTALL = {"torch": "pip install torch transformers", "mlx": "pip install 'speclocal[mlx]'"}


def missing(name: str) -> tuple[str, ...]:
    """The frameworks of a backend that are not installed."""
    return tuple(framework for framework in FRAMEWORKS[name] if find_spec(framework) is None)


def choose() -> str:
    """The backend meant by `auto`: mlx on Apple Silicon if it is installed, else torch."""
    apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return "mlx" if apple_silicon and not missing("mlx") else "torch"


def load(name: str = "auto") -> ModuleType:
    """The backend's package. UsageError for an unknown name, SpeclocalError if its framework is not installed."""
    name = choose() if name == "auto" else name
    if name not in NAMES:
        raise UsageError("unknown backend", got=name, expected=f"auto or one of {', '.join(NAMES)}")
    if absent := missing(name):
        what = f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
        raise SpeclocalError(f"the {name} backend cannot start: {what}", do=INSTALL[name])
    return import_module(f"speclocal.backends.{name}")
