"""What a drafter head is: the facts a backend needs to build it, and the strict comparison of its file with them.

Words: `V` vocabulary and `H` hidden size of the target, `Vd` and `Hd` those of the drafter, `L` layers of the target.
Boundary state `B_i` = the target's residual stream after `i` layers: `B_0` the embeddings, `B_L` before the final norm.
Feature `f` = the state after the final norm, what the target's output matrix reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from speclocal.errors import ModelError, UsageError

FEATURE = -1
"""Stands for `f` among the taps."""

Config = Mapping[str, Any]
Stored = tuple[Sequence[int], str]
"""Shape and type of a tensor as a safetensors header spells them: ([48, 64], "BF16")."""
Tensors = Mapping[str, Stored]

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "U64", "U32")
BOOLEANS = ("BOOL", "U8")
LISTED = 4
"""Names shown of a longer list."""


@dataclass(frozen=True)
class TargetFacts:
    """The target a head is loaded for."""

    layers: int
    hidden: int
    vocab: int
    """Rows of the embedding; the tokenizer may know fewer."""
    positions: int | None = None
    """Length of context that will be used, if known: only for a notice."""


@dataclass(frozen=True)
class Overrides:
    """What the user or the acceptance probe says where files are silent or wrong; None = as the files say."""

    taps: tuple[int, ...] | None = None
    """Boundary states 0..L."""
    rope_theta: float | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    mask_token: int | None = None


@dataclass(frozen=True)
class EagleSpec:
    """An EAGLE-1/2 ("eagle"), EAGLE-3/3.1 ("eagle3") or P-EAGLE ("p_eagle") head."""

    family: Literal["eagle", "eagle3", "p_eagle"]
    hidden: int
    target_hidden: int
    vocab: int
    draft_vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    rope_scaling: Config | None
    """`rope_type` (linear, llama3 or yarn) and its numbers; None = plain."""
    fc: bool
    """EAGLE-1: [emb; f] → Hd. EAGLE-3: the concatenated taps → Hd; without it the one tap is the hidden itself."""
    fc_bias: bool
    attention_bias: bool
    """Biases of q, k and v, in every layer."""
    output_bias: bool
    """Bias of o_proj, in every layer."""
    qk_norm: bool
    taps: tuple[int, ...]
    """Boundary states in the order of the concatenation, or (FEATURE,)."""
    norm_before_residual: bool
    norm_before_fc: bool
    """`input_norm.weight` [A·H] over the concatenation."""
    fc_norm: bool
    """`fc_norm.{a}.weight` [H], one for each tap."""
    norm_output: bool
    """The normed output is fed back, not the raw one."""
    own_embedding: bool
    own_head: bool
    mapped: bool
    """`d2t` holds target id − draft id: Vd < V."""
    mask_token: int | None
    mask_width: int | None
    """Width of `mask_hidden`: A·H = before `fc`; Hd = in place of what `fc` gives."""
    suggested_depth: int | None
    notices: tuple[str, ...]


@dataclass(frozen=True)
class MedusaSpec:
    """Medusa heads: blocks x + SiLU(W x + b), then an output matrix."""

    heads: int
    blocks: int
    """Blocks of a head."""
    hidden: int
    vocab: int
    own_output: bool
    """Output matrices are stored; else the target's is used."""
    shared_output: bool
    """One matrix, stored as that of head 0, serves all heads."""
    bias: bool
    """The blocks have biases."""
    changes_target: bool
    """The file is a whole model fine-tuned with the heads (Medusa-2): the target must be this model."""
    notices: tuple[str, ...]


Spec = EagleSpec | MedusaSpec


class Wanted(NamedTuple):
    """The shape a tensor must have, and the types it may be stored in."""

    shape: tuple[int, ...]
    kinds: tuple[str, ...] = FLOATS


def compare(label: str, stored: Tensors, names: Mapping[str, str], wanted: Mapping[str, Wanted]) -> None:
    """ModelError that lists every tensor missing, unknown, stored twice, of another shape or of another type.

    `names` gives the normalised name of each stored tensor, `wanted` what must be there by normalised name.
    """
    found = {name: old for old, name in names.items()}
    missing = [name for name in wanted if name not in found]
    twice = [name for name, count in Counter(names.values()).items() if count > 1]
    unknown = [old for old, name in names.items() if name not in wanted]
    shapes, types = [], []
    for name, want in wanted.items():
        if name not in found:
            continue
        shape, kind = stored[found[name]]
        if tuple(shape) != want.shape:
            shapes.append(f"{found[name]} got {list(shape)} expected {list(want.shape)}")
        if kind not in want.kinds:
            types.append(f"{found[name]} got {kind} expected {' or '.join(want.kinds)}")
    wrong = [
        few("missing", missing),
        few("unknown", unknown),
        few("stored under two names", twice),
        few("of another shape", shapes),
        few("of another type", types),
    ]
    if any(wrong):
        raise ModelError(
            f"this {label} head's tensors are not those of its config.json: " + "; ".join(filter(None, wrong))
        )


def few(what: str, names: Collection[str]) -> str:
    """'3 missing: a, b, c', cut after a few; '' for none."""
    if not names:
        return ""
    return f"{len(names)} {what}: {', '.join(list(names)[:LISTED])}{', …' if len(names) > LISTED else ''}"


def whole(config: Config, key: str, default: int | None = None) -> int:
    """A positive whole number of the config; ModelError naming the key if it is something else or not there."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{key} in the head's config.json",
            got="none" if value is None else value,
            expected="a positive whole number",
        )
    return value


def check_target(target: TargetFacts, hidden: int, vocab: int) -> None:
    """ModelError if a head was made for a target of another hidden size or vocabulary."""
    for what, got, expected in (("hidden size", hidden, target.hidden), ("vocabulary", vocab, target.vocab)):
        if got != expected:
            raise ModelError(
                f"this head was made for another target: {what}",
                got=got,
                expected=f"the target's {expected}",
                do="choose a head that was trained for this target",
            )


def refuse_overrides(kind: str, overrides: Overrides, *allowed: str) -> None:
    """UsageError for a setting this kind of head does not have."""
    given = [key for key, value in vars(overrides).items() if value is not None and key not in allowed]
    if given:
        raise UsageError(f"{kind} heads have no setting {', '.join(given)}", expected=", ".join(allowed) or "none")
