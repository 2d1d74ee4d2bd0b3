"""Tokens of the text join a head's draft vocabulary where its output rows are the target's."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from speclocal.core.columns import Columns
from speclocal.core.sampling import Sampling
from speclocal.drafters import eagle, p_eagle
from speclocal.drafters.eagle import Reader
from speclocal.errors import UsageError
from tests.backends.play import host, ids, play, tokens_of
from tests.backends.random_heads import H, V, attach
from tests.backends.test_reading import WARM

KINDS = ["llama", "gemma2", "gpt_oss"]


def units(target):
    """The whole output matrix [V, H]."""
    return host(target, target.unembed(target.ops.array(np.eye(H, dtype=np.float32).tolist()))).T


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_output_layer(lab, kind):
    target = lab.new(kind)
    some = target.ops.array([5, 0, V - 1])
    if (rows := target.output_rows(some)) is not None:
        assert np.abs(host(target, rows) - units(target)[[5, 0, V - 1]]).max() < 1e-5
    assert rows is not None or kind == "gpt_oss" or lab.__name__.endswith("torch")


def drafted(lab, **settings):
    """Own ids of a head, the text before each round, and what was drafted then."""
    target = lab.new("llama")
    made = attach(lab, target, "eagle3 lent", "wide", **settings)
    own = set(host(target, made._reader.head.ids).tolist())
    text, out = ids(9, seed=1), []
    for round in play(target, made, text, 24, Sampling(**WARM)):
        out.append((list(text), set(round.tree.tokens[1:])))
        text = [*text, *round.tokens]
    return own, out


def test_only_tokens_of_the_text_are_borrowed(lab):
    own, rounds = drafted(lab)
    assert all(tokens <= own | set(text) for text, tokens in rounds)
    assert any(tokens - own for _, tokens in rounds)
    fresh = [set(text) - set(rounds[0][0]) - own for text, _ in rounds]
    assert any(tokens & new for (_, tokens), new in zip(rounds, fresh, strict=True)), "of the answer too"


def test_none_are_borrowed_if_none_may_be(lab):
    own, rounds = drafted(lab, context_vocab=0)
    assert all(tokens <= own for _, tokens in rounds)


def test_the_latest_are_borrowed(lab):
    own, rounds = drafted(lab, context_vocab=2)
    for text, tokens in rounds:
        latest = [token for token in dict.fromkeys(reversed(text)) if token not in own][:2]
        assert tokens - own <= set(latest)
    with mock.patch.object(Reader, "_meet", lambda self, tokens: self._met.update(dict.fromkeys(tokens))):
        own, rounds = drafted(lab, context_vocab=2)
    kept = [[t for t in dict.fromkeys(reversed(text)) if t not in own][:2] for text, _ in rounds]
    assert any(tokens - own - set(late) for (_, tokens), late in zip(rounds, kept, strict=True)), "the test must see it"


def columns_of(target, own, lend=None):
    matrix = target.ops.array(units(target).tolist())
    return Columns(target.ops, own, target.ops.array(units(target)[own].tolist()), lend or (lambda at: matrix[at]))


def test_borrowed_columns_say_what_the_whole_matrix_says(lab):
    target = lab.new("llama")
    own, more = list(range(0, V, 2)), [7, 3, V - 1]
    columns = columns_of(target, own)
    y = np.random.default_rng(0).normal(size=(4, H)).astype(np.float32)
    array, whole = target.ops.array, y @ units(target).T

    def widened():
        return host(target, columns.widen(array(whole[:, own].tolist()), array(y.tolist())))

    assert widened().shape == (4, len(own))
    columns.borrow([7, 4, 3, V - 1], 10)  # it has 4
    assert host(target, columns.ids).tolist() == own + more
    assert np.abs(widened() - whole[:, own + more]).max() < 1e-5
    columns.borrow([7, 3, V - 1], 1)
    assert host(target, columns.ids).tolist() == [*own, V - 1]
    columns.borrow([], 10)
    assert widened().shape == (4, len(own))


@pytest.mark.parametrize(("spread", "lends"), [(0.0, True), (0.1, True), (0.5, False)])
def test_only_the_targets_own_rows_are_added_to(lab, spread, lends):
    """Rounding to 4 bits moves a row by a tenth of its size or less, training by half of it."""
    target, own = lab.new("llama"), list(range(0, V, 2))
    rows = units(target)[own]
    noise = np.random.default_rng(1).normal(size=rows.shape) * np.abs(rows).mean() * spread
    given = target.ops.array((rows + noise).astype(np.float32).tolist())
    matrix = target.ops.array(units(target).tolist())
    columns = Columns(target.ops, own, given, lambda at: matrix[at])
    assert columns.lends == lends
    columns.borrow([1, 3], 10)
    assert columns.ids.shape[0] == len(own) + (2 if lends else 0)


def test_nothing_is_lent_without_a_map_or_rows(lab):
    target = lab.new("llama")
    matrix = target.ops.array(units(target).tolist())
    assert not Columns(target.ops, None, matrix, lambda at: matrix[at]).lends
    assert not Columns(target.ops, [1, 2], None, lambda at: matrix[at]).lends
    assert not Columns(target.ops, [1, 2], matrix[:2], lambda at: None).lends


def test_text_is_the_same_with_borrowed_columns(lab):
    """Greedy and with noise; `test_reading.py` runs this head with all others too."""
    for sampling in (Sampling(), Sampling(**WARM)):
        texts = []
        for most in (0, 1024):
            target = lab.new("llama")
            texts.append(
                tokens_of(
                    play(target, attach(lab, target, "eagle3 lent", "tree", context_vocab=most), ids(9), 24, sampling)
                )
            )
        assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", [eagle.Settings, p_eagle.Settings])
def test_an_impossible_number_is_refused(kind):
    with pytest.raises(UsageError, match="impossible context_vocab"):
        kind(context_vocab=-1)
