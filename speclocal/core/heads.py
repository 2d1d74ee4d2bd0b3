"""Which drafter head a checkpoint is, decided from its tensors.

Names of repositories, `architectures` and counts in config files are often wrong for drafter heads; names and shapes
of the tensors are not. The config supplies what tensors cannot show: rope, flags, which layers of the target are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from speclocal.core.eagle_layout import eagle
from speclocal.core.head_spec import (
    FEATURE,
    INTEGERS,
    Config,
    EagleSpec,
    MedusaSpec,
    Overrides,
    Spec,
    TargetFacts,
    Tensors,
    refuse_overrides,
)
from speclocal.core.medusa_layout import is_medusa, medusa
from speclocal.errors import ModelError

__all__ = ["FEATURE", "EagleSpec", "MedusaSpec", "Overrides", "Spec", "TargetFacts", "check_map", "identify"]

TABLE = "the head's table of draft ids (d2t)"
UNKNOWN_BODIES = {
    "kv_a_proj": "an MLA (multi-head latent attention) body",
    "kv_b_proj": "an MLA (multi-head latent attention) body",
    "q_a_proj": "an MLA (multi-head latent attention) body",
    "mlp.experts.": "a mixture-of-experts body",
    "hydra_": "Hydra heads",
}
"""Parts of tensor names of heads that are known and not supported."""


def identify(
    config: Config, tensors: Tensors, target: TargetFacts, overrides: Overrides | None = None
) -> tuple[Spec, dict[str, str]]:
    """The head in a file, and the normalised name of every stored tensor it uses.

    `config`: the file config.json. `tensors`: shape and type by stored name, as in safetensors headers.
    Normalised names, EAGLE: `fc.weight`, `fc.bias`, `input_norm.weight`, `fc_norm.{a}.weight`, `layers.{i}.…`,
    `norm.weight`, `lm_head.weight`, `embed_tokens.weight`, `d2t`, `t2d`, `mask_hidden`; Medusa:
    `heads.{h}.blocks.{j}.weight`, `….bias`, `heads.{h}.output.weight`.
    Raises ModelError for a head of another kind or another target, and for missing, unknown or misshapen tensors, by
    name; UsageError for an override that cannot be.
    """
    overrides = overrides or Overrides()
    if is_medusa(tensors):
        refuse_overrides("Medusa", overrides)
        return medusa(config, tensors, target)
    for part, what in UNKNOWN_BODIES.items():
        named = [name for name in tensors if part in name]
        if named:
            architectures = ", ".join(map(str, config.get("architectures") or ())) or "no architecture named"
            raise ModelError(f"this head has {what} ({architectures}): not supported", got=named[0])
    return eagle(config, tensors, target, overrides)


def check_map(
    offsets: Sequence[int] | None, dtype: str, spec: EagleSpec, t2d: Sequence[bool] | None = None
) -> tuple[int, ...]:
    """The target's id of every draft id.

    `offsets`: `d2t` [Vd] (target id − draft id), None if not stored. `dtype`: its type. `t2d`: [V], true for the target
    ids that can be drafted. Raises ModelError if the table is no such table.
    """
    if offsets is None:
        if spec.mapped:
            raise ModelError(f"{TABLE}: it is missing", expected=f"{spec.draft_vocab} offsets")
        return tuple(range(spec.vocab))
    if dtype not in INTEGERS:
        raise ModelError(
            f"{TABLE}: a cast to this type destroys its numbers", got=dtype, expected=" or ".join(INTEGERS)
        )
    if len(offsets) != spec.draft_vocab:
        raise ModelError(f"{TABLE}: its size", got=len(offsets), expected=str(spec.draft_vocab))
    if spec.mapped and not any(offsets):
        raise ModelError(
            f"{TABLE}: all offsets are 0, which would draft the first {spec.draft_vocab} ids of {spec.vocab} only"
        )
    ids = tuple(i + offset for i, offset in enumerate(offsets))
    as_ids = tuple(offsets)
    marked = None if t2d is None else tuple(i for i, drafted in enumerate(t2d) if drafted)
    if spec.mapped and _are_ids(as_ids, ids, spec, marked):
        raise ModelError(f"{TABLE}: it holds target ids, not offsets", expected="target id − draft id")
    if min(ids) < 0 or max(ids) >= spec.vocab:
        wrong = next(i for i, each in enumerate(ids) if not 0 <= each < spec.vocab)
        raise ModelError(
            f"{TABLE}: an id is outside the vocabulary",
            got=f"{ids[wrong]} for draft id {wrong}",
            expected=f"0 to {spec.vocab - 1}",
        )
    falls = next((i for i in range(1, len(ids)) if ids[i] <= ids[i - 1]), None)
    if falls is not None:
        raise ModelError(
            f"{TABLE}: its ids do not ascend",
            got=f"{ids[falls]} after {ids[falls - 1]} at draft id {falls}",
            expected="each target id once, in ascending order",
        )
    if t2d is not None and (len(t2d) != spec.vocab or marked != ids):
        raise ModelError(
            f"{TABLE}: t2d marks other ids",
            got=f"{len(marked or ())} of {len(t2d)}",
            expected=f"{len(ids)} of {spec.vocab}",
        )
    return ids


def _are_ids(given: tuple[int, ...], ids: tuple[int, ...], spec: EagleSpec, marked: tuple[int, ...] | None) -> bool:
    """Whether the table holds the target's ids themselves: ascending ids that t2d marks, or that cannot be offsets.

    Offsets rise only where ids are left out, so offsets that rise at every step leave no two neighbouring ids. Among Vd
    of V ids about Vd²/V are neighbours: from ten on, none at all (chance e^-10) means that these are ids.
    """
    if given == ids or any(b <= a for a, b in pairwise(given)) or given[0] < 0 or given[-1] >= spec.vocab:
        return False
    if marked is not None:
        return marked == given
    return ids[-1] >= spec.vocab or spec.draft_vocab * (spec.draft_vocab - 1) > 10 * spec.vocab
