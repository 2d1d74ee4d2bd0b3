"""EAGLE-1/2, EAGLE-3 and P-EAGLE heads: names and shapes of their tensors, and the head that follows from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from typing import Literal

from speclocal.core import eagle_config
from speclocal.core.anatomy import first_of
from speclocal.core.eagle_config import HeadConfig
from speclocal.core.head_spec import (
    BOOLEANS,
    FEATURE,
    INTEGERS,
    Config,
    EagleSpec,
    Overrides,
    TargetFacts,
    Tensors,
    Wanted,
    check_target,
    compare,
    few,
    refuse_overrides,
    whole,
)
from speclocal.errors import ModelError

Family = Literal["eagle", "eagle3", "p_eagle"]
Shapes = Mapping[str, tuple[int, ...]]
LABELS: dict[Family, str] = {"eagle": "EAGLE-1/2", "eagle3": "EAGLE-3", "p_eagle": "P-EAGLE"}
RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
INPUT_NORM = "layers.{}.input_layernorm.weight"
COMPUTED = "rotary_emb.inv_freq"
"""A table old files store and nobody reads."""


def eagle(
    config: Config, tensors: Tensors, target: TargetFacts, overrides: Overrides
) -> tuple[EagleSpec, dict[str, str]]:
    """The head, and the normalised name of every stored tensor it uses; errors as `heads.identify`."""
    parts = eagle_config.read(config)
    names = normalise(tensors)
    shapes: dict[str, tuple[int, ...]] = {name: tuple(tensors[old][0]) for old, name in names.items()}
    family = _family(shapes, parts)
    eagle_config.refuse_layers(parts)
    notices: list[str] = []
    if family == "eagle3" and not eagle_config.uses_taps(parts) and "fc.weight" in shapes:
        notices.append("fc.weight is stored but not used: use_aux_hidden_state is false in config.json")
        names = {old: name for old, name in names.items() if name != "fc.weight"}
        del shapes["fc.weight"]
    spec = _spec(family, parts, shapes, target, overrides, notices)
    wanted = tensors_of(spec)
    if "t2d" in shapes:
        wanted["t2d"] = Wanted((spec.vocab,), BOOLEANS)
    if "d2t" in shapes:
        wanted["d2t"] = Wanted((spec.draft_vocab,), INTEGERS)
    if "mask_hidden" in wanted and prod(shapes.get("mask_hidden", ())) == spec.mask_width:
        wanted["mask_hidden"] = Wanted(shapes["mask_hidden"])  # with or without leading ones
    compare(LABELS[family], tensors, names, wanted)
    return spec, names


def normalise(tensors: Tensors) -> dict[str, str]:
    """Normalised name by stored name, without tables that are computed."""
    names: dict[str, str] = {}
    for old in tensors:
        name = old
        for pattern, new in RENAMED:
            name = pattern.sub(new, name)
        if not name.endswith(COMPUTED):
            names[old] = name
    return names


def _family(shapes: Shapes, parts: HeadConfig) -> Family:
    """By the norm of the hidden or, where it is missing, by an attention that reads a pair of rows."""
    q, o = (shapes.get(f"layers.0.self_attn.{each}_proj.weight", ()) for each in "qo")
    reads_pair = len(q) == len(o) == 2 and q[1] == 2 * o[0]
    if "mask_hidden" in shapes:
        return "p_eagle"
    if "layers.0.hidden_norm.weight" in shapes or reads_pair:
        return "p_eagle" if eagle_config.says_p_eagle(parts) else "eagle3"
    headless = any(name.startswith("layers.0.self_attn.") for name in shapes) and INPUT_NORM.format(0) not in shapes
    if "fc.weight" in shapes or headless:
        return "eagle"
    raise ModelError(
        f"this is no EAGLE, P-EAGLE or Medusa head (architectures: {parts.architectures or 'none'})",
        got=few("tensors", list(shapes)) or "no tensors",
    )


def tensors_of(spec: EagleSpec) -> dict[str, Wanted]:
    """Every tensor of the head by normalised name, but for tables that only check others."""
    width = len(spec.taps) * spec.target_hidden
    out: dict[str, Wanted] = {}
    if spec.fc:
        out["fc.weight"] = Wanted((spec.hidden, 2 * spec.hidden if spec.family == "eagle" else width))
    if spec.fc_bias:
        out["fc.bias"] = Wanted((spec.hidden,))
    if spec.norm_before_fc:
        out["input_norm.weight"] = Wanted((width,))
    if spec.fc_norm:
        out |= {f"fc_norm.{a}.weight": Wanted((spec.target_hidden,)) for a in range(len(spec.taps))}
    for i in range(spec.layers):
        out |= _layer(spec, i)
    if spec.family != "eagle":
        out["norm.weight"] = Wanted((spec.hidden,))
    if spec.own_head:
        out["lm_head.weight"] = Wanted((spec.draft_vocab, spec.hidden))
    if spec.own_embedding:
        out["embed_tokens.weight"] = Wanted((spec.vocab, spec.hidden))
    if spec.mapped:
        out["d2t"] = Wanted((spec.draft_vocab,), INTEGERS)
    if spec.mask_width:
        out["mask_hidden"] = Wanted((1, 1, spec.mask_width))
    return out


def _layer(spec: EagleSpec, i: int) -> dict[str, Wanted]:
    reads_pair = spec.family != "eagle" and i == 0
    reads = 2 * spec.hidden if reads_pair else spec.hidden
    rows = {"q": spec.heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim, "v": spec.kv_heads * spec.head_dim}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{each}_proj.weight": (n, reads) for each, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (spec.hidden, rows["q"])
    if spec.attention_bias:
        shapes |= {f"self_attn.{each}_proj.bias": (n,) for each, n in rows.items()}
    if spec.output_bias:
        shapes["self_attn.o_proj.bias"] = (spec.hidden,)
    if spec.qk_norm:
        shapes |= {f"self_attn.{each}_norm.weight": (spec.head_dim,) for each in "qk"}
    if spec.family != "eagle" or i > 0:
        shapes["input_layernorm.weight"] = (spec.hidden,)
    if reads_pair:
        shapes["hidden_norm.weight"] = (spec.hidden,)
    shapes["post_attention_layernorm.weight"] = (spec.hidden,)
    shapes |= {f"mlp.{each}_proj.weight": (spec.intermediate, spec.hidden) for each in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (spec.hidden, spec.intermediate)
    return {f"layers.{i}.{name}": Wanted(shape) for name, shape in shapes.items()}


def _spec(
    family: Family, parts: HeadConfig, shapes: Shapes, target: TargetFacts, overrides: Overrides, notices: list[str]
) -> EagleSpec:
    layer, top, eagle1 = parts.layer, parts.top, family == "eagle"
    hidden, heads = whole(layer, "hidden_size"), whole(layer, "num_attention_heads")
    kv_heads = whole(layer, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError("key/value heads of the head's config.json", got=kv_heads, expected=f"a divisor of {heads}")
    target_hidden = hidden if eagle1 else whole(top, "target_hidden_size", hidden)
    check_target(target, target_hidden, whole(layer, "vocab_size", target.vocab))
    draft_vocab = _draft_vocab(top, shapes, target.vocab)
    uses_taps = not eagle1 and eagle_config.uses_taps(parts)
    refuse_overrides(LABELS[family], overrides, *_settings(family, uses_taps))
    if not uses_taps and hidden != target_hidden:
        raise ModelError(
            "this head reads the target's feature without fc", got=hidden, expected=f"width {target_hidden}"
        )
    taps: tuple[int, ...] = (FEATURE,)
    if uses_taps:
        count = _tap_count(LABELS[family], parts, shapes, hidden, target_hidden)
        taps = eagle_config.taps(parts, count, target.layers, overrides.taps, notices)
    theta, scaling = eagle_config.rope(parts, overrides.rope_theta, notices)
    eagle_config.note_positions(parts, target, notices)
    own_head = "lm_head.weight" in shapes or draft_vocab < target.vocab or hidden != target_hidden
    if not own_head and not eagle1:
        notices.append("the head's file holds no output matrix: the target's is used")
    trained = family != "eagle3" or parts.flag("embed_requires_grad") or hidden != target_hidden
    bias = parts.flag("attention_bias") or parts.flag("qkv_bias") or _any(shapes, r"self_attn\.[qkv]_proj\.bias")
    is_qwen3 = parts.speculators and layer.get("model_type") == "qwen3"
    return EagleSpec(
        family=family,
        hidden=hidden,
        target_hidden=target_hidden,
        vocab=target.vocab,
        draft_vocab=draft_vocab,
        layers=_layers(parts, shapes),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole(layer, "head_dim", hidden // heads),
        intermediate=whole(layer, "intermediate_size"),
        eps=eagle_config.eps(parts, notices),
        rope_theta=theta,
        rope_scaling=scaling,
        fc=eagle1 or uses_taps,
        fc_bias=eagle1 and parts.flag("bias") is not False,
        attention_bias=bool(bias),
        output_bias=_any(shapes, r"self_attn\.o_proj\.bias")
        or (parts.speculators and bool(parts.flag("attention_bias"))),
        qk_norm=is_qwen3 or _any(shapes, r"self_attn\.[qk]_norm\.weight"),
        taps=taps,
        norm_before_residual=not eagle1
        and eagle_config.norm_before_residual(parts, overrides.norm_before_residual, notices),
        norm_before_fc=uses_taps and ("input_norm.weight" in shapes or bool(parts.flag("norm_before_fc"))),
        fc_norm=uses_taps and (_any(shapes, r"^fc_norm\.") or bool(parts.flag("fc_norm"))),
        norm_output=not eagle1 and eagle_config.norm_output(parts, overrides.norm_output, notices),
        own_embedding="embed_tokens.weight" in shapes or bool(trained),
        own_head=own_head,
        mapped=draft_vocab < target.vocab,
        mask_token=eagle_config.mask_token(parts, target.vocab, overrides.mask_token) if family == "p_eagle" else None,
        mask_width=_mask_width(shapes, hidden, len(taps) * target_hidden) if family == "p_eagle" else None,
        suggested_depth=eagle_config.suggested_depth(parts),
        notices=tuple(notices),
    )


def _settings(family: Family, uses_taps: bool) -> list[str]:
    """The overrides such a head has."""
    if family == "eagle":
        return ["rope_theta"]
    return (
        ["rope_theta", "norm_before_residual", "norm_output"]
        + (["taps"] if uses_taps else [])
        + (["mask_token"] if family == "p_eagle" else [])
    )


def _any(shapes: Shapes, pattern: str) -> bool:
    return any(re.search(pattern, name) for name in shapes)


def _layers(parts: HeadConfig, shapes: Shapes) -> int:
    """Layers stored; flat files often give the target's number, speculators files the drafter's."""
    found = {int(name.split(".")[1]) for name in shapes if re.match(r"layers\.\d+\.", name)}
    stored = min(1 + max(found, default=0), len(shapes))  # no more layers than tensors, whatever their names say
    told = whole(parts.layer, "num_hidden_layers", stored) if parts.speculators else stored
    if told != stored:
        raise ModelError("layers in the head's file", got=stored, expected=f"{told}, as its config.json says")
    return stored


def _draft_vocab(top: Config, shapes: Shapes, vocab: int) -> int:
    rows = [shapes[name][0] for name in ("lm_head.weight", "d2t") if shapes.get(name)]
    size = whole(top, "draft_vocab_size", rows[0] if rows else vocab)
    if size > vocab:
        raise ModelError("draft vocabulary of the head", got=size, expected=f"at most the target's {vocab}")
    if size < vocab and "d2t" not in shapes:
        raise ModelError(
            f"the head drafts {size} of the target's {vocab} tokens and its file does not say which: d2t is missing"
        )
    return size


def _tap_count(label: str, parts: HeadConfig, shapes: Shapes, hidden: int, target_hidden: int) -> int:
    """States of the target that `fc` reads."""
    shape = shapes.get("fc.weight")
    if shape is None:
        raise ModelError(f"this {label} head's tensors are not those of its config.json: 1 missing: fc.weight")
    if len(shape) != 2 or shape[1] == 0 or shape[1] % target_hidden:
        raise ModelError(
            f"this {label} head's tensors are not those of its config.json: fc.weight of another shape",
            got=list(shape),
            expected=f"[{hidden}, a multiple of {target_hidden}]",
        )
    count = shape[1] // target_hidden
    told = first_of(parts.top, "num_aux_hidden_states")
    if told is not None and told != count:
        raise ModelError(
            "states of the target that fc.weight reads", got=count, expected=f"{told} (num_aux_hidden_states)"
        )
    return count


def _mask_width(shapes: Shapes, hidden: int, width: int) -> int:
    """Heads of an early kind store the mask row as wide as what `fc` gives."""
    return hidden if prod(shapes.get("mask_hidden", ())) == hidden else width
