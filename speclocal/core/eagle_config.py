"""What the config.json of an EAGLE or P-EAGLE head says, in the spellings of its several trainers.

Flat files describe head and layer in one dict, some with a nested `eagle_config`; speculators files keep the layer
under `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from speclocal.core.anatomy import first_of
from speclocal.core.head_spec import Config, TargetFacts
from speclocal.errors import ModelError, UsageError

IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUT_IDS = "aux_hidden_states_layer_ids"
MASK_IDS = ("mask_token_id", "pard_token", "ptd_token_id")
PLAIN_THETA = 10000.0
PLAIN_ROPES = (None, "default", "mrope")
"""Three-part positions (mrope) are equal in text, which makes the rope a plain one."""
SCALED_ROPES = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Numbers each kind needs. Kinds whose angles change with the length of the text would invalidate cached keys."""


@dataclass(frozen=True)
class HeadConfig:
    """The parts of a head's config.json."""

    top: Config
    layer: Config
    """The decoder layer of the drafter."""
    nested: Config
    speculators: bool

    def flag(self, key: str) -> bool | None:
        """A boolean wherever it stands; None where it is null or not there."""
        value = next((part[key] for part in (self.top, self.nested, self.layer) if part.get(key) is not None), None)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{key} in the head's config.json", got=value, expected="true or false")
        return value

    @property
    def architectures(self) -> str:
        return ", ".join(map(str, self.top.get("architectures") or ()))


def read(config: Config) -> HeadConfig:
    layer = part_of(config, "transformer_layer_config")
    return HeadConfig(
        top=config, layer=layer or config, nested=part_of(config, "eagle_config"), speculators=bool(layer)
    )


def part_of(config: Config, key: str) -> Config:
    """A dict inside the config, empty where it is null or not there."""
    part = config.get(key) or {}
    if not isinstance(part, Mapping):
        raise ModelError(f"{key} in the head's config.json", got=part, expected="a dict")
    return part


def rope(parts: HeadConfig, theta: float | None, notices: list[str]) -> tuple[float, Config | None]:
    """Base and scaling of the rope. The target's base is never a default: files without one mean 10000."""
    layer = parts.layer
    given = part_of(layer, "rope_parameters") or part_of(layer, "rope_scaling")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError("rope_parameters in the head's config.json", got=given, expected="one rope for all layers")
    if theta is None:
        said = first_of(given, "rope_theta")
        said = first_of(layer, "rope_theta") if said is None else said
        theta = PLAIN_THETA if said is None else _number("rope_theta", said)
        if theta != PLAIN_THETA and _is_angelslim(parts):
            notices.append(
                f"config.json says rope_theta {theta:g}, but this trainer (AngelSlim) uses 10000 whatever it says; "
                "if few drafts are accepted, try -o theta=10000"
            )
    if first_of(layer, "partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError("this head turns only a part of each attention head (partial_rotary_factor): not supported")
    kind = first_of(given, "rope_type", "type")
    if kind in PLAIN_ROPES:
        return theta, None
    if kind not in SCALED_ROPES:
        raise ModelError("rope of the head is not supported", got=kind, expected=", ".join(SCALED_ROPES))
    scaling = {key: value for key, value in given.items() if key not in ("type", "rope_theta") and value is not None}
    scaling["rope_type"] = kind
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", layer.get("max_position_embeddings"))
    for key in SCALED_ROPES[kind]:
        _number(f"{key} of the {kind} rope", scaling.get(key))
    return theta, scaling


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ModelError(
            f"{name} in the head's config.json", got="none" if value is None else value, expected="a positive number"
        )
    return float(value)


def _is_angelslim(parts: HeadConfig) -> bool:
    return (
        "target_model_type" in parts.top or OUTPUT_IDS in parts.top or "Eagle3LlamaForCausalLM" in parts.architectures
    )


def taps(
    parts: HeadConfig, count: int, layers: int, asked: tuple[int, ...] | None, notices: list[str]
) -> tuple[int, ...]:
    """The `count` boundary states of a target of `layers` layers that the head reads.

    An id `i` means B_i in speculators files and at the top level; "output of layer i" = B_{i+1} under AngelSlim's key;
    one of the two in a nested `eagle_config`, depending on who wrote it.
    """
    if asked is not None:
        if len(asked) != count or list(asked) != sorted(set(asked)) or not 0 <= min(asked) <= max(asked) <= layers:
            raise UsageError(
                "the layers of the target that the head reads (taps)",
                got=", ".join(map(str, asked)) or "none",
                expected=f"{count} numbers from 0 to {layers}, ascending",
            )
        return asked
    top = _ids(parts.top, IDS)
    nested = _ids(parts.nested, IDS) or _ids(parts.nested, "layer_ids")
    outputs = _ids(parts.top, OUTPUT_IDS)
    usual = (2, layers // 2, layers - 3)
    if top:
        found = top
        if nested and top not in (nested, tuple(i + 1 for i in nested)):
            notices.append(f"config.json names two sets of layers of the target, {top} and {nested}: the first is used")
    elif outputs:
        found = tuple(i + 1 for i in outputs)
    elif nested:
        found = nested if parts.speculators else _nested(nested, layers, usual, notices)
    else:
        found = _guess(count, layers, usual, notices)
    if len(found) != count or len(set(found)) != count or found[-1] > layers:
        raise ModelError(
            f"this head reads {count} states of the target (from fc.weight), after layers named in config.json",
            got=", ".join(map(str, found)),
            expected=f"{count} different numbers from 0 to {layers}",
            do="set them with -o taps=…",
        )
    return found


def _ids(config: Config, key: str) -> tuple[int, ...] | None:
    """A list of layers in ascending order, the order of concatenation in every trainer; None if not there or empty."""
    value = config.get(key)
    if not value:
        return None
    if not isinstance(value, Sequence) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
        raise ModelError(f"{key} in the head's config.json", got=value, expected="a list of layers")
    return tuple(sorted(value))


def _nested(ids: tuple[int, ...], layers: int, usual: tuple[int, ...], notices: list[str]) -> tuple[int, ...]:
    """Ids of a nested list as boundary states: whoever wrote them counted states or outputs of layers."""
    shifted = tuple(i + 1 for i in ids)
    if ids == usual or layers in ids:
        return ids
    if shifted == usual:
        return shifted
    chosen, other = (shifted, ids) if ids[0] == 1 else (ids, shifted)
    notices.append(
        f"the layers of the target in config.json, {_row(ids)}, can be counted in two ways: "
        f"read after layers {_row(chosen)}; if few drafts are accepted, try -o taps={_row(other)}"
    )
    return chosen


def _guess(count: int, layers: int, usual: tuple[int, ...], notices: list[str]) -> tuple[int, ...]:
    if count != len(usual) or layers < 7:
        raise ModelError(
            f"config.json does not name the {count} layers of the target that this head reads",
            expected="the usual three, of a target of 7 layers or more",
            do="set them with -o taps=…",
        )
    notices.append(
        f"config.json does not name the layers of the target that this head reads: guessed after layers {_row(usual)}; "
        "if few drafts are accepted, set others with -o taps=A,B,C (`speclocal doctor` with this target and drafter "
        "measures which)"
    )
    return usual


def _row(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))


def eps(parts: HeadConfig, notices: list[str]) -> float:
    value = parts.layer.get("rms_norm_eps")
    if value is None:
        notices.append("config.json does not say rms_norm_eps: 1e-06 is used")
        return 1e-6
    return _number("rms_norm_eps", value)


def mask_token(parts: HeadConfig, vocab: int, asked: int | None) -> int:
    """The token of the rows that stand for tokens not known yet."""
    if asked is not None:
        if not 0 <= asked < vocab:
            raise UsageError("mask token", got=asked, expected=f"0 to {vocab - 1}")
        return asked
    value = first_of(parts.top, *MASK_IDS)
    if value is None:
        value = first_of(parts.nested, *MASK_IDS)
    if value is None:
        raise ModelError(
            "config.json does not name the mask token of this P-EAGLE head",
            expected=" or ".join(MASK_IDS),
            do="set it with -o mask_token=…",
        )
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).isdecimal() or int(value) >= vocab:
        raise ModelError("mask token in the head's config.json", got=value, expected=f"0 to {vocab - 1}")
    return int(value)


def suggested_depth(parts: HeadConfig) -> int | None:
    """Tokens a round the head's maker suggests."""
    made = part_of(parts.top, "speculators_config")
    proposals = [each for each in made.get("proposal_methods") or () if isinstance(each, Mapping)]
    proposals.sort(key=lambda each: each.get("proposal_type") != made.get("default_proposal_method"))
    value = next((each["speculative_tokens"] for each in [*proposals, parts.top] if "speculative_tokens" in each), None)
    return value if isinstance(value, int) and value > 0 else None


def uses_taps(parts: HeadConfig) -> bool:
    """False for heads that read the feature although they are built as EAGLE-3."""
    return parts.flag("use_aux_hidden_state") is not False


def says_p_eagle(parts: HeadConfig) -> bool:
    return parts.top.get("speculators_model_type") == "peagle" or "PEagle" in parts.architectures


def refuse_layers(parts: HeadConfig) -> None:
    """ModelError for a decoder layer that none of these heads has."""
    activation = first_of(parts.layer, "hidden_act", "hidden_activation")
    if activation not in (None, "silu", "swish"):
        raise ModelError("the head's activation is not supported", got=activation, expected="silu")
    odd = sorted(set(parts.layer.get("layer_types") or ()) - {"full_attention"})
    if odd:
        raise ModelError("the head's layers are not supported", got=", ".join(odd), expected="full_attention")


def norm_before_residual(parts: HeadConfig, asked: bool | None, notices: list[str]) -> bool:
    value = asked if asked is not None else parts.flag("norm_before_residual")
    if value is None and parts.speculators:
        notices.append(
            "config.json does not say norm_before_residual: false is used; if few drafts are accepted, try "
            "-o residual=yes"
        )
    return bool(value)


def norm_output(parts: HeadConfig, asked: bool | None, notices: list[str]) -> bool:
    said = parts.flag("norm_output")
    if said and asked is None and not parts.speculators:
        notices.append(
            "norm_output is true in config.json, but some trainers (SpecForge before September 2026) wrote this of "
            "heads that are fed their raw output; if few second drafts are accepted, try -o norm_output=no"
        )
    return bool(said if asked is None else asked)


def note_positions(parts: HeadConfig, target: TargetFacts, notices: list[str]) -> None:
    """The head's own maximum is no limit, angles are computed for any position; but it was not trained further."""
    most = parts.layer.get("max_position_embeddings")
    if isinstance(most, int) and target.positions is not None and most < target.positions:
        notices.append(f"this head was made for texts of up to {most} tokens: fewer drafts may be accepted beyond")
