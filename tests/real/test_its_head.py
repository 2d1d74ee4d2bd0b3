"""The head that comes with speclocal for the default model: it drafts where none is named, and changes no text."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from speclocal.core.decode import Round
from speclocal.core.interfaces import Drafter
from speclocal.core.sampling import Sampling
from speclocal.drafters import none
from speclocal.engine import Engine, Load, load
from tests.backends.play import GREEDY, accepted_length, play, tokens_of

TOKENS = 16
Answers = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module", params=["torch", "mlx"])
def headed(request: pytest.FixtureRequest, engine: Engine) -> Engine:
    """`engine` skips or fails where the model is not here."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return load(Load(backend=request.param, dtype="float32", device="cpu", offline=True))


def rounds(headed: Engine, drafter: Drafter, ids: list[int], sampling: Sampling = GREEDY) -> list[Round]:
    more = {"unknown": headed.text.unknown(headed.target.vocab), "end_ids": sorted(headed.text.end_ids)}
    return play(headed.target, drafter, ids, TOKENS, sampling, **more)


def test_it_is_the_usual_drafter_and_borrows(headed: Engine) -> None:
    assert headed.drafter.name == "eagle3+ngram"
    assert headed.drafter._head._reader.head._columns.lends, "its output rows are the target's"


def test_greedy_text_is_that_of_transformers_and_drafts_are_kept(headed: Engine, answers: Answers) -> None:
    for drafter in (headed.drafter, headed.drafter._head):  # with lookup and without
        lengths = []
        for ids, expected in answers:
            made = rounds(headed, drafter, ids)
            assert tokens_of(made) == expected[:TOKENS]
            lengths.append(accepted_length(made))
        assert sum(lengths) / len(lengths) > 1.5, lengths


def test_sampled_text_is_that_of_plain_decoding(headed: Engine, answers: Answers) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=21)
    ids, _ = answers[1]
    drafted = rounds(headed, headed.drafter, ids, sampling)
    assert tokens_of(drafted) == tokens_of(rounds(headed, none.Drafter(), ids, sampling))
    assert any(len(round.tokens) > 1 for round in drafted)
