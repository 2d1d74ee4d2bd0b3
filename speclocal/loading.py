"""Loading a model: whether it fits into memory, then its text side and its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from speclocal.checks import head_files, read_json, refuse_code, weight_sizes
from speclocal.core.anatomy import context_of, first_of, text_of
from speclocal.core.interfaces import Target
from speclocal.core.memory import Need, estimate, loaded_bytes, refuse_if_too_large, token_bytes, tokens_that_fit
from speclocal.text import Text

if TYPE_CHECKING:
    from speclocal.engine import Load

Notify = Callable[[str], None]
SURE = 2048
"""Tokens there must be room for where no context is asked for."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_memory(
    folders: Mapping[str, Path], settings: Load, backend: ModuleType, note: Notify, head: Path | None = None
) -> None:
    """Refuse, before any weight is read, what cannot fit into memory. folders: what a model is for → where it is.

    Together they must fit with the context asked for, or with 2,048 tokens; where the own context of the first does
    not fit, a notice says what does. head: folder of a drafter head for the first of the models.
    """
    on_cpu, free = backend.on_cpu(settings.device), backend.free_memory(settings.device)
    configs = {name: read_json(folder / "config.json") for name, folder in folders.items()}
    limits = {name: context_of(config, None, lambda text: None) for name, config in configs.items()}
    wanted = next(iter(limits.values()))
    sure = min(wanted, settings.context or SURE)
    needs: dict[str, Need] = {}
    per_token = 0
    for name, config in configs.items():
        weights, element = _widths(config, settings.dtype, on_cpu)
        bits = settings.kv_bits if name == "target" else None
        loaded = loaded_bytes(weight_sizes(folders[name]), weights)
        needs[name] = estimate(config, loaded, min(sure, limits[name]), bits, element)
        per_token += token_bytes(config, bits, element)
    if head:
        _, element = _widths(next(iter(configs.values())), settings.dtype, on_cpu)
        needs["drafter head"] = _head_need(head, element)
    refuse_if_too_large(needs, free, "cpu" if on_cpu else settings.device)
    if not settings.context and (room := tokens_that_fit(needs.values(), per_token, free)) < wanted:
        note(f"there is memory for about {room} of this model's {wanted} tokens of context; see --context, --kv-bits")


def check_head_memory(head: Path, target: Any, settings: Load, backend: ModuleType) -> None:
    """Refuse a drafter head that does not fit beside a target that is loaded."""
    need = _head_need(head, WIDTHS.get(str(target.dtype).removeprefix("torch."), 4))
    refuse_if_too_large({"drafter head": need}, backend.free_memory(settings.device), settings.device)


def _head_need(folder: Path, element: int) -> Need:
    """A head takes the number type of its target. Only its weights count: its few layers cache little."""
    return Need(loaded_bytes(weight_sizes(folder, head_files(folder)), element), 0, 0)


def _widths(config: Mapping[str, Any], dtype: str, on_cpu: bool) -> tuple[int | None, int]:
    """Bytes of a float weight once loaded (None: as stored), and of a number in the cache."""
    if dtype != "auto":
        return WIDTHS.get(dtype), WIDTHS.get(dtype, 4)
    if on_cpu and not quantised(config):
        return 4, 4
    return None, WIDTHS.get(str(dtype_of(config)), 2)


def quantised(config: Mapping[str, Any]) -> bool:
    """Whether a model's config.json says that its weights are quantised."""
    return any(config.get(key) for key in ("quantization_config", "quantization"))


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The number type a config.json names, None if it names none."""
    found = first_of(text_of(config), "dtype", "torch_dtype") or first_of(config, "dtype", "torch_dtype")
    return str(found).removeprefix("torch.") if found else None


def load_model(folder: Path, backend: ModuleType, settings: Load, note: Notify) -> tuple[Text, Target]:
    """Text and target of a model folder."""
    refuse_code(folder, settings.trust_remote_code)
    text = Text.load(folder, trust_remote_code=settings.trust_remote_code)
    wired = {} if settings.wired_limit is None else {"wired_limit": settings.wired_limit}
    target = backend.load_target(
        folder,
        note,
        dtype=settings.dtype,
        device=settings.device,
        context=settings.context,
        kv_bits=settings.kv_bits,
        allow_pickle=settings.allow_pickle,
        trust_remote_code=settings.trust_remote_code,
        **wired,
    )
    return text, target
