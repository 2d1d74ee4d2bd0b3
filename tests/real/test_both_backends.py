"""The default model on both backends: the same greedy text, and the same text for a seed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from speclocal.core.sampling import Sampling
from speclocal.engine import Load, Request, load
from tests.real.conftest import PROMPTS

TOKENS = 16
SETTINGS = [Sampling(), Sampling(temperature=1.0, seed=11), Sampling(temperature=0.8, top_p=0.9, seed=3)]


@pytest.mark.skipif(find_spec("mlx") is None, reason="mlx is not installed")
def test_the_same_text(engine):
    other = load(Load(drafter="ngram", backend="mlx", dtype="float32", device="cpu", offline=True))
    assert (other.header.backend, other.header.dtype) == ("mlx", "float32")
    for prompt, sampling in zip(PROMPTS, SETTINGS, strict=True):
        answers = []
        for made in (engine, other):
            stream = made.stream(Request(prompt, sampling=sampling, max_tokens=TOKENS))
            list(stream)
            answers.append(stream.answer().token_ids)
        assert answers[0] == answers[1], sampling
        assert len(answers[0]) == TOKENS
