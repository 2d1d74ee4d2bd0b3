"""T4 and T5: in bfloat16, where passes round differently by their rows, each departure from plain text is a near-tie.

`s` is what the argmax is taken over: logits at temperature 0, logits / T + noise when sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from speclocal.core.noise import Noise
from speclocal.core.sampling import Sampling
from speclocal.core.tree import DraftTree
from speclocal.drafters import none, scripted
from speclocal.engine import Engine, Load, load
from tests.backends.play import SHAPES, Shaped, host, play, tokens_of

LENGTH = 128
SPACING = 0.125
"""Of bfloat16 values between 16 and 32, where the largest logits lie."""
SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=5)}


@pytest.fixture(scope="module")
def half(engine: Engine) -> Engine:
    """The default model in bfloat16."""
    del engine  # it decides whether the model is here
    return load(Load(drafter="none", dtype="bfloat16", device="cpu", offline=True))


def replay(target: Any, ids: Sequence[int], answer: Sequence[int], sampling: Sampling, rows: int) -> np.ndarray:
    """s [len(answer), V] at every token of an answer, from passes of `rows` tokens each."""
    target.prefill(ids[:-1])
    fed = [ids[-1], *answer[:-1]]
    parts = []
    for first in range(0, len(fed), rows):
        chunk = fed[first : first + rows]
        parts.append(host(target, target.score(DraftTree.chain(chunk[0], chunk[1:])).logits))
        target.commit(range(1, len(chunk)))
    s = np.concatenate(parts)
    if sampling.greedy:
        return s
    noise = Noise(target.ops, sampling.seed, target.vocab)
    return s / sampling.temperature + host(target, noise.rows(len(ids), len(answer)))


def gap(s: np.ndarray) -> np.ndarray:
    """Distance of the best two scores of each row."""
    best = np.partition(s, -2, axis=-1)[:, -2:]
    return best[:, 1] - best[:, 0]


def behind(s: np.ndarray, answer: Sequence[int]) -> np.ndarray:
    """How far each emitted token is behind the best one; 0 where it is the best."""
    return s.max(-1) - s[np.arange(len(answer)), list(answer)]


@dataclass(frozen=True)
class Plain:
    """Plain decoding's answer, and how much passes of one row and of several differ over it.

    tolerance: largest change of the gap between the best two. share: of positions where the best token changes.
    """

    ids: list[int]
    answer: list[int]
    tolerance: float
    share: float


@pytest.fixture(scope="module", params=SETTINGS)
def setting(request: pytest.FixtureRequest) -> Sampling:
    return SETTINGS[request.param]


@pytest.fixture(scope="module")
def plain(half: Engine, setting: Sampling) -> Plain:
    ids = half.chat_ids([{"role": "user", "content": "Write a story about a lighthouse keeper and her cat."}])
    answer = tokens_of(play(half.target, none.Drafter(), ids, LENGTH, setting))
    assert len(answer) == LENGTH
    one, several = (replay(half.target, ids, answer, setting, rows) for rows in (1, 8))
    change = np.abs(gap(one) - gap(several)).max()
    return Plain(ids, answer, max(float(change), SPACING), float((one.argmax(-1) != several.argmax(-1)).mean()))


def audit(half: Engine, plain: Plain, setting: Sampling, answer: Sequence[int]) -> None:
    """T4: every token is plain decoding's best one, or nearly. T5: the first that differs from its text is so."""
    s = replay(half.target, plain.ids, answer, setting, 1)
    far = behind(s, answer)
    assert far.max() <= 2 * plain.tolerance
    assert (far > 0).mean() <= 2 * plain.share + 3 / LENGTH
    changed = [i for i, (a, b) in enumerate(zip(answer, plain.answer, strict=False)) if a != b]
    if changed:
        assert gap(s)[changed[0]] <= plain.tolerance


@pytest.mark.parametrize("drafter", ["oracle", "mixed", "tree"])
def test_departures_are_near_ties(half: Engine, plain: Plain, setting: Sampling, drafter: str) -> None:
    known = (*plain.ids, *plain.answer)
    if drafter == "tree":
        made: Any = Shaped(SHAPES["full"], known, luck=0.8, vocab=1000)
    else:
        made = scripted.Drafter(scripted.Settings(drafter, known, depth=7, vocab=1000))
    rounds = play(half.target, made, plain.ids, LENGTH, setting)
    assert len(rounds) < LENGTH, "some drafts must be accepted"
    audit(half, plain, setting, tokens_of(rounds))


def test_the_audit_sees_an_unchecked_draft(half: Engine, plain: Plain, setting: Sampling) -> None:
    """One token that nobody checked, in the middle of an otherwise plain answer."""
    broken = list(plain.answer)
    broken[LENGTH // 2] = (broken[LENGTH // 2] + 1) % 1000
    with pytest.raises(AssertionError):
        audit(half, plain, setting, broken)


def test_the_audit_sees_a_wrong_position(half: Engine, plain: Plain, setting: Sampling, monkeypatch: Any) -> None:
    """Nodes of a tree at the positions of their numbers instead of their depths."""
    from speclocal.backends.torch import target as module

    class Misplaced(module.View):
        def __init__(self, length: int, tree: DraftTree, start: int, device: Any):
            super().__init__(length, tree, start, device)
            self.positions = self.positions[:, :1] + module.torch.arange(len(tree) - start)[None]

    monkeypatch.setattr(module, "View", Misplaced)
    rounds = play(
        half.target, Shaped(SHAPES["full"], (*plain.ids, *plain.answer), 0.8, 1000), plain.ids, LENGTH, setting
    )
    answer = tokens_of(rounds)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        audit(half, plain, setting, answer)
