"""`Ops` for torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from speclocal.backends.torch.kernels.noise import noise
from speclocal.core.interfaces import Ops


def make_ops(device: torch.device) -> Ops:
    """The operations on one device."""

    def array(values: Any) -> torch.Tensor:
        return torch.tensor(values, device=device)

    def to_host(*arrays: torch.Tensor) -> list[Any]:
        return [a.tolist() for a in arrays]

    return Ops(
        xp=torch,
        array=array,
        arange=lambda n: torch.arange(n, device=device),
        noise=partial(noise, device=device),
        top=lambda x, k: torch.topk(x, k, dim=-1),
        to_host=to_host,
        support=_support if device.type == "cpu" else None,
        # CUDA kernels are under way as soon as they are called; on the CPU a call returns with its result.
        submit=None if device.type == "cpu" else lambda *arrays: None,
    )


def _support(scores: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return torch.nonzero((scores - floor).amax(0) >= 0)[:, 0]
