"""Which drafter is meant: named, from the catalogue, or the best there is; and what is said of its precision."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from speclocal import choice, hub
from speclocal.catalogue import Catalogue, Model, Pairing
from speclocal.checks import head_files, stored_tensors
from speclocal.choice import AUTO, Choice, asked, choose, choose_best, parted, usual
from speclocal.engine import Load
from speclocal.errors import DownloadError, ModelError, SpeclocalError, UsageError
from speclocal.heads import precision_note
from speclocal.sources import Bundled, Local, Policy, Repo, parse
from tests.core.mock_hub import Repository, safetensors

TARGET = "org/target"


def pairing(method: str, *sources: str, **settings: Any) -> Pairing:
    return Pairing(method, (TARGET,), {"torch": sources} if sources else {}, settings)


def catalogue(*pairings: Pairing) -> Catalogue:
    model = Model("tiny", "llama", TARGET, "bf16", {"torch": (Repo(TARGET),)})
    return Catalogue({"tiny": model}, pairings)


EVERY = (
    pairing("draft_model", "org/small", depth=6),
    pairing("medusa", "org/medusa"),
    pairing("eagle", "org/eagle"),
    pairing("eagle3", "org/first", taps=[1, 2, 3]),
    pairing("eagle3", "org/second"),
    pairing("p_eagle", "org/p"),
    pairing("dflash", "org/dflash"),
)


# ---- named


@pytest.mark.parametrize(
    ("drafter", "draft_model", "expected"),
    [
        (None, None, ("ngram", None)),
        (None, "small", ("draft_model", "small")),
        ("eagle3", None, ("eagle3", None)),
        ("p-eagle:org/x", None, ("p_eagle", "org/x")),
        ("eagle3:./a:b", None, ("eagle3", "./a:b")),
        ("draft-model", "small", ("draft_model", "small")),
        (AUTO, None, (AUTO, None)),
    ],
)
def test_what_is_asked_for(drafter: str | None, draft_model: str | None, expected: tuple[str, str | None]) -> None:
    assert asked(Load(drafter=drafter, draft_model=draft_model)) == expected


def test_a_head_and_a_draft_model_are_two_drafters() -> None:
    with pytest.raises(UsageError, match="a draft model and another drafter"):
        asked(Load(drafter="eagle3", draft_model="small"))


@pytest.mark.parametrize("target", ["tiny", TARGET, "ORG/target@main"])
def test_the_catalogue_knows_the_head(target: str) -> None:
    found = choose("eagle3", None, target, catalogue(*EVERY), "torch")
    assert found == Choice("eagle3", (Repo("org/first"),), {"taps": [1, 2, 3]})


def test_a_source_beats_the_catalogue() -> None:
    assert choose("eagle3", "my/own", "tiny", catalogue(*EVERY), "torch") == Choice("eagle3", (Repo("my/own"),))


def test_a_head_nobody_published() -> None:
    with pytest.raises(
        UsageError, match=r"no eagle3 drafter .* org/other on torch; name its weights: --drafter eagle3:"
    ):
        choose("eagle3", None, "org/other", catalogue(*EVERY), "torch")
    assert choose("medusa", None, "org/other", catalogue(*EVERY), "torch") == Choice("medusa"), "in its own files"
    with pytest.raises(UsageError, match="the ngram drafter has no weights, got org/x"):
        choose("ngram", "org/x", "tiny", catalogue(), "torch")


# ---- auto


class Hub:
    """Says what can be fetched and what is on this machine. asked: what was to be fetched."""

    def __init__(self, patch: pytest.MonkeyPatch, reachable: tuple[str, ...] = (), here: tuple[str, ...] = ()):
        self.reachable, self.here, self.asked = reachable, here, list[str]()
        patch.setattr(hub, "fetch", self.fetch)
        patch.setattr(hub, "look", self.look)

    def fetch(self, sources: Any, *_: Any) -> Local:
        self.asked.append(str(sources[0]))
        if str(sources[0]) not in self.reachable:
            raise DownloadError(f"{sources[0]} is away", do="wait")
        return Local(Path("x"), None, str(sources[0]))

    def look(self, source: Any, *_: Any) -> Local:
        if str(source) not in self.here:
            raise DownloadError("away")
        return Local(Path("x"), None, str(source))


def best(known: Catalogue, path: Path = Path("nowhere"), target: str = "tiny") -> tuple[Choice, str]:
    said: list[str] = []
    found = choose_best(target, Local(path, None, "t"), known, "torch", Policy(), None, said.append)
    (notice,) = said
    return found, notice


@pytest.mark.parametrize(
    ("reachable", "method", "source"),
    [
        (("org/first", "org/second", "org/p", "org/eagle", "org/medusa"), "eagle3", "org/first"),
        (("org/second", "org/p", "org/eagle", "org/medusa"), "eagle3", "org/second"),
        (("org/p", "org/eagle", "org/medusa"), "p_eagle", "org/p"),
        (("org/eagle", "org/medusa"), "eagle", "org/eagle"),
        (("org/medusa",), "medusa", "org/medusa"),
    ],
)
def test_auto_takes_the_best_head_it_can_have(
    monkeypatch: pytest.MonkeyPatch, reachable: tuple[str, ...], method: str, source: str
) -> None:
    Hub(monkeypatch, reachable, here=("org/small",))
    found, notice = best(catalogue(*EVERY))
    assert (found.method, found.sources) == (method, (Repo(source),))
    assert notice == f"drafter auto: {method}, whose head {source} was made for this target"


def test_auto_falls_back_to_a_draft_model_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Hub(monkeypatch, here=("org/small",))
    found, notice = best(catalogue(*EVERY))
    assert found == Choice("draft_model", (Repo("org/small"),), {"depth": 6})
    assert "org/small, which is on this machine; no head for this target can be had (org/first is away" in notice
    assert "org/small" not in fake.asked, "no draft model is fetched unasked"


def test_auto_ends_at_ngram_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch)
    found, notice = best(catalogue(*EVERY))
    assert found == Choice("ngram")
    assert "can be had" in notice
    for target in ("tiny", "org/other"):
        found, notice = best(catalogue(), target=target)
        assert (found, notice) == (Choice("ngram"), "drafter auto: ngram; no head is published for this target")


def test_auto_leaves_pickles_that_are_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(sources: Any, *_: Any) -> Local:
        raise ModelError("the weights are pickles", do="pass --allow-pickle")

    Hub(monkeypatch)
    monkeypatch.setattr(hub, "fetch", refused)
    assert "the weights are pickles" in best(catalogue(pairing("eagle", "org/eagle")))[1]


def test_auto_sees_heads_in_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Hub(monkeypatch, ("org/first",))
    save_file({"medusa_head.0.0.linear.weight": np.zeros((2, 2))}, tmp_path / "model.safetensors")
    found, notice = best(catalogue(*EVERY), tmp_path)
    assert found == Choice("medusa")
    assert "come with this model" in notice
    assert not fake.asked


def test_errors_that_are_no_download_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken variant of the fall-back: a full disk or a bug must not look like a head that nobody published."""

    def full(*_: Any) -> Local:
        raise SpeclocalError("something else")

    Hub(monkeypatch)
    monkeypatch.setattr(choice.hub, "fetch", full)
    with pytest.raises(SpeclocalError, match="something else"):
        best(catalogue(*EVERY))


# ---- files of a head


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["cases.safetensors", "model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["cases.safetensors", "pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
        (["medusa_lm_head.safetensors", "medusa_lm_head.pt"], ["medusa_lm_head.safetensors"]),
        (["medusa_lm_head.pt"], ["medusa_lm_head.pt"]),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ),
        (["head.safetensors"], ["head.safetensors"]),
        (["config.json"], []),
    ],
)
def test_which_files_are_weights(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in head_files(tmp_path)] == expected


def test_what_a_header_tells(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int64)}, path)
    assert stored_tensors([path]) == {"a": ([2, 3], "F32"), "b": ([4], "I64")}


# ---- precision


@pytest.mark.parametrize(
    ("head", "target", "dtype", "gguf", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, "auto", False, None),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, "bfloat16", False, None),
        ({}, {"dtype": "bfloat16"}, "auto", False, None),
        ({"dtype": "float16"}, {"torch_dtype": "bfloat16"}, "auto", False, "the target is bfloat16, .* with float16"),
        ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, "float16", False, "the target is float16, .* bfloat16"),
        (
            {"transformer_layer_config": {"torch_dtype": "bfloat16"}},
            {"quantization": {"group_size": 64, "bits": 4}},
            "auto",
            False,
            "is quantised to 4 bits, its head was made with bfloat16",
        ),
        ({}, {"quantization_config": {"load_in_8bit": True}}, "auto", False, "to 8 bits, .* the unquantised model"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "auto", False, r"quantised \(fp8\)"),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}, "auto", True, "comes from a GGUF file, .* bfloat16"),
    ],
)
def test_a_note_where_precisions_differ(
    head: dict[str, Any], target: dict[str, Any], dtype: str, gguf: bool, expected: str | None
) -> None:
    said = precision_note(head, target, dtype, gguf)
    if expected is None:
        assert said is None
    else:
        assert said is not None
        assert re.search(expected, said)
        assert said.endswith("the text stays the target's own")


def test_a_head_on_the_hub_needs_no_tokenizer_and_brings_no_code(mock: Any) -> None:
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": safetensors(), "own.py": b"1/0"}
    mock.repositories["org/head"] = Repository(files)
    found = hub.fetch([Repo("org/head")])
    assert sorted(path.name for path in found.path.iterdir()) == ["config.json", "model.safetensors"]
    assert head_files(found.path) == [found.path / "model.safetensors"]


# ---- combinations


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (None, (None, None)),
        ("ngram", ("ngram", None)),
        ("eagle3", ("eagle3", None)),
        ("eagle3+ngram", ("eagle3", "ngram")),
        ("p-eagle:org/x+ngram", ("p-eagle:org/x", "ngram")),
        ("eagle3:./a:b+ngram", ("eagle3:./a:b", "ngram")),
        ("eagle3:./a+b", ("eagle3:./a+b", None)),
        ("eagle3:./a+b+ngram", ("eagle3:./a+b", "ngram")),
    ],
)
def test_a_head_and_a_lookup(drafter: str | None, expected: tuple[str | None, str | None]) -> None:
    assert parted(drafter) == expected


@pytest.mark.parametrize(
    "drafter",
    [
        "ngram+eagle3",
        "ngram+ngram",
        "eagle3+medusa",
        "eagle3+ngram:org/x",
        "draft_model:small+ngram",
        "auto+ngram",
        "+",
    ],
)
def test_what_cannot_be_combined(drafter: str) -> None:
    with pytest.raises(UsageError, match=r"no such combination of drafters.*\+ngram"):
        parted(drafter)


# ---- where none is named


def bundled(target: str = TARGET, usual: str = "eagle3") -> Pairing:
    return Pairing("eagle3", (target,), {"torch": ("bundled:head",), "mlx": ("bundled:head",)}, {"depth": 4}, usual)


@pytest.mark.parametrize(
    ("pairings", "settings", "expected"),
    [
        ((), {}, "ngram"),
        ((bundled(),), {}, "eagle3"),
        ((bundled("org/other"),), {}, "ngram"),
        ((bundled(usual=""),), {}, "ngram"),
        ((bundled(usual="eagle3+ngram"),), {}, "eagle3+ngram"),
        ((bundled(usual="eagle3+ngram"),), {"options": {"ngram.min": "3", "depth": "2"}}, "eagle3+ngram"),
        ((bundled(),), {"options": {"ngram.min": "3"}}, "ngram"),
        ((bundled(),), {"verify": "rejection"}, "eagle3"),
        ((bundled(),), {"verify": "typical"}, "ngram"),
        ((pairing("eagle3", "org/first"),), {}, "ngram"),  # it would have to be fetched
        ((bundled(),), {"options": {"depth": "3"}}, "eagle3"),
        ((bundled(),), {"options": {"min": "3"}}, "ngram"),
        ((bundled(),), {"verify": "block"}, "ngram"),
    ],
)
def test_the_usual_drafter_is_the_head_that_comes_with_speclocal(
    pairings: tuple[Pairing, ...], settings: dict[str, Any], expected: str
) -> None:
    assert usual(Load(target="tiny", **settings), catalogue(*pairings), "torch") == expected


def test_a_bundled_source_is_a_folder_of_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Bundled, "path", property(lambda self: tmp_path / self.name))
    (tmp_path / "head").mkdir()
    source = parse("bundled:head")
    assert source == Bundled("head")
    assert str(source) == "bundled:head"
    assert hub.look(source) == Local(tmp_path / "head", None, "bundled:head")
    with pytest.raises(ModelError, match="no such drafter comes with speclocal"):
        hub.look(Bundled("tail"))


def test_a_head_that_was_trained_on_this_very_target_fits_it() -> None:
    head = {"torch_dtype": "bfloat16", "speclocal": {"target": TARGET, "revision": "r", "precision": "float32"}}
    assert precision_note(head, {}, "auto", gguf=True, revision="r") is None
    assert "comes from a GGUF file" in str(precision_note(head, {}, "auto", gguf=True, revision="s"))
