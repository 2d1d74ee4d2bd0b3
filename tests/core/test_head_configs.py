"""Config files of heads that mislead or are silent: layers of the target, rope, flags, counts."""

from __future__ import annotations

from typing import Any

import pytest

from speclocal.core.heads import FEATURE, EagleSpec, Overrides, TargetFacts
from speclocal.errors import ModelError, UsageError
from tests.core.golden_heads import eagle, head_file, said, with_config, with_layer

IDS = "eagle_aux_hidden_state_layer_ids"


# Layers of the target.


@pytest.mark.parametrize(
    ("layers", "ids", "taps", "sure"),
    [
        (94, [1, 46, 90], (2, 47, 91), True),  # Qwen3-235B
        (61, [1, 29, 57], (2, 30, 58), True),  # DeepSeek-V3
        (61, [2, 30, 58], (2, 30, 58), True),  # Kimi-K2
        (36, [1, 17, 32], (2, 18, 33), True),  # gpt-oss-120b
        (36, [24, 30, 36], (24, 30, 36), True),  # the same, the last one after all layers
        (36, [1, 17, 33], (2, 18, 34), False),
        (43, [1, 21, 40], (2, 22, 41), False),
        (36, [3, 17, 33], (3, 17, 33), False),
        (36, [33, 3, 17], (3, 17, 33), False),
    ],
)
def test_a_nested_list_counts_states_or_outputs(layers: int, ids: list[int], taps: tuple[int, ...], sure: bool) -> None:
    file = with_config(eagle_config={IDS: ids})
    file.target = TargetFacts(layers=layers, hidden=64, vocab=128)
    spec = eagle(file)
    assert spec.taps == taps
    assert said(spec, "can be counted in two ways") != sure
    assert said(spec, "-o taps=") != sure


def test_a_top_level_list_counts_states() -> None:
    spec = eagle(with_config(**{IDS: [1, 3, 4]}))
    assert (spec.taps, spec.notices) == ((1, 3, 4), ())


def test_a_nested_list_in_a_speculators_file_counts_states() -> None:
    spec = eagle(with_config("eagle3-speculators", eagle_config={IDS: [1, 3, 4]}))
    assert (spec.taps, spec.notices) == ((1, 3, 4), ())


def test_two_lists_that_agree_are_one_and_others_are_said() -> None:
    spec = eagle(with_config(**{IDS: [2, 4, 5]}, eagle_config={IDS: [1, 3, 4]}))
    assert (spec.taps, spec.notices) == ((2, 4, 5), ())
    spec = eagle(with_config(**{IDS: [2, 4, 5]}, eagle_config={IDS: [1, 3, 6]}))
    assert spec.taps == (2, 4, 5)
    assert said(spec, "two sets of layers")


def test_angelslim_counts_outputs() -> None:
    assert eagle(with_config(aux_hidden_states_layer_ids=[1, 3, 4])).taps == (2, 4, 5)


def test_a_missing_list_is_guessed_loudly_only_where_there_is_a_usual_one() -> None:
    assert said(eagle(with_config()), "guessed after layers 2,4,5")
    short = head_file("eagle3")
    short.target = TargetFacts(layers=6, hidden=64, vocab=128)
    with pytest.raises(ModelError, match=r"does not name the 3 layers.*-o taps"):
        short.identify()
    with pytest.raises(ModelError, match=r"does not name the 5 layers.*-o taps"):
        with_config("peagle-speculators", **{IDS: None}).identify()


@pytest.mark.parametrize("ids", [[2, 4], [2, 4, 5, 6], [2, 4, 4], [2, 4, 9]], ids=["few", "many", "twice", "outside"])
def test_a_list_that_does_not_fit_is_refused(ids: list[int]) -> None:
    with pytest.raises(ModelError, match=r"reads 3 states .*expected 3 different numbers from 0 to 8"):
        with_config(**{IDS: ids}).identify()


@pytest.mark.parametrize("ids", ["2,4,5", [2, "4", 5], [True, 4, 5], [-1, 4, 5], 3])
def test_a_list_of_something_else_is_refused(ids: Any) -> None:
    with pytest.raises(ModelError, match="expected a list of layers"):
        with_config(**{IDS: ids}).identify()


def test_an_override_replaces_the_list_and_its_warning() -> None:
    spec = eagle(with_config(), Overrides(taps=(0, 3, 8)))
    assert (spec.taps, spec.notices) == ((0, 3, 8), ())


@pytest.mark.parametrize("taps", [(), (2, 4), (4, 2, 5), (2, 4, 4), (2, 4, 9), (-1, 4, 5)])
def test_an_override_that_cannot_be_is_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="expected 3 numbers from 0 to 8, ascending"):
        with_config().identify(Overrides(taps=taps))


def test_the_number_of_states_comes_from_the_tensor() -> None:
    file = with_config(num_aux_hidden_states=4)
    with pytest.raises(ModelError, match=r"got 3, expected 4 \(num_aux_hidden_states\)"):
        file.identify()


@pytest.mark.parametrize("keep", [False, True], ids=["without fc", "fc stored but unused"])
def test_heads_called_eagle3_that_read_the_feature(keep: bool) -> None:
    file = with_config(eagle_config={"use_aux_hidden_state": False})
    if not keep:
        del file.tensors["fc.weight"]
    spec, names = file.identify()
    assert isinstance(spec, EagleSpec)
    assert (spec.family, spec.taps, spec.fc) == ("eagle3", (FEATURE,), False)
    assert "fc.weight" not in names
    assert said(spec, "fc.weight is stored but not used") == keep
    with pytest.raises(UsageError, match="no setting taps"):
        file.identify(Overrides(taps=(1, 2, 3)))


def test_without_fc_the_widths_must_be_equal() -> None:
    file = with_config("eagle3-narrow", eagle_config={"use_aux_hidden_state": False})
    with pytest.raises(ModelError, match="without fc, got 48, expected width 64"):
        file.identify()


# Rope.


def test_the_base_is_the_drafters_never_the_targets() -> None:
    assert eagle(with_config()).rope_theta == 10000.0
    assert eagle(with_config(rope_theta=5e5)).rope_theta == 5e5
    assert eagle(with_config(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})).rope_theta == 1e6
    assert eagle(with_config(rope_theta=5e5), Overrides(rope_theta=10000.0)).rope_theta == 10000.0


@pytest.mark.parametrize(
    "sign",
    [
        {"target_model_type": "qwen3"},
        {"architectures": ["Eagle3LlamaForCausalLM"]},
        {"aux_hidden_states_layer_ids": [1, 3, 4]},
    ],
)
def test_a_base_that_the_trainer_ignored_is_said(sign: dict[str, Any]) -> None:
    assert said(eagle(with_config(rope_theta=1e6, **sign)), "try -o theta=10000")
    assert not said(eagle(with_config(rope_theta=1e6)), "theta")
    assert not said(eagle(with_config(rope_theta=1e6, **sign), Overrides(rope_theta=1e6)), "theta")


@pytest.mark.parametrize(
    ("given", "scaling"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, None),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"type": "yarn", "factor": 4}, {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 256}),
    ],
)
def test_kinds_of_rope(given: dict[str, Any] | None, scaling: dict[str, Any] | None) -> None:
    assert eagle(with_config(rope_scaling=given)).rope_scaling == scaling
    assert eagle(with_config(rope_parameters=given and given | {"rope_theta": 7.0})).rope_scaling == scaling


@pytest.mark.parametrize(
    ("key", "given", "words"),
    [
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "got dynamic, expected linear, llama3, yarn"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "low_freq_factor of the llama3 rope"),
        ("rope_scaling", {"rope_type": "linear", "factor": "2"}, "factor of the linear rope"),
        ("rope_scaling", "linear", "expected a dict"),
        ("rope_parameters", {"full_attention": {"rope_theta": 1e4}}, "one rope for all layers"),
        ("rope_theta", 0, "rope_theta .*expected a positive number"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
    ],
)
def test_ropes_that_are_not_supported(key: str, given: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        with_config(**{key: given}).identify()


# Flags and counts.


def test_flags_are_found_at_the_top_and_nested() -> None:
    assert eagle(with_config(norm_before_residual=True)).norm_before_residual
    assert eagle(with_config(eagle_config={"norm_before_residual": True})).norm_before_residual
    with pytest.raises(ModelError, match=r"norm_before_residual .*expected true or false"):
        with_config(norm_before_residual="yes").identify()


def test_a_missing_norm_before_residual_is_said_of_speculators_files() -> None:
    spec = eagle(with_config("eagle3-speculators", norm_before_residual=None))
    assert not spec.norm_before_residual
    assert said(spec, "-o residual=yes")
    assert not said(eagle(with_config()), "norm_before_residual")
    chosen = eagle(with_config("eagle3-speculators", norm_before_residual=None), Overrides(norm_before_residual=True))
    assert chosen.norm_before_residual
    assert not said(chosen, "norm_before_residual")


def test_norm_output_of_flat_files_means_one_of_two_things() -> None:
    spec = eagle(with_config(norm_output=True))
    assert spec.norm_output
    assert said(spec, "-o norm_output=no")
    spec = eagle(with_config(norm_output=True), Overrides(norm_output=False))
    assert not spec.norm_output
    assert not said(spec, "norm_output")


def test_tensors_decide_on_norms_and_flags_alone_do_not() -> None:
    assert eagle(with_config("eagle31-speculators", norm_before_fc=False)).norm_before_fc
    assert eagle(with_config("eagle31-fcnorm", fc_norm=False)).fc_norm
    with pytest.raises(ModelError, match=r"1 missing: input_norm\.weight"):
        with_config(eagle_config={"norm_before_fc": True}).identify()
    with pytest.raises(ModelError, match=r"3 missing: fc_norm\.0\.weight"):
        with_config(fc_norm=True).identify()


def test_layers_are_counted_where_the_config_is_known_to_lie() -> None:
    assert eagle(with_config(num_hidden_layers=36)).layers == 1
    with pytest.raises(ModelError, match="layers in the head's file, got 1, expected 2"):
        with_layer(num_hidden_layers=2).identify()
    far = with_config()
    far.tensors["layers.999999999.mlp.up_proj.weight"] = ([112, 64], "F32")  # a name that would ask for 10^9 layers
    with pytest.raises(ModelError, match="missing"):
        far.identify()


def test_tied_embeddings_are_not_believed() -> None:
    spec = eagle(with_config(tie_word_embeddings=True))
    assert (spec.own_head, spec.own_embedding) == (True, False)


def test_own_matrices_are_demanded_where_the_targets_do_not_fit() -> None:
    for name, tensor in (
        ("eagle3-narrow", "embed_tokens"),
        ("peagle-speculators", "embed_tokens"),
        ("eagle3", "lm_head"),
    ):
        file = head_file(name)
        del file.tensors[f"{tensor}.weight"]
        with pytest.raises(ModelError, match=rf"1 missing: {tensor}\.weight"):
            file.identify()
    trained = with_config("eagle3-speculators", embed_requires_grad=True)
    del trained.tensors["embed_tokens.weight"]
    with pytest.raises(ModelError, match=r"1 missing: embed_tokens\.weight"):
        trained.identify()
    shared = head_file("eagle3-fullvocab")
    del shared.tensors["lm_head.weight"]
    spec = eagle(shared)
    assert not spec.own_head
    assert said(spec, "the target's is used")


@pytest.mark.parametrize("size", [None, 48])
def test_a_small_draft_vocabulary_without_its_map_is_refused(size: int | None) -> None:
    file = with_config(draft_vocab_size=size)
    assert eagle(file).draft_vocab == 48
    del file.tensors["d2t"]
    with pytest.raises(ModelError, match=r"drafts 48 of the target's 128 tokens .*d2t is missing"):
        file.identify()


def test_a_draft_vocabulary_beyond_the_targets_is_refused() -> None:
    with pytest.raises(ModelError, match="got 200, expected at most the target's 128"):
        with_config(draft_vocab_size=200).identify()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size in the head's config.json, got none"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"head_dim": 32}, r"midlayer.self_attn.q_proj.weight got \[64, 128\] expected \[128, 128\]"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "key/value heads"),
        ({"hidden_act": "gelu"}, "got gelu, expected silu"),
        ({"layer_types": ["sliding_attention"]}, "got sliding_attention"),
        ({"attention_bias": True}, r"3 missing: layers\.0\.self_attn\.q_proj\.bias"),
        ({"eagle_config": [1]}, "eagle_config .*expected a dict"),
    ],
)
def test_configs_that_do_not_fit_the_tensors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        with_config(**changes).identify()


def test_a_missing_eps_is_said() -> None:
    spec = eagle(with_config(rms_norm_eps=None))
    assert spec.eps == 1e-6
    assert said(spec, "rms_norm_eps")
