"""The config of a Hugging Face folder, spelled as mlx-lm's classes read it.

transformers 5 moved what mlx-lm reads at the top level: without this, a folder would silently run with other ropes and
windows. Where both spellings are there, the one mlx-lm knows stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from speclocal.errors import ModelError

ALIASES = {"num_experts": "num_local_experts"}
"""mlx-lm's names for what transformers 5 writes under another one."""
SLIDING, FULL = "sliding_attention", "full_attention"


def spelled(config: Mapping[str, Any], known: type, untied: bool | None = None) -> dict[str, Any]:
    """What to add to a config.

    known:  the `ModelArgs` of mlx-lm's class, a dataclass.
    untied: whether the weights hold an output layer of their own, if that is known.
    Raises ModelError for layouts the class cannot express.
    """
    names = {f.name for f in fields(known)}
    added: dict[str, Any] = {}
    for name, other in ALIASES.items():
        if name in names:
            _add(config, added, name, config.get(other))
    if "rope_parameters" not in names:
        _ropes(config, names, added)
    _patterns(config, names, added)
    if "tie_word_embeddings" in names and "tie_word_embeddings" not in config and untied is not None:
        # Left out where the default of transformers' class is meant, which need not be mlx-lm's.
        added["tie_word_embeddings"] = not untied
    for field in fields(known):
        required = field.default is MISSING and field.default_factory is MISSING
        optional = "Optional" in str(field.type) or field.name == "rope_scaling"
        if required and optional and field.name not in config:
            added.setdefault(field.name, None)
    return added


def _ropes(config: Mapping[str, Any], names: set[str], added: dict[str, Any]) -> None:
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return
    if isinstance(local := rope.get(SLIDING), Mapping):
        # One set for each kind of layer.
        if "rope_local_base_freq" in names:
            _add(config, added, "rope_local_base_freq", local.get("rope_theta"))
        rope = rope.get(FULL, local)
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if name in names:
            _add(config, added, name, rope.get(name))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and "rope_scaling" in names:
        _add(config, added, "rope_scaling", {**rope, "type": kind, "rope_type": kind})


def _patterns(config: Mapping[str, Any], names: set[str], added: dict[str, Any]) -> None:
    """Classes that count layers where the config lists them."""
    kinds = config.get("layer_types")
    if not kinds or "layer_types" in names or "sliding_window_pattern" not in names:
        return
    if SLIDING not in kinds:
        return
    every = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    if list(kinds) != [FULL if (i + 1) % every == 0 else SLIDING for i in range(len(kinds))]:
        raise ModelError(
            f"mlx-lm cannot run this order of layers of {config.get('model_type')}",
            got=", ".join(kinds[: every + 1]),
            expected="every n-th layer with full attention",
            do="use --backend torch",
        )
    # Written as a number, or as letters for local and global layers.
    letters = isinstance(config.get("sliding_window_pattern"), str) or config.get("model_type", "").startswith("exaone")
    added["sliding_window_pattern"] = "L" * (every - 1) + "G" if letters else every


def _add(config: Mapping[str, Any], added: dict[str, Any], name: str, value: Any) -> None:
    if value is not None and config.get(name) is None:
        added[name] = value
