"""Heads from a folder to an answer: found, checked, converted, loaded, labelled; refused in one line otherwise."""

from __future__ import annotations

import json
from importlib import import_module

import pytest
import torch
from safetensors.torch import save_file

from speclocal import catalogue
from speclocal.catalogue import Catalogue, Model, Pairing
from speclocal.cli.answer import describe
from speclocal.cli.generate import as_dict
from speclocal.core.heads import FEATURE
from speclocal.core.interfaces import Scores
from speclocal.core.sampling import Sampling
from speclocal.errors import ModelError, UsageError
from speclocal.ui.stream import summary
from tests.backends.folders import one_line
from tests.backends.golden_models import FAMILY, golden_head, golden_target, open_engine, prompts, say
from tests.backends.pickles import pickle
from tests.core.golden_heads import cases

PROMPT = [5, 6, 7, 8]
HOT = Sampling(temperature=1.0, seed=3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECLOCAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pair(tmp_path):
    """name -> folders of target and head"""

    def make(name, **config):
        head = "eagle2" if name == "eagle1" else name
        target = golden_target(name, tmp_path / f"target-{name}")
        return target, target if name == "medusa2" else golden_head(head, tmp_path / f"head-{name}", **config)

    return make


@pytest.mark.parametrize("name", FAMILY)
def test_every_golden_head_drafts_for_its_target(pair, backend_name, name):
    target, head = pair(name)
    family = FAMILY[name]
    notices = []
    made = open_engine(target, f"{family.replace('_', '-')}:{head}", backend_name, notices.append)
    plain = open_engine(target, "none", backend_name)
    assert (made.header.drafter, made.header.head) == (family, f"{family}:{head}")
    assert made.header.notices == tuple(notices)
    accepted = 0
    for prompt in prompts(2):
        for sampling in (Sampling(), HOT):
            got = say(made, prompt, sampling=sampling)
            assert got.token_ids == say(plain, prompt, sampling=sampling).token_ids
            accepted += got.stats.accepted
    assert accepted > 0
    assert made.header.lossless


def test_a_rule_that_is_not_exact_gives_another_text(pair, backend_name):
    """Broken variant of the test above."""
    target, head = pair("eagle31-speculators")
    lossy = open_engine(target, f"eagle3:{head}", backend_name, verify="typical")
    plain = open_engine(target, "none", backend_name)
    hot = {prompt[0]: [say(made, prompt, sampling=HOT).token_ids for made in (lossy, plain)] for prompt in prompts(2)}
    assert any(a != b for a, b in hot.values())


def test_words_of_the_settings_reach_the_head(pair, backend_name):
    """taps, theta, residual and norm_output change what is drafted, and nothing of the text."""
    target, head = pair("eagle31-speculators")
    drafter, prompt = f"eagle3:{head}", prompts(1)[0]
    base = {"topk": "1", "depth": "3"}
    usual = say(open_engine(target, drafter, backend_name, options=base), prompt)
    for name, value in (("taps", "0,1,2"), ("theta", "3"), ("residual", "yes"), ("norm_output", "no")):
        other = say(open_engine(target, drafter, backend_name, options={**base, name: value}), prompt)
        assert other.token_ids == usual.token_ids
        assert other.stats.accepted_at != usual.stats.accepted_at, name


@pytest.mark.parametrize(
    ("name", "drafter", "options", "what"),
    [
        ("eagle3", "eagle:{head}", {}, r"an EAGLE-3 head.*--drafter eagle3:"),
        ("eagle2", "eagle3:{head}", {}, r"an EAGLE-1/2 head.*--drafter eagle:"),
        ("medusa1", "eagle3:{head}", {}, r"a Medusa head.*--drafter medusa:"),
        ("peagle-speculators", "eagle3:{head}", {}, r"a P-EAGLE head.*--drafter p_eagle:"),
        ("eagle3", "eagle3", {}, r"no eagle3 drafter is known.*--drafter eagle3:org/name"),
        ("eagle3", "medusa", {}, r"its own files hold none.*--drafter medusa:org/name"),
        ("eagle3", "ngram:{head}", {}, r"the ngram drafter has no weights"),
        ("eagle3", "eagle3:{head}", {"taps": "7,8,9"}, r"taps.*7, 8, 9.*0 to 8"),
        ("eagle3", "eagle3:{head}", {"taps": "a"}, r"taps.*whole numbers"),
        ("eagle3", "eagle3:{head}", {"residual": "maybe"}, r"residual.*maybe.*yes or no"),
        ("eagle3", "eagle3:{head}", {"theta": "-2"}, r"theta.*-2"),
        ("eagle3", "eagle3:{head}", {"mask_token": "3"}, r"no setting 'mask_token'"),
        ("eagle3", "eagle3:{target}", {}, r"no EAGLE, P-EAGLE or Medusa head"),
    ],
)
def test_impossible_heads(pair, backend_name, name, drafter, options, what):
    target, head = pair(name)
    with pytest.raises((UsageError, ModelError), match=what) as error:
        open_engine(target, drafter.format(head=head, target=target), backend_name, options=options)
    one_line(error)


def test_a_head_of_another_target_is_refused(pair, backend_name, tmp_path, lab):
    target, _ = pair("eagle3")
    other = golden_head("eagle2", tmp_path / "other", vocab_size=64)
    with pytest.raises(ModelError, match="made for another target: vocabulary, got 64, expected the target's 128"):
        open_engine(target, f"eagle:{other}", backend_name)


def test_pickles_only_on_request_and_tensors_only(pair, backend_name, tmp_path):
    target, head = pair("eagle3")
    with pytest.raises(ModelError, match="--allow-pickle") as error:
        open_engine(target, f"eagle3:{head}", backend_name, allow_pickle=False)
    assert one_line(error) == 1
    said = []
    for _ in range(2):
        open_engine(target, f"eagle3:{head}", backend_name, said.append)
    assert sum("converting" in text for text in said) == 1, "converted once"
    pickle(head, runs=f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(ModelError, match="more than tensors"):
        open_engine(target, f"eagle3:{head}", backend_name)
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_head_never_runs(pair, backend_name, tmp_path):
    target, head = pair("eagle3-speculators", auto_map={"AutoModel": "own.Model"})
    (head / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: ...\n")
    assert say(open_engine(target, f"eagle3:{head}", backend_name), PROMPT).stats.drafted
    assert not (tmp_path / "ran").exists()


def test_other_tensors_beside_the_weights_do_not_count(pair, backend_name):
    target, head = pair("eagle3")
    torch.save({}, head / "optimizer.bin")
    save_file({"step0.logits": torch.zeros(2)}, head / "cases.safetensors")
    assert say(open_engine(target, f"eagle3:{head}", backend_name), PROMPT).stats.drafted


def test_a_missing_list_of_layers_is_guessed_aloud(pair, backend_name):
    """DRF-01"""
    target, head = pair("eagle3")
    said = []
    open_engine(target, f"eagle3:{head}", backend_name, said.append)
    assert any("guessed" in text and "-o taps=" in text for text in said)


# ---- another drafter while the engine lives


def points(engine):
    return tuple(engine.target.points)


def test_another_drafter_reads_other_states(pair, backend_name, tmp_path):
    target, head = pair("eagle3")
    prompt = prompts(1)[0]
    made = open_engine(target, "none", backend_name)
    expected = say(made, prompt).token_ids
    assert points(made) == ()
    for drafter, taps in ((f"eagle3:{head}", (2, 4, 5)), ("ngram", ()), (f"eagle3:{head}", (2, 4, 5))):
        made.set_drafter(drafter)
        assert points(made) == taps
        got = say(made, prompt)
        assert got.token_ids == expected
        assert made.header.head == (drafter if taps else None)
        assert got.stats.accepted > 0 or not taps
    with pytest.raises(ModelError, match="EAGLE-3 head"):
        made.set_drafter(f"eagle:{head}")
    assert points(made) == (2, 4, 5)
    assert say(made, prompt).stats.accepted > 0, "what was there is left as it was"


def test_medusa_reads_the_feature(pair, backend_name):
    target, head = pair("medusa1")
    assert points(open_engine(target, f"medusa:{head}", backend_name)) == (FEATURE,)


@pytest.mark.parametrize("name", ["eagle3", "peagle-speculators", "medusa1"])
def test_chains_where_trees_are_not_exact(pair, backend_name, name):
    target, head = pair(name)
    said = []
    made = open_engine(target, "none", backend_name, said.append)
    made.target.trees = False
    made.set_drafter(f"{FAMILY[name]}:{head}")
    assert any("drafts chains" in text for text in said)
    got = say(made, prompts(1)[0])
    assert got.stats.drafted
    assert max(got.stats.proposed_at) * len(got.stats.proposed_at) >= got.stats.drafted, "one node a depth"
    if name != "peagle-speculators":
        with pytest.raises(UsageError, match="cannot check trees"):
            made.set_drafter(f"{FAMILY[name]}:{head}", {"tree": "medusa" if name == "medusa1" else "eagle1"})


@pytest.mark.parametrize("name", ["eagle3", "peagle-speculators", "medusa1"])
def test_block_verification_needs_chains(pair, backend_name, name):
    target, head = pair(name)
    drafter = f"{FAMILY[name]}:{head}"
    with pytest.raises(UsageError, match=r"block.*topk") as error:
        open_engine(target, drafter, backend_name, verify="block")
    assert one_line(error) == 2
    made = open_engine(target, drafter, backend_name, verify="block", options={"topk": "1"})
    assert made.header.verify == "block"
    assert say(made, prompts(1)[0], sampling=HOT).stats.drafted
    assert say(made, prompts(1)[0]).token_ids == say(open_engine(target, "none", backend_name), prompts(1)[0]).token_ids


def test_memory_is_counted_with_the_head(pair, backend_name, monkeypatch):
    target, head = pair("eagle3-speculators")
    backend = import_module(f"speclocal.backends.{backend_name}")
    needed = 3_000_000
    monkeypatch.setattr(backend, "free_memory", lambda device: needed)
    made = open_engine(target, "none", backend_name)
    monkeypatch.setattr(backend, "free_memory", lambda device: 200_000)
    with pytest.raises(ModelError, match=r"drafter head: weights 0\.3 MiB"):
        made.set_drafter(f"eagle3:{head}")
    with pytest.raises(ModelError, match=r"target: .*drafter head: weights 0\.3 MiB"):
        open_engine(target, f"eagle3:{head}", backend_name)


# ---- labels


def test_medusa_2_is_its_own_target(pair, backend_name, tmp_path):
    target, _ = pair("medusa2")
    made = open_engine(target, "medusa", backend_name)
    assert made.header.head == f"medusa:{target}"
    wanted = "not lossless with respect to the original model"
    assert wanted in made.header.caveat
    assert wanted in describe(made.header)
    got = say(made, PROMPT)
    assert wanted in summary(got)
    assert wanted in as_dict(got, made.header)["speculation"]["caveat"]
    other = golden_target("medusa1", tmp_path / "other")
    with pytest.raises(ModelError, match=rf"must be the target.*--target {target} --drafter medusa"):
        open_engine(other, f"medusa:{target}", backend_name)


def test_typical_acceptance_is_labelled(pair, backend_name):
    target, head = pair("medusa1")
    said = []
    made = open_engine(target, f"medusa:{head}", backend_name, said.append, verify="typical")
    assert not made.header.lossless
    got = say(made, PROMPT, sampling=HOT)
    for text in (*said[-1:], describe(made.header), summary(got)):
        assert "not lossless" in text
    assert as_dict(got, made.header)["speculation"]["lossless"] is False
    exact = open_engine(target, f"medusa:{head}", backend_name)
    assert exact.header.lossless
    assert not exact.header.caveat
    assert as_dict(say(exact, PROMPT), exact.header)["speculation"]["lossless"] is True
    assert say(made, PROMPT).token_ids == say(exact, PROMPT).token_ids, "exact at temperature 0"


class Waiting:
    """A drafter that learns nothing of the prompt: its first round drafts nothing, as where the case was made."""

    def __init__(self, drafter):
        self._drafter = drafter

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def begin(self, tokens, scores, sampler):
        self._drafter.begin(tokens, Scores(), sampler)


def typical_runs(pair, backend_name, tmp_path):
    """(answer, golden case) of typical acceptance."""
    target, head = pair("medusa1")
    golden = cases("medusa1")
    for case in golden["cases"]:
        setting = golden["meta"]["settings"][case["setting"]]
        if setting.get("sampling") != "typical":
            continue
        tree = tmp_path / "tree.json"
        tree.write_text(json.dumps(setting["medusa_choices"]))
        made = open_engine(target, f"medusa:{head}", backend_name, verify="typical", options={"tree": str(tree)})
        made.drafter = Waiting(made.drafter)
        sampling = Sampling(temperature=setting["temperature"])
        yield say(made, case["prompt"], len(case["output"]), sampling), case


def test_typical_acceptance_gives_the_golden_text(pair, backend_name, tmp_path):
    found = list(typical_runs(pair, backend_name, tmp_path))
    assert found
    for got, case in found:
        assert list(got.token_ids) == case["output"]
        lengths = [round["accept_len"] for round in case["rounds"]]
        assert got.stats.accepted >= sum(lengths[:-1]), "in the golden rounds"
    assert any(sum(round["accept_len"] for round in case["rounds"]) for _, case in found)


@pytest.mark.parametrize(("epsilon", "alpha"), [(0.01, 0.3), (0.09, 0.03), (0.9, 3.0)])
def test_other_thresholds_give_another_text(pair, backend_name, tmp_path, monkeypatch, epsilon, alpha):
    """Broken variants of the test above."""
    monkeypatch.setattr("speclocal.core.verify.EPSILON", epsilon)
    monkeypatch.setattr("speclocal.core.verify.ALPHA", alpha)
    assert any(list(got.token_ids) != case["output"] for got, case in typical_runs(pair, backend_name, tmp_path))


# ---- acceptance that collapses (DRF-01)


def talk(engine, answers=3):
    return [notice for prompt in prompts(answers, 4) for notice in say(engine, prompt, 80).notices]


def test_a_head_that_accepts_nothing_is_reported_once(pair, backend_name, tmp_path):
    """Heads of a target with the same sizes: nothing in the files tells."""
    target, head = golden_target("eagle2", tmp_path / "t"), golden_head("medusa1", tmp_path / "h")
    made = open_engine(target, f"medusa:{head}", backend_name)
    (told,) = talk(made)
    assert f"speclocal doctor --target {target} --drafter medusa:{head}" in told
    assert "taps" in told
    made.set_drafter(f"medusa:{head}")
    assert len(talk(made)) == 1, "a new drafter is judged anew"


def test_wrong_layers_are_reported(pair, backend_name):
    """A list of the right length that names other layers: the head loads, the text is right, nearly nothing fits."""
    target, head = pair("eagle3")
    wrong = {"taps": "6,7,8", "topk": "1", "depth": "1"}
    (told,) = talk(open_engine(target, f"eagle3:{head}", backend_name, options=wrong), 6)
    assert "read other layers of it (taps)" in told


def test_a_sound_head_is_not_reported(pair, backend_name):
    target, head = pair("eagle31-speculators")
    assert talk(open_engine(target, f"eagle3:{head}", backend_name), 6) == []


def test_drafters_without_a_head_are_not_judged(pair, backend_name):
    target, _ = pair("eagle31-speculators")
    assert talk(open_engine(target, "ngram", backend_name, options={"min": "1"})) == []


# ---- the catalogue


@pytest.fixture
def known(monkeypatch, pair, backend_name):
    """Put target and head of a golden pair into the catalogue as `tiny`, with settings; returns the head's method."""

    def put(name, **settings):
        target, head = pair(name)
        model = Model("tiny", "llama", "org/tiny", "bf16", {backend_name: (target,)})
        pairing = Pairing(FAMILY[name], ("org/tiny",), {backend_name: (str(head),)}, settings)
        monkeypatch.setattr(catalogue, "load", lambda: Catalogue({"tiny": model}, (pairing,)))
        return head

    return put


def test_the_catalogue_gives_head_and_settings(known, backend_name):
    head = known("eagle31-speculators", taps=[3, 6, 8], topk=1, depth=3)
    for drafter in ("eagle3", "auto"):
        made = open_engine("tiny", drafter, backend_name)
        assert (made.header.drafter, made.header.head) == ("eagle3", f"eagle3:{head}")
        got = say(made, prompts(1)[0])
        assert got.stats.accepted > 0
        assert got.stats.drafted == sum(got.stats.proposed_at), "topk=1 of the catalogue: chains"
    assert open_engine("tiny", "eagle3", backend_name, options={"topk": "2"}).drafter.settings.topk == 2
    made.set_drafter("ngram")
    made.set_drafter("auto")
    assert made.header.head == f"eagle3:{head}"


def test_auto_without_a_head(pair, backend_name):
    target, _ = pair("eagle3")
    said = []
    made = open_engine(target, "auto", backend_name, said.append)
    assert made.header.drafter == "ngram"
    assert said == ["drafter auto: ngram; no head is published for this target"]


def test_auto_finds_heads_in_the_target(pair, backend_name):
    target, _ = pair("medusa2")
    made = open_engine(target, "auto", backend_name)
    assert made.header.head == f"medusa:{target}"
    assert say(made, prompts(1)[0]).stats.drafted


# ---- a target of another precision (DRF-05)


def quantised(folder, bits):
    """The golden target's weights in `bits`, as mlx-lm stores them."""
    mx, nn = import_module("mlx.core"), import_module("mlx.nn")
    load_model = import_module("mlx_lm.utils").load_model
    model, config = load_model(folder)
    fits = {"quantization": {"group_size": 64, "bits": bits}}
    nn.quantize(model, 64, bits, class_predicate=lambda path, m: hasattr(m, "to_quantized") and "down" not in path)
    flat = dict(import_module("mlx.utils").tree_flatten(model.parameters()))
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), flat)
    (folder / "config.json").write_text(json.dumps({**config, **fits}))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_target(lab, backend_name, pair, bits):
    """The text is that of this target with and without the head, and what the head was made with is said."""
    if backend_name != "mlx":
        pytest.skip("quantised weights that this machine's CPU runs are MLX's")
    target, head = pair("eagle31-speculators", dtype="bfloat16")
    quantised(target, bits)
    said = []
    made, plain = (open_engine(target, d, backend_name, said.append) for d in (f"eagle3:{head}", "none"))
    (note,) = [text for text in said if "quantised" in text]
    assert f"to {bits} bits, its head was made with bfloat16" in note
    accepted = 0
    for prompt in prompts(3):
        got = say(made, prompt)
        assert got.token_ids == say(plain, prompt).token_ids
        accepted += got.stats.accepted
    assert accepted > 0
