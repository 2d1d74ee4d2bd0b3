"""The layouts that heads are stored in: EAGLE-1, other spellings of names, P-EAGLE, and four kinds of Medusa files."""

from __future__ import annotations

from typing import Any

import pytest

from speclocal.core.heads import MedusaSpec, Overrides
from speclocal.errors import ModelError, UsageError
from tests.core.golden_heads import HeadFile, eagle, head_file, said, with_config, with_layer


def test_the_bias_of_eagle_1_is_there_unless_the_config_says_no() -> None:
    assert eagle(with_config("eagle1", bias=True)).fc_bias
    with pytest.raises(ModelError, match=r"1 unknown: fc\.bias"):
        with_config("eagle1", bias=False).identify()
    with pytest.raises(ModelError, match=r"1 missing: fc\.bias"):
        with_config("eagle2-llama3", bias=None).identify()


@pytest.mark.parametrize("key", ["qkv_bias", "attention_bias", "none"])
def test_biases_of_attention(key: str) -> None:
    file = with_config("eagle1", **{key: True})
    for part in "qkv":
        file.tensors[f"layers.0.self_attn.{part}_proj.bias"] = ([64], "F32")
    assert eagle(file).attention_bias
    assert not eagle(file).output_bias
    del file.tensors["layers.0.self_attn.k_proj.bias"]
    with pytest.raises(ModelError, match=r"1 missing: layers\.0\.self_attn\.k_proj\.bias"):
        file.identify()


def test_biases_of_attention_in_speculators_files_include_the_output() -> None:
    file = with_layer("peagle-speculators", attention_bias=True)
    for layer in (0, 1):
        for part, width in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            file.tensors[f"layers.{layer}.self_attn.{part}_proj.bias"] = ([width], "F32")
    spec = eagle(file)
    assert spec.attention_bias
    assert spec.output_bias


def test_eagle_1_settings_and_an_added_output_matrix() -> None:
    file = head_file("eagle1")
    with pytest.raises(UsageError, match="EAGLE-1/2 heads have no setting taps, norm_output"):
        file.identify(Overrides(taps=(1,), norm_output=True))
    file.tensors["lm_head.weight"] = ([128, 64], "F32")
    assert eagle(file).own_head


def test_other_spellings_of_names() -> None:
    prefixed = head_file("eagle3-specforge")
    prefixed.tensors = {f"model.{name}": each for name, each in prefixed.tensors.items()}
    assert eagle(prefixed) == eagle(head_file("eagle3-specforge"))
    legacy = head_file("eagle31-fcnorm")
    for a, each in enumerate(("low", "mid", "high")):
        legacy.tensors[f"aux_norm_{each}.weight"] = legacy.tensors.pop(f"fc_norm.{a}.weight")
    assert legacy.identify()[1]["aux_norm_mid.weight"] == "fc_norm.1.weight"
    old = head_file("eagle1")
    old.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = ([8], "F32")
    assert eagle(old) == eagle(head_file("eagle1"))
    twice = head_file("eagle3")
    twice.tensors["layers.0.hidden_norm.weight"] = ([64], "F32")
    with pytest.raises(ModelError, match=r"1 stored under two names: layers\.0\.hidden_norm\.weight"):
        twice.identify()


@pytest.mark.parametrize(("key", "value"), [("mask_token_id", 5), ("pard_token", "5"), ("ptd_token_id", 5)])
def test_the_mask_token_has_several_names(key: str, value: Any) -> None:
    file = with_config("peagle-speculators", mask_token_id=None)
    file.config[key] = value
    assert eagle(file).mask_token == 5


@pytest.mark.parametrize("value", [128, -1, "<mask>", 1.5, True])
def test_a_mask_token_outside_the_vocabulary_is_refused(value: Any) -> None:
    with pytest.raises(ModelError, match=r"mask token .*expected 0 to 127"):
        with_config("peagle-speculators", mask_token_id=value).identify()


def test_a_missing_mask_token_must_be_given() -> None:
    file = with_config("peagle-speculators", mask_token_id=None)
    with pytest.raises(ModelError, match="-o mask_token="):
        file.identify()
    assert eagle(file, Overrides(mask_token=0)).mask_token == 0
    with pytest.raises(UsageError, match="got 128, expected 0 to 127"):
        file.identify(Overrides(mask_token=128))


@pytest.mark.parametrize(("shape", "width"), [([1, 320], 320), ([320], 320), ([1, 1, 64], 64)])
def test_shapes_of_the_mask_row(shape: list[int], width: int) -> None:
    file = head_file("peagle-speculators")
    file.tensors["mask_hidden"] = (shape, "F32")
    assert eagle(file).mask_width == width


def vllm(heads: int = 3, rows: int = 128, prefix: str = "") -> HeadFile:
    tensors = {}
    for h in range(heads):
        tensors[f"{prefix}blocks.{h}.layers.0.weight"] = ([64, 64], "BF16")
        tensors[f"{prefix}lm_heads.{h}.weight"] = ([rows, 64], "BF16")
    config = {"model_type": "medusa", "num_heads": heads, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 128}
    return HeadFile(config, tensors, head_file("medusa1").target)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_medusa_converted_for_vllm(prefix: str) -> None:
    spec, names = vllm(prefix=prefix).identify()
    assert spec == MedusaSpec(3, 1, 64, 128, True, False, False, False, ())
    assert names[f"{prefix}lm_heads.2.weight"] == "heads.2.output.weight"
    assert names[f"{prefix}blocks.1.layers.0.weight"] == "heads.1.blocks.0.weight"


def test_medusa_biases_that_the_config_promises() -> None:
    file = vllm()
    file.config["medusa_fc_bias"] = True
    with pytest.raises(ModelError, match=r"3 missing: heads\.0\.blocks\.0\.bias"):
        file.identify()


def test_medusa_heads_that_share_one_output_matrix() -> None:
    file = vllm()
    file.config["original_lm_head"] = True
    del file.tensors["lm_heads.2.weight"]
    with pytest.raises(ModelError, match=r"1 missing: heads\.2\.output\.weight"):
        file.identify()  # two of three are no shared one
    del file.tensors["lm_heads.1.weight"], file.config["original_lm_head"]
    with pytest.raises(ModelError, match=r"2 missing: heads\.1\.output\.weight"):
        file.identify()
    file.config["original_lm_head"] = True
    spec, _ = file.identify()
    assert isinstance(spec, MedusaSpec)
    assert (spec.own_output, spec.shared_output) == (True, True)


def test_medusa_over_a_part_of_the_vocabulary_is_refused_by_name() -> None:
    file = vllm(rows=100)
    file.tensors["token_map"] = ([100], "I64")
    with pytest.raises(ModelError, match=r"part of the vocabulary \(token_map.*got 100 rows"):
        file.identify()
    file = vllm()
    file.tensors["token_map"] = ([100], "I64")
    spec, names = file.identify()
    assert "token_map" not in names
    assert said(spec, "token_map is stored but not used")  # type: ignore[arg-type]


def test_medusa_heads_the_config_counts_and_the_file_lacks() -> None:
    file = head_file("medusa1")
    file.tensors = {name: each for name, each in file.tensors.items() if name[0] in "01"}
    file.config["medusa_num_heads"] = 4
    with pytest.raises(ModelError, match="Medusa heads in the file, got 2, expected 4"):
        file.identify()
    file.config["medusa_num_heads"], file.config["medusa_num_layers"] = 2, 3
    with pytest.raises(ModelError, match="blocks in a Medusa head, got 1, expected 3"):
        file.identify()


def test_medusa_blocks_are_counted_by_the_place_of_the_output() -> None:
    file = head_file("medusa1")
    for h in range(5):
        file.tensors[f"{h}.2.weight"] = file.tensors.pop(f"{h}.1.weight")
    with pytest.raises(ModelError, match=r"10 missing: heads\.0\.blocks\.1\.weight"):
        file.identify()
    for h in range(5):
        file.tensors[f"{h}.1.linear.weight"], file.tensors[f"{h}.1.linear.bias"] = ([64, 64], "F32"), ([64], "F32")
    spec, _ = file.identify()
    assert isinstance(spec, MedusaSpec)
    assert spec.blocks == 2
    file.tensors["4.1.weight"] = file.tensors.pop("4.2.weight")
    with pytest.raises(ModelError, match=r"1 missing: heads\.4\.output\.weight; 1 unknown: 4\.1\.weight"):
        file.identify()


def test_medusa_without_output_matrices_is_said_unless_announced() -> None:
    file = head_file("medusa-shared-head")
    assert not file.identify()[0].notices
    del file.config["version"]
    assert said(file.identify()[0], "the target's is used")


def test_medusa_has_no_settings() -> None:
    with pytest.raises(UsageError, match="Medusa heads have no setting rope_theta"):
        head_file("medusa1").identify(Overrides(rope_theta=1e4))
