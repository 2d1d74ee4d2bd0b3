"""Heads of every family with random weights, for the tiny models of a laboratory."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from speclocal.core import eagle_layout, medusa_layout
from speclocal.core.head_spec import FEATURE, EagleSpec, MedusaSpec, Spec
from speclocal.core.interfaces import Drafter, Target
from speclocal.drafters import eagle, medusa, p_eagle

H, V, L = 64, 96, 2
_EAGLE3 = EagleSpec(
    family="eagle3",
    hidden=H,
    target_hidden=H,
    vocab=V,
    draft_vocab=48,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    fc=True,
    fc_bias=False,
    attention_bias=False,
    output_bias=False,
    qk_norm=False,
    taps=(0, 1, 2),
    norm_before_residual=False,
    norm_before_fc=False,
    fc_norm=False,
    norm_output=False,
    own_embedding=False,
    own_head=True,
    mapped=True,
    mask_token=None,
    mask_width=None,
    suggested_depth=None,
    notices=(),
)
SPECS: dict[str, Spec] = {
    "eagle": replace(
        _EAGLE3,
        family="eagle",
        draft_vocab=V,
        fc_bias=True,
        taps=(FEATURE,),
        own_embedding=True,
        own_head=False,
        mapped=False,
    ),
    "eagle3": _EAGLE3,
    "eagle3 lent": _EAGLE3,
    "eagle3 full": replace(_EAGLE3, draft_vocab=V, mapped=False, qk_norm=True, layers=2, norm_before_residual=True),
    "eagle3.1": replace(_EAGLE3, norm_before_fc=True, norm_output=True, own_embedding=True, hidden=48, head_dim=12),
    "p_eagle": replace(
        _EAGLE3, family="p_eagle", layers=2, own_embedding=True, mask_token=7, mask_width=3 * H, attention_bias=True
    ),
    "medusa": MedusaSpec(3, 1, H, V, True, False, True, False, ()),
    "medusa shared": MedusaSpec(4, 2, H, V, False, False, True, False, ()),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"topk": 1, "depth": 4},
    "tree": {"topk": 3, "depth": 3, "nodes": 10},
    "wide": {"topk": 8, "depth": 2, "nodes": 24},
    "deep": {"topk": 2, "depth": 5, "nodes": 7},
    "fixed": {"tree": "fixed"},
}
NAMES = [(name, how) for name in SPECS for how in SETTINGS if not (name == "p_eagle" and how == "fixed")]
"""Every head with every way to draft."""


@cache
def _folder(name: str, seed: int) -> Path:
    spec = SPECS[name]
    layout = eagle_layout if isinstance(spec, EagleSpec) else medusa_layout
    draw = np.random.default_rng(seed)
    tensors = {}
    for key, want in layout.tensors_of(spec).items():
        if key == "d2t":
            ids = np.sort(draw.choice(V, spec.draft_vocab, replace=False))  # type: ignore[union-attr]
            tensors[key] = (ids - np.arange(len(ids))).astype(np.int64)
        elif len(want.shape) == 1 and "norm" in key:
            tensors[key] = draw.uniform(0.6, 1.4, want.shape).astype(np.float32)
        else:
            # EAGLE-1 feeds back what no norm has touched: larger ones would blow rounding up from step to step.
            spread = 0.05 if key == "fc.weight" and name == "eagle" else 0.25
            tensors[key] = draw.normal(0, spread, want.shape).astype(np.float32)
    return _saved(tensors)


def _saved(tensors: dict[str, np.ndarray]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="head"))
    save_file(tensors, folder / "model.safetensors")
    return folder


def lent(target: Target, seed: int) -> Path:
    """A head whose output rows are the target's, so that it may borrow more of them.

    What `output_rows` tells, the output layer tells too; a packed one tells nothing else.
    """
    units = target.unembed(target.ops.array(np.eye(H, dtype=np.float32).tolist()))
    rows = target.ops.xp.swapaxes(units, 0, 1)
    target.output_rows = lambda ids: rows[ids]  # type: ignore[method-assign]
    tensors = load_file(_folder("eagle3 lent", seed) / "model.safetensors")
    ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    tensors["lm_head.weight"] = np.array(target.ops.to_host(rows)[0], np.float32)[ids]
    return _saved(tensors)


def attach(lab: ModuleType, target: Target, name: str, how: str, seed: int = 0, **settings: Any) -> Drafter:
    """A drafter with such a head on this target, which is tapped for it."""
    spec = SPECS[name]
    backend = lab.__name__.rpartition("_")[2]
    load = import_module(f"speclocal.backends.{backend}.heads").load
    layout = eagle_layout if isinstance(spec, EagleSpec) else medusa_layout
    target.tap(spec.taps if isinstance(spec, EagleSpec) else (FEATURE,))
    folder = lent(target, seed) if name == "eagle3 lent" else _folder(name, seed)
    head = load(folder, spec, {key: key for key in layout.tensors_of(spec)}, target)
    chosen = {**SETTINGS[how], **settings}
    if how == "fixed":
        chosen["tree"] = "medusa" if name.startswith("medusa") else "eagle1"
    if isinstance(spec, MedusaSpec):
        return medusa.Drafter(medusa.Settings(**chosen), head, spec.heads)
    if name == "p_eagle":
        return p_eagle.Drafter(p_eagle.Settings(**chosen), head)
    return eagle.Drafter(eagle.Settings(**chosen), head, name.split()[0])
