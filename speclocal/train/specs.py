"""The head that is trained for a target: sizes of the target's own layers, in the most widely read layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from speclocal.core.eagle_config import PLAIN_ROPES, SCALED_ROPES
from speclocal.core.head_spec import EagleSpec, TargetFacts
from speclocal.errors import ModelError

LEAST_LAYERS = 7
"""Below this the three usual points of the target coincide."""


def usual_taps(layers: int) -> tuple[int, ...]:
    """The states every engine reads when a head names none: after 2 layers, half of them, and all but 3."""
    if layers < LEAST_LAYERS:
        return tuple(sorted({1, max(layers // 2, 1), max(layers - 1, 1)}))
    return 2, layers // 2, layers - 3


@dataclass(frozen=True)
class DecoderSizes:
    """The decoder layers of a target."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    qk_norm: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DecoderSizes:
        """config: the target's text config. ModelError for a target whose sizes it does not name."""
        try:
            hidden, heads, inner = (
                int(config[key]) for key in ("hidden_size", "num_attention_heads", "intermediate_size")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"no head can be made for this target: {error} in its config.json") from error
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        kind = rope.get("rope_type") or rope.get("type")
        scaled = kind not in PLAIN_ROPES and kind in SCALED_ROPES
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")} if scaled else None
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=inner,
            eps=float(config.get("rms_norm_eps") or 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            qk_norm=config.get("model_type") == "qwen3",
        )


def eagle_spec(
    family: Literal["eagle3", "p_eagle"],
    config: Mapping[str, Any],
    facts: TargetFacts,
    taps: tuple[int, ...],
    draft_vocab: int,
    layers: int = 1,
    mask_token: int | None = None,
    depth: int | None = None,
) -> EagleSpec:
    """config: the target's text config. ModelError for a target whose sizes it does not name."""
    sizes = DecoderSizes.of(config)
    return EagleSpec(
        family=family,
        hidden=sizes.hidden,
        target_hidden=facts.hidden,
        vocab=facts.vocab,
        draft_vocab=min(draft_vocab, facts.vocab),
        layers=layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate=sizes.intermediate,
        eps=sizes.eps,
        rope_theta=sizes.rope_theta,
        rope_scaling=sizes.rope_scaling,
        fc=True,
        fc_bias=False,
        attention_bias=False,
        output_bias=False,
        qk_norm=False,
        taps=taps,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        own_embedding=mask_token is not None,
        own_head=True,
        mapped=draft_vocab < facts.vocab,
        mask_token=mask_token,
        mask_width=len(taps) * facts.hidden if mask_token is not None else None,
        suggested_depth=depth,
        notices=(),
    )
