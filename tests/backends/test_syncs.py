"""One synchronisation a round: the host waits for the device once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from speclocal.core.sampling import Sampling
from tests.backends.play import SHAPES, Shaped, drafter, ids, play

SETTINGS = {
    "greedy": {},
    "coupled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("name", ["none", "ngram", "oracle", "mixed", "tree"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_one_sync_a_round(lab, plain, name, setting, rule):
    prompt = ids(6, seed=2)
    text = prompt + plain("gemma2", prompt, 40)
    target = lab.new("gemma2")
    calls = 0
    to_host = target.ops.to_host

    def counted(*arrays):
        nonlocal calls
        calls += 1
        return to_host(*arrays)

    # Without `support`, as where arrays lie on a device: a look at a value costs as much as the walk's own.
    target.ops = replace(target.ops, to_host=counted, support=None)
    made = Shaped(SHAPES["full"], text) if name == "tree" else drafter(name, lab, "gemma2", text)
    rounds = play(target, made, prompt, 40, Sampling(**SETTINGS[setting]), rule=rule)
    assert len(rounds) > 5
    assert calls == len(rounds)
