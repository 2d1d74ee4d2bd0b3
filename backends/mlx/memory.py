"""How much memory a model may take, and MLX's own limits."""

from __future__ import annotations

import mlx.core as mx
import psutil

from speclocal.errors import UsageError

GIB = 2**30


def free(device: str) -> int:
    """Bytes a model may take: on a GPU what Metal recommends as working set, less what MLX holds; else free memory."""
    held = mx.get_active_memory()
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended and device != "cpu":
        return int(recommended) - held
    return psutil.virtual_memory().available


def wire(gib: float) -> None:
    """Keep so much memory from being swapped out. UsageError where there is no Metal, or above what it recommends."""
    if not mx.metal.is_available():
        raise UsageError("--wired-limit without effect", got="no Metal device", expected="Apple Silicon")
    most = int(mx.device_info()["max_recommended_working_set_size"])
    if not 0 < gib * GIB <= most:
        raise UsageError("impossible --wired-limit", got=f"{gib} GiB", expected=f"at most {most / GIB:.1f} GiB")
    mx.set_wired_limit(int(gib * GIB))
