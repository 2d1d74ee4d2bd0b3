"""Golden heads are identified as what they are; a spoilt file is refused by the name of what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from speclocal.core import eagle_config, eagle_layout, medusa_layout
from speclocal.core.heads import FEATURE, EagleSpec, MedusaSpec, Spec, TargetFacts
from speclocal.errors import ModelError
from tests.core.golden_heads import head_file

EAGLE1 = EagleSpec(
    family="eagle", hidden=64, target_hidden=64, vocab=128, draft_vocab=128, layers=1, heads=4, kv_heads=4, head_dim=16,
    intermediate=112, eps=1e-5, rope_theta=10000.0, rope_scaling=None, fc=True, fc_bias=True, attention_bias=False,
    output_bias=False, qk_norm=False, taps=(FEATURE,), norm_before_residual=False, norm_before_fc=False, fc_norm=False,
    norm_output=False, own_embedding=True, own_head=False, mapped=False, mask_token=None, mask_width=None,
    suggested_depth=None, notices=(),
)  # fmt: skip
EAGLE3 = replace(
    EAGLE1, family="eagle3", draft_vocab=48, kv_heads=2, fc_bias=False, taps=(2, 4, 5), own_embedding=False,
    own_head=True, mapped=True,
)  # fmt: skip
SPECULATORS = replace(EAGLE3, draft_vocab=80, own_embedding=True, suggested_depth=3)
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MEDUSA = MedusaSpec(
    heads=5, blocks=1, hidden=64, vocab=128, own_output=True, shared_output=False, bias=True, changes_target=False,
    notices=(),
)  # fmt: skip
EXPECTED: dict[str, Spec] = {
    "eagle1": EAGLE1,
    "eagle2": EAGLE1,
    "eagle2-llama3": replace(EAGLE1, fc_bias=False, kv_heads=2, rope_theta=500000.0),
    "eagle3": EAGLE3,
    "eagle3-fullvocab": replace(EAGLE3, draft_vocab=128, kv_heads=4, mapped=False),
    "eagle3-narrow": replace(
        EAGLE3, hidden=48, head_dim=12, intermediate=96, draft_vocab=56, own_embedding=True
    ),
    "eagle3-specforge": replace(EAGLE3, rope_theta=1000000.0),
    "eagle3-speculators": replace(
        SPECULATORS, norm_before_residual=True, rope_theta=500000.0, rope_scaling=LLAMA3
    ),
    "eagle31-speculators": replace(
        SPECULATORS, norm_before_fc=True, norm_output=True, rope_theta=1000000.0, taps=(3, 6, 8)
    ),
    "eagle31-fcnorm": replace(
        SPECULATORS, layers=2, intermediate=96, eps=1e-6, rope_theta=1000000.0, qk_norm=True, taps=(1, 4, 5),
        norm_before_residual=True, fc_norm=True, norm_output=True,
    ),
    "peagle-speculators": replace(
        SPECULATORS, family="p_eagle", layers=2, draft_vocab=88, rope_theta=1000000.0, taps=(1, 2, 4, 5, 7),
        mask_token=127, mask_width=320, suggested_depth=4,
    ),
    "medusa1": MEDUSA,
    "medusa2": replace(MEDUSA, heads=4, changes_target=True),
    "medusa-shared-head": replace(MEDUSA, heads=3, own_output=False),
}  # fmt: skip
GUESSED = "guessed after layers 2,4,5; if few drafts are accepted, set others with -o taps=A,B,C"
NOTICES = dict.fromkeys(["eagle3", "eagle3-fullvocab", "eagle3-narrow", "eagle3-speculators"], GUESSED) | {
    "medusa1": "says 2 Medusa heads, the file holds 5",
    "medusa2": "it must be the target",
}
OPTIONAL = {
    "eagle3": {"t2d"},
    "eagle3-fullvocab": {"lm_head.weight"},  # of the target's size: the target's is used
    "eagle3-narrow": {"t2d"},
    "eagle3-specforge": {"t2d"},
    "eagle3-speculators": {"t2d", "embed_tokens.weight"},
    "eagle31-speculators": {"t2d", "embed_tokens.weight"},
    "eagle31-fcnorm": {"t2d", "embed_tokens.weight"},
    "peagle-speculators": {"t2d"},
}
every_folder = pytest.mark.parametrize("name", EXPECTED)


def plain(spec: Spec) -> Spec:
    return replace(spec, notices=())


@every_folder
def test_a_golden_head_is_what_its_makers_say(name: str) -> None:
    spec, names = head_file(name).identify()
    assert plain(spec) == EXPECTED[name]
    assert [NOTICES[name] in notice for notice in spec.notices] == [True] * (name in NOTICES)
    assert len(set(names.values())) == len(names)
    assert set(head_file(name).tensors) - set(names) == {
        old for old in head_file(name).tensors if name == "medusa2" and not old.startswith("medusa_head.")
    }


WRONG_RULES: list[tuple[str, object, str, Any]] = [
    ("eagle3-specforge", eagle_config, "_nested", lambda ids, *_: ids),
    ("eagle31-speculators", eagle_config, "_ids", lambda config, key: tuple(i + 1 for i in config.get(key) or ())),
    ("eagle3", eagle_config, "PLAIN_THETA", 500000.0),
    ("eagle3-fullvocab", eagle_layout, "_layers", lambda parts, shapes: parts.layer["num_hidden_layers"]),
    ("eagle3-speculators", eagle_config, "norm_before_residual", lambda *_: False),
    ("eagle31-fcnorm", eagle_config, "norm_output", lambda *_: False),
    ("peagle-speculators", eagle_layout, "_family", lambda *_: "eagle3"),
    ("medusa1", medusa_layout, "_heads", lambda config, *_: config["medusa_num_heads"]),
]


@pytest.mark.parametrize(("name", "module", "rule", "wrong"), WRONG_RULES, ids=[rule[2] for rule in WRONG_RULES])
def test_a_wrong_rule_is_seen(
    name: str, module: object, rule: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, rule, wrong)
    try:
        spec, _ = head_file(name).identify()
    except ModelError:
        return
    assert plain(spec) != EXPECTED[name]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("eagle1", "layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("eagle3", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("eagle3", "fc.weight", "fc.weight"),
        ("peagle-speculators", "mask_hidden", "mask_hidden"),
        ("medusa1", "4.0.linear.bias", "heads.4.blocks.0.bias"),
        ("medusa1", "3.1.weight", "heads.3.output.weight"),
        ("medusa2", "medusa_head.2.0.linear.weight", "heads.2.blocks.0.weight"),
        ("medusa2", "medusa_head.2.1.weight", "heads.2.output.weight"),
    ],
)
def test_names_are_normalised(name: str, old: str, new: str) -> None:
    assert head_file(name).identify()[1][old] == new


def normal(name: str) -> dict[str, str]:
    return head_file(name).identify()[1]


@every_folder
def test_every_missing_tensor_is_named(name: str) -> None:
    for old, new in normal(name).items():
        file = head_file(name)
        del file.tensors[old]
        if new in OPTIONAL.get(name, ()):
            file.identify()
            continue
        with pytest.raises(ModelError, match="missing") as raised:
            file.identify()
        assert new in str(raised.value), old


@every_folder
def test_every_wrong_shape_is_named(name: str) -> None:
    for old in normal(name):
        for axis in range(len(head_file(name).tensors[old][0])):
            file = head_file(name)
            file.tensors[old][0][axis] += 1
            got = str(file.tensors[old][0])
            with pytest.raises(ModelError) as raised:
                file.identify()
            assert old in str(raised.value), (old, axis)
            assert got in str(raised.value), (old, axis)


@every_folder
def test_every_wrong_type_is_named(name: str) -> None:
    for old in normal(name):
        file = head_file(name)
        shape, kind = file.tensors[old]
        cast = "I8" if kind == "F32" else "BF16"  # quantised; or a whole file cast, tables of ids included
        file.tensors[old] = (shape, cast)
        with pytest.raises(ModelError, match=f"of another type: {old} got {cast}"):
            file.identify()


@every_folder
def test_an_unknown_tensor_is_named(name: str) -> None:
    file = head_file(name)
    file.tensors["rotation.weight"] = ([64, 64], "F32")
    with pytest.raises(ModelError, match=r"1 unknown: rotation\.weight"):
        file.identify()


def test_everything_that_is_wrong_is_listed_at_once() -> None:
    file = head_file("eagle3")
    for part in ("gate", "up", "down"):
        del file.tensors[f"midlayer.mlp.{part}_proj.weight"]
    for part in "qk":
        del file.tensors[f"midlayer.self_attn.{part}_proj.weight"]
    file.tensors["a"], file.tensors["norm.weight"] = ([1], "F32"), ([32], "F32")
    with pytest.raises(ModelError) as raised:
        file.identify()
    for words in (
        "5 missing: layers.0.self_attn.q_proj.weight",
        ", …",
        "1 unknown: a",
        "norm.weight got [32] expected [64]",
    ):
        assert words in str(raised.value)


@every_folder
@pytest.mark.parametrize("other", [{"hidden": 128}, {"vocab": 256}], ids=["hidden size", "vocabulary"])
def test_a_head_for_another_target_is_refused(name: str, other: dict[str, int]) -> None:
    file = head_file(name)
    file.target = replace(file.target, **other)
    told = "vocab" not in other or name not in ("medusa1", "medusa-shared-head")  # configs without any size
    if name == "medusa-shared-head" and not told:
        return  # neither its tensors nor its config know a vocabulary
    with pytest.raises(ModelError, match="made for another target" if told else "of another shape"):
        file.identify()


@pytest.mark.parametrize("name", ["eagle31-speculators", "peagle-speculators"])
def test_a_target_with_too_few_layers_is_refused(name: str) -> None:
    file = head_file(name)
    file.target = replace(file.target, layers=6)
    with pytest.raises(ModelError, match=r"different numbers from 0 to 6.*-o taps"):
        file.identify()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ("midlayer.self_attn.kv_a_proj_with_mqa.weight", r"MLA .*\(Eagle3DeepseekV2ForCausalLM\)"),
        ("layers.0.self_attn.kv_b_proj.weight", "MLA"),
        ("midlayer.mlp.experts.0.up_proj.weight", "mixture-of-experts"),
        ("hydra_mlp.0.0.linear.weight", "Hydra"),
    ],
)
def test_unknown_bodies_are_refused_by_name(tensor: str, words: str) -> None:
    file = head_file("eagle3")
    file.config["architectures"] = ["Eagle3DeepseekV2ForCausalLM"]
    file.tensors[tensor] = ([8, 8], "F32")
    with pytest.raises(ModelError, match=words) as raised:
        file.identify()
    assert tensor in str(raised.value)


def test_a_whole_model_is_no_head() -> None:
    file = head_file("medusa2")
    file.tensors = {name: each for name, each in file.tensors.items() if not name.startswith("medusa_head.")}
    with pytest.raises(ModelError, match=r"no EAGLE, P-EAGLE or Medusa head \(architectures: MedusaLlamaModel\)"):
        file.identify()


def test_a_longer_context_than_the_head_was_made_for_is_said() -> None:
    file = head_file("eagle3-fullvocab")
    file.target = TargetFacts(layers=8, hidden=64, vocab=128, positions=4096)
    assert any("texts of up to 2048 tokens" in notice for notice in file.identify()[0].notices)
    file.target = replace(file.target, positions=2048)
    assert not any("texts of up to" in notice for notice in file.identify()[0].notices)
