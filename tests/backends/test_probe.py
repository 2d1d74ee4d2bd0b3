"""The acceptance probe finds the convention a golden head was trained with, whatever it was told; and only then."""

from __future__ import annotations

from importlib import import_module

import pytest

from speclocal import probe as probing
from speclocal.convert import head_folder
from speclocal.core.heads import Overrides
from speclocal.engine import Load
from speclocal.errors import ModelError, UsageError
from speclocal.heads import HeadFiles
from speclocal.probe import Bench, Written, better, probe
from speclocal.sources import Local
from tests.backends.golden_models import golden_head, golden_target, open_engine, prompts, say

TEXTS, TOKENS = 4, 60


@pytest.fixture(scope="module")
def bench(backend_name, tmp_path_factory):
    """name -> a Bench of that golden head, with texts of its target."""
    made = {}

    def make(name):
        if name not in made:
            place = tmp_path_factory.mktemp(name)
            engine = open_engine(golden_target(name, place / "target"), "none", backend_name)
            texts = [Written((*p, *say(engine, p, TOKENS).token_ids), len(p)) for p in prompts(TEXTS)]
            folder = head_folder(Local(golden_head(name, place / "head"), None, name), True, lambda text: None)
            backend = import_module(f"speclocal.backends.{backend_name}")
            made[name] = Bench(HeadFiles.read(folder, name), engine.target, backend, texts)
        return made[name]

    return make


WRONG = [
    ("eagle31-speculators", Overrides(norm_output=False), {"norm_output": "yes"}),
    ("eagle31-speculators", Overrides(taps=(2, 5, 7)), {"taps": "3,6,8"}),
    ("eagle3-speculators", Overrides(norm_before_residual=False), {"residual": "yes"}),
    ("peagle-speculators", Overrides(norm_before_residual=True), {"residual": "no"}),
]


@pytest.mark.parametrize(("name", "given", "options"), WRONG, ids=[f"{n} {next(iter(o))}" for n, _, o in WRONG])
def test_a_wrong_convention_is_found(bench, name, given, options):
    report = bench(name).search(given)
    assert report.options == options
    assert report.positions == len(report.trials[0].logs[0]) > 200


TRIED = {
    "eagle31-speculators": ["as given", "taps=2,5,7", "theta=10000", "residual=yes", "norm_output=no"],
    "eagle3-speculators": [
        "as given", "taps=1,3,4", "taps=3,5,6", "theta=10000", "residual=no", "norm_output=yes",
    ],
    "peagle-speculators": ["as given", "taps=0,1,3,4,6", "taps=2,3,5,6,8", "theta=10000", "residual=yes"],
    "medusa1": ["as given"],
}  # fmt: skip


@pytest.mark.parametrize("name", TRIED)
def test_the_right_convention_is_left_alone(bench, name):
    report = bench(name).search(Overrides())
    assert report.options == {}
    assert [trial.name for trial in report.trials] == TRIED[name]
    assert report.trials[0].agreement[0] > 0.2


def test_positions_do_not_depend_on_where_the_text_begins(bench):
    """A guess follows from the whole text before it, fed row by row or at once."""
    one = bench("eagle3-speculators")
    text = one._texts[0]
    again = Written(text.ids, text.start + 20)  # fed in one piece up to there
    report = one.search(Overrides())
    other = Bench(one._head, one._target, one._backend, [again])
    other._read(one._points)
    late = other._try("late", Overrides())
    count = len(again.positions)
    early = report.trials[0].logs[0][20 : 20 + count]
    assert count > 20
    assert late.logs[0] == pytest.approx(early, abs=1e-3)
    # Broken variant: another beginning of the text is another text.
    changed = Bench(
        one._head, one._target, one._backend, [Written((text.ids[0] ^ 1, text.ids[1] ^ 1, *text.ids[2:]), again.start)]
    )
    changed._read(one._points)
    assert changed._try("changed", Overrides()).logs[0] != pytest.approx(early, abs=1e-3)


def test_noise_decides_nothing(bench):
    one = bench("eagle31-speculators").search(Overrides()).trials[0]
    assert not better(one, one, (0, 1, 2))


@pytest.fixture
def folders(tmp_path):
    name = "eagle31-speculators"
    return golden_target(name, tmp_path / "target"), golden_head(name, tmp_path / "head")


def test_from_folders_to_a_report(folders, backend_name, monkeypatch):
    target, head = folders
    monkeypatch.setattr(probing, "PROMPTS", ("w5 w6 w7", "w9 w8"))
    monkeypatch.setattr(probing, "TOKENS", 60)
    seen = []
    settings = Load(str(target), f"eagle3:{head}", options={"norm_output": "no"}, backend=backend_name, device="cpu")
    report = probe(settings, lambda text: None, step=lambda *told: seen.append(told))
    assert report.options == {"norm_output": "yes"}
    assert report.head == str(head)
    name, done, total = seen[-1]
    assert (name, done) == ("norm_output=yes", total)


def test_what_cannot_be_probed(folders, backend_name):
    target, head = folders
    with pytest.raises(UsageError, match="the probe is for heads, got ngram"):
        probe(Load(str(target), "ngram", backend=backend_name), lambda text: None)
    with pytest.raises(ModelError, match="EAGLE-3 head"):
        probe(Load(str(target), f"p_eagle:{head}", backend=backend_name, device="cpu"), lambda text: None)
