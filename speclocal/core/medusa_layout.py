"""Medusa heads: names and shapes of their tensors in the four layouts there are."""

from __future__ import annotations

import re
from typing import NamedTuple

from speclocal.core.anatomy import first_of
from speclocal.core.head_spec import Config, MedusaSpec, TargetFacts, Tensors, Wanted, check_target, compare, whole
from speclocal.errors import ModelError

BLOCK = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
OUTPUT = re.compile(r"^(?:medusa_head\.)?(\d+)\.(\d+)\.weight$")
VLLM_BLOCK = re.compile(r"^(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
VLLM_OUTPUT = re.compile(r"^(?:medusa_heads\.)?lm_heads\.(\d+)\.weight$")
VLLM_MAP = re.compile(r"^(?:medusa_heads\.)?token_map$")
WHOLE_MODEL = re.compile(r"^(model|lm_head)\.")


def is_medusa(tensors: Tensors) -> bool:
    return any(pattern.match(name) for name in tensors for pattern in (BLOCK, VLLM_BLOCK, VLLM_OUTPUT))


class _Names(NamedTuple):
    """Normalised names, and what they say of the layout."""

    names: dict[str, str]
    blocks: dict[int, int]
    """Highest block of each head with blocks."""
    outputs: set[int]
    """Heads with an output matrix."""
    place: int
    """Place of the output among the parts of a head, 0 if there is none or it is not counted."""
    token_map: str | None
    vllm: bool
    whole_model: bool


def medusa(config: Config, tensors: Tensors, target: TargetFacts) -> tuple[MedusaSpec, dict[str, str]]:
    """The heads, and the normalised name of every stored tensor they use; errors as `heads.identify`.

    The tensors of a whole model around the heads (Medusa-2) are left to the target's loader.
    """
    found = _sort(tensors)
    notices: list[str] = []
    width = _square(tensors, found)
    check_target(
        target, whole(config, "hidden_size", width or target.hidden), whole(config, "vocab_size", target.vocab)
    )
    heads = _heads(config, found, notices)
    blocks = _blocks(config, found)
    names = found.names
    if found.token_map or (found.vllm and config.get("truncated_vocab_size")):
        _refuse_short(tensors, found, target.vocab)
    if found.token_map:
        names = {old: name for old, name in names.items() if old != found.token_map}
        notices.append("token_map is stored but not used: the output matrices hold the whole vocabulary")
    own_output = bool(found.outputs) or found.vllm
    if not own_output and str(config.get("version")) != "2":
        notices.append("the heads' file holds no output matrices: the target's is used")
    if found.whole_model:
        notices.append("these heads come with a model fine-tuned with them: it must be the target")
    spec = MedusaSpec(
        heads=heads,
        blocks=blocks,
        hidden=target.hidden,
        vocab=target.vocab,
        own_output=own_output,
        shared_output=found.vllm and config.get("original_lm_head") is True and found.outputs <= {0},
        bias=not found.vllm or config.get("medusa_fc_bias") is True or any(n.endswith(".bias") for n in names.values()),
        changes_target=found.whole_model,
        notices=tuple(notices),
    )
    compare("Medusa", tensors, names, tensors_of(spec))
    return spec, names


def tensors_of(spec: MedusaSpec) -> dict[str, Wanted]:
    """Every tensor of the heads by normalised name."""
    out: dict[str, Wanted] = {}
    for h in range(spec.heads):
        for j in range(spec.blocks):
            out[f"heads.{h}.blocks.{j}.weight"] = Wanted((spec.hidden, spec.hidden))
            if spec.bias:
                out[f"heads.{h}.blocks.{j}.bias"] = Wanted((spec.hidden,))
        if spec.own_output and (h == 0 or not spec.shared_output):
            out[f"heads.{h}.output.weight"] = Wanted((spec.vocab, spec.hidden))
    return out


def _sort(tensors: Tensors) -> _Names:
    names: dict[str, str] = {}
    blocks: dict[int, int] = {}
    outputs: set[int] = set()
    token_map = None
    vllm = any(VLLM_BLOCK.match(name) or VLLM_OUTPUT.match(name) for name in tensors)
    place = 0 if vllm else max((int(found[2]) for name in tensors if (found := OUTPUT.match(name))), default=0)
    inside = any(name.startswith("medusa_head.") for name in tensors)
    whole_model = False
    for old in tensors:
        if inside and WHOLE_MODEL.match(old):
            whole_model = True
            continue
        names[old] = old
        if found := (VLLM_BLOCK if vllm else BLOCK).match(old):
            h, j, kind = int(found[1]), int(found[2]), found[3]
            blocks[h] = max(blocks.get(h, 0), j)
            names[old] = f"heads.{h}.blocks.{j}.{kind}"
        elif found := (VLLM_OUTPUT if vllm else OUTPUT).match(old):
            if vllm or int(found[2]) == place:
                outputs.add(int(found[1]))
                names[old] = f"heads.{found[1]}.output.weight"
        elif vllm and VLLM_MAP.match(old):
            token_map = old
    return _Names(names, blocks, outputs, place, token_map, vllm, whole_model)


def _told(config: Config, key: str, found: _Names, vllm_key: str) -> int:
    """A count in the config, 0 if there is none: files of the vLLM layout have their own key."""
    value = first_of(config, key, vllm_key) if found.vllm else config.get(key)
    return value if isinstance(value, int) else 0


def _heads(config: Config, found: _Names, notices: list[str]) -> int:
    """Heads stored; published configs count too few."""
    stored = min(1 + max([*found.blocks, *found.outputs]), len(found.names))  # no more heads than tensors
    told = _told(config, "medusa_num_heads", found, "num_heads")
    if 0 < told < stored:
        notices.append(f"config.json says {told} Medusa heads, the file holds {stored}: all are used")
    if told > stored:
        raise ModelError("Medusa heads in the file", got=stored, expected=f"{told}, as its config.json says")
    return stored


def _blocks(config: Config, found: _Names) -> int:
    """Blocks of a head. The place of the output shows those before it, also those that are missing."""
    stored = min(found.place or 1 + max(found.blocks.values(), default=0), len(found.names))
    told = _told(config, "medusa_num_layers", found, "num_hidden_layers")
    if told > stored:
        raise ModelError("blocks in a Medusa head", got=stored, expected=f"{told}, as its config.json says")
    return stored


def _square(tensors: Tensors, found: _Names) -> int | None:
    """Width of the first block, if it is a square matrix."""
    shapes = [tuple(tensors[old][0]) for old, name in found.names.items() if name == "heads.0.blocks.0.weight"]
    return shapes[0][0] if shapes and len(shapes[0]) == 2 and shapes[0][0] == shapes[0][1] else None


def _refuse_short(tensors: Tensors, found: _Names, vocab: int) -> None:
    rows = [tensors[old][0][:1] for old, name in found.names.items() if name.endswith(".output.weight")]
    shortest = min((row[0] for row in rows if row), default=vocab)
    if shortest < vocab:
        raise ModelError(
            "Medusa heads over a part of the vocabulary (token_map, truncated_vocab_size) are not supported",
            got=f"{shortest} rows",
            expected=f"the target's {vocab}",
        )
