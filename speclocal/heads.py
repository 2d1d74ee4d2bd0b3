"""A drafter head on disk, compared with the target it is to draft for, as a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from speclocal.checks import head_files, read_json, stored_tensors
from speclocal.core.fixed_tree import FixedTree
from speclocal.core.heads import FEATURE, EagleSpec, MedusaSpec, Overrides, Spec, identify
from speclocal.core.interfaces import Drafter, Target
from speclocal.core.medusa_layout import is_medusa
from speclocal.drafters import find
from speclocal.errors import ModelError, UsageError
from speclocal.loading import dtype_of, quantised

Config = Mapping[str, Any]
LABELS = {"eagle": "an EAGLE-1/2", "eagle3": "an EAGLE-3", "p_eagle": "a P-EAGLE", "medusa": "a Medusa"}
CHOICES = "medusa_choices"
"""Key of the calibrated tree in config.json, as Medusa's own programs call such a list."""
CHANGED = "exact for this fine-tuned model, not lossless with respect to the original model"
"""What drafting with heads that changed their target means for the text."""


@dataclass(frozen=True)
class HeadFiles:
    """A head whose weights are safetensors.

    tensors: shape and number type of each, by stored name. source: how the user may name it.
    """

    folder: Path
    config: Config
    tensors: Mapping[str, tuple[list[int], str]]
    source: str

    @classmethod
    def read(cls, folder: Path, source: str) -> HeadFiles:
        """What a folder holds, no weights yet. Code that may lie there is never run."""
        return cls(folder, read_json(folder / "config.json"), stored_tensors(head_files(folder)), source)

    @property
    def is_medusa(self) -> bool:
        """Whether Medusa heads are among the tensors."""
        return is_medusa(self.tensors)

    def identify(self, target: Target, overrides: Overrides) -> tuple[Spec, dict[str, str]]:
        """See `core.heads.identify`."""
        return identify(self.config, self.tensors, target.facts, overrides)


def overrides(choices: Any) -> Overrides:
    """What the settings of a drafter say of its head; UsageError for what cannot be."""
    theta = getattr(choices, "theta", 0.0)
    if not 0 <= theta < float("inf"):
        raise UsageError("impossible theta", got=theta, expected="a number above 0, or 0 for what the files say")
    mask_token = getattr(choices, "mask_token", -1)
    return Overrides(
        taps=getattr(choices, "taps", ()) or None,
        rope_theta=theta or None,
        norm_before_residual=_flag(choices, "residual"),
        norm_output=_flag(choices, "norm_output"),
        mask_token=None if mask_token == -1 else mask_token,
    )


def _flag(choices: Any, name: str) -> bool | None:
    text = getattr(choices, name, "")
    if text not in ("", "yes", "no"):
        raise UsageError(f"impossible {name}", got=repr(text), expected="yes or no")
    return text == "yes" if text else None


def family_of(spec: Spec) -> str:
    """The method that drafts with a head."""
    return "medusa" if isinstance(spec, MedusaSpec) else spec.family


def taps_of(spec: Spec) -> tuple[int, ...]:
    """The states of the target a head reads, as `Target.tap` names them."""
    return spec.taps if isinstance(spec, EagleSpec) else (FEATURE,)


def load(
    head: HeadFiles, method: str, choices: Any, target: Target, backend: ModuleType, note: Callable[[str], None]
) -> tuple[Drafter, Spec]:
    """The drafter, and what its head is. `target.tap(taps_of(spec))` must follow before it drafts.

    Raises ModelError if the head is of another kind or does not fit the target, UsageError for impossible settings.
    """
    spec, names = head.identify(target, overrides(choices))
    family = family_of(spec)
    if family != method:
        raise ModelError(
            f"this is {LABELS[family]} head", got=f"--drafter {method}", do=f"type --drafter {family}:{head.source}"
        )
    for notice in spec.notices:
        note(notice)
    module = backend.load_head(head.folder, spec, names, target)
    make = find(method).Drafter
    if isinstance(spec, MedusaSpec):
        return make(choices, module, spec.heads, note, calibrated(head.config)), spec
    return (make(choices, module) if method == "p_eagle" else make(choices, module, method)), spec


def calibrated(config: Config) -> tuple[tuple[int, ...], ...]:
    """The tree that Medusa heads were calibrated with: paths of ranks, the most useful first; () for none.

    Raises ModelError for something else under that key.
    """
    try:
        paths = tuple(tuple(path) for path in config.get(CHOICES) or ())
        for end in range(1, len(paths) + 1):  # any beginning of the list must be a tree
            FixedTree.of(paths[:end])
    except (TypeError, UsageError) as error:
        raise ModelError(f"{CHOICES} in the head's config.json is no tree: {error}") from error
    return paths


ORIGIN = "speclocal"
"""Key of config.json under which a head that was trained here names the target's name, revision and precision."""


def precision_note(head: Config, target: Config, dtype: str, gguf: bool, revision: str | None = None) -> str | None:
    """What to say where a head was made with another precision of the target than it now reads; None for nothing.

    head, target: their config.json. dtype: asked for, or `auto`. gguf: the target's weights come from a GGUF file.
    revision: of the target; a head that was trained here on this very one fits it.
    """
    origin = head.get(ORIGIN)
    if isinstance(origin, Mapping) and origin.get("revision") == revision:
        return None
    made = dtype_of(head) or dtype_of(head.get("transformer_layer_config") or {})
    less = "fewer drafts may be accepted; the text stays the target's own"
    if gguf or quantised(target):
        with_ = f"with {made}" if made else "with the unquantised model"
        kind = "comes from a GGUF file" if gguf else f"is quantised{_bits(target)}"
        return f"the target {kind}, its head was made {with_}: {less}"
    runs = dtype_of(target) if dtype == "auto" else dtype
    if made and runs and made != runs:
        return f"the target is {runs}, its head was made with {made}: {less}"
    return None


def _bits(config: Config) -> str:
    """' to 4 bits', or the method's name, where a config tells."""
    told = config.get("quantization") or config.get("quantization_config")
    if not isinstance(told, Mapping):
        return ""
    if bits := told.get("bits") or next((n for n in (4, 8) if told.get(f"load_in_{n}bit")), None):
        return f" to {bits} bits"
    return f" ({told['quant_method']})" if told.get("quant_method") else ""
