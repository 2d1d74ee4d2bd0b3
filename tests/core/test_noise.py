"""The keyed noise: known answers, agreement of its implementations, independence, and what is kept."""

from __future__ import annotations

import itertools
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from speclocal.core import noise
from speclocal.core.interfaces import Ops
from speclocal.core.noise import MASK, Noise, Purpose
from speclocal.errors import UsageError
from tests.conftest import golden

ROWS = golden("noise")["rows"]
WIDTH = 4


def purpose(row: dict[str, Any]) -> Purpose:
    return Purpose[row["purpose"].upper()]


def test_threefry_known_answers() -> None:
    for case in golden("noise")["threefry2x32_20"]:
        assert list(noise.threefry(tuple(case["key"]), *case["counter"])) == case["words"]


def test_purposes() -> None:
    assert {p.name.lower(): int(p) for p in Purpose} == golden("noise")["purposes"]


def test_words_and_uniforms_are_bit_exact() -> None:
    for row in ROWS:
        seed, position, stream = int(row["seed"]), row["position"], row["stream"]
        for i, index in enumerate(row["index"]):
            words = noise.words(seed, position, purpose(row), index, stream)
            assert words == (row["word0"][i], row["word1"][i])
            assert noise.uniform(seed, position, purpose(row), index, stream) == row["uniform24"][i]


def test_gumbel_in_float64() -> None:
    for row in ROWS:
        w0, w1 = (np.array(row[name], np.float64) for name in ("word0", "word1"))
        made = noise.gumbel(np, w0, w1, MASK - w0, MASK - w1)
        assert made.tolist() == pytest.approx(row["gumbel"], abs=1e-12)


def test_gumbel_on_the_backend(ops: Ops) -> None:
    for row in ROWS:
        (made,) = ops.to_host(ops.noise(int(row["seed"]), [row["position"]], purpose(row), WIDTH, row["stream"]))
        assert made[0] == pytest.approx(row["gumbel"], abs=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_ends_of_the_range_are_finite(dtype: Any) -> None:
    """The smallest and the largest of 2^64 words: far out, finite, in order."""
    words = np.array([[0, 0], [0, 1], [1, 0], [MASK - 1, 0], [MASK, MASK - 1], [MASK, MASK]], np.uint32)
    w0, w1 = words[:, 0], words[:, 1]
    with np.errstate(divide="ignore"):  # the branch that is not taken
        made = noise.gumbel(np, *(w.astype(dtype) for w in (w0, w1, ~w0, ~w1)))
    assert np.isfinite(made).all()
    # An exponential near 0 is a large Gumbel: -log(2^-65) = 45.05.
    assert made[0] == pytest.approx(45.05, abs=0.01)
    assert made[-1] == pytest.approx(-3.81, abs=0.01)
    assert (np.diff(made) < 0).all()


def test_implementations_of_torch_agree() -> None:
    """The words of numpy and torch bit for bit; the compiled kernel with the reference it stands beside."""
    torch = pytest.importorskip("torch")
    from speclocal.backends.torch.kernels import noise as kernels

    cpu = torch.device("cpu")
    some = torch.tensor([0, 3, 2**24 - 1])
    library = kernels.compiled()
    for seed, kind, stream, tokens in itertools.product((0, 2**63 + 5, 2**64 - 1), Purpose, (0, 3), (1000, 9001, some)):
        key, positions = noise.key_of(seed, stream), [0, 77, 2**32 - 1]
        for position in positions:
            arguments = key, position, kind, tokens, cpu, torch.float64
            for a, b in zip(kernels.words_numpy(*arguments), kernels.words_torch(*arguments), strict=True):
                assert torch.equal(a, b)
        if library is not None:
            exact = kernels.by_reference(key, positions, kind, tokens, cpu, torch.float64)
            made = kernels.by_kernel(library, key, positions, kind, tokens)
            assert made.shape == exact.shape
            assert (made - exact).abs().max() < 1e-5


def test_the_kernel_was_built_where_it_could_be() -> None:
    kernels = pytest.importorskip("speclocal.backends.torch.kernels.noise")
    if shutil.which("cc") and sysconfig.get_platform().startswith("linux"):
        assert kernels.compiled() is not None


def test_backend_words_are_those_of_the_core(ops: Ops) -> None:
    """Far indices and big seeds, beyond the golden rows: the array form is the scalar form."""
    seed, position, width = 2**64 - 3, 2**31 + 9, 3000
    (made,) = ops.to_host(ops.noise(seed, [position], Purpose.RESIDUAL, width, 1))
    for index in (0, 1, 2047, width - 1):
        w0, w1 = (np.float64(w) for w in noise.words(seed, position, Purpose.RESIDUAL, index, 1))
        assert made[0][index] == pytest.approx(float(noise.gumbel(np, w0, w1, MASK - w0, MASK - w1)), abs=1e-4)


def moments(ops: Ops, **key: Any) -> list[float]:
    settings = {"seed": 1, "positions": [5], "purpose": Purpose.TARGET, "tokens": 20_000, "stream": 0} | key
    return ops.to_host(ops.noise(*settings.values()))[0][0]


def test_distribution_and_independence(ops: Ops) -> None:
    check_independence(ops)


def check_independence(ops: Ops) -> None:
    """Mean and variance of a Gumbel; no correlation between seeds, positions, purposes or streams."""
    base = np.array(moments(ops))
    assert base.mean() == pytest.approx(0.5772, abs=5 * 1.2825 / 20_000**0.5)
    assert base.var() == pytest.approx(np.pi**2 / 6, abs=0.1)
    others: list[dict[str, Any]] = [
        {"seed": 2},
        {"seed": 1 + 2**32},
        {"positions": [6]},
        {"purpose": Purpose.DRAFT},
        {"purpose": Purpose.RESIDUAL},
        {"stream": 1},
        {"stream": 2},
    ]
    rows = [base, *(np.array(moments(ops, **key)) for key in others)]
    table = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(table).max() < 5 / 20_000**0.5


class Counting:
    """Ops that write down which rows of noise were made."""

    def __init__(self, ops: Ops):
        self.made: list[tuple[Purpose, int]] = []
        self.ops = replace(ops, noise=self._noise)
        self._inner = ops.noise

    def _noise(self, seed: int, positions: Sequence[int], kind: Purpose, tokens: Any, stream: int = 0) -> Any:
        self.made += [(kind, p) for p in positions]
        return self._inner(seed, positions, kind, tokens, stream)


def test_each_position_is_made_once_while_it_can_recur(ops: Ops) -> None:
    counting = Counting(ops)
    kept = Noise(counting.ops, 11, WIDTH)
    first = ops.to_host(kept.rows(10, 4))[0]
    assert ops.to_host(kept.rows(12, 4))[0][:2] == first[2:]
    assert ops.to_host(kept.rows(11, 1))[0] == first[1:2]
    assert counting.made == [(Purpose.TARGET, p) for p in (10, 11, 12, 13, 14, 15)]
    kept.rows(12, 1, Purpose.RESIDUAL)
    assert counting.made[-1] == (Purpose.RESIDUAL, 12), "purposes do not share rows"

    kept.forget(13)
    counting.made.clear()
    again = ops.to_host(kept.rows(12, 2))[0]
    assert counting.made == [(Purpose.TARGET, 12)], "decided positions are dropped, later ones kept"
    assert again == first[2:], "and a row made again is the same row"


def test_rows_do_not_depend_on_what_is_asked_with_them(ops: Ops) -> None:
    """Width, count and order do not change a number: no padding, batch or backend state enters."""
    alone = Noise(ops, 5, WIDTH).rows(9, 1)
    together = Noise(ops, 5, WIDTH).rows(7, 5)
    wider = Noise(ops, 5, 3 * WIDTH).rows(9, 1)
    assert ops.to_host(alone)[0][0] == ops.to_host(together)[0][2]
    assert ops.to_host(wider)[0][0][:WIDTH] == pytest.approx(ops.to_host(alone)[0][0], abs=1e-5)
    some = Noise(ops, 5, WIDTH).at([7, 9], Purpose.TARGET, ops.array([2, 0]))
    assert ops.to_host(some)[0][1] == pytest.approx([ops.to_host(alone)[0][0][t] for t in (2, 0)], abs=1e-5)


def test_block_vectors_are_one_position_with_a_running_number(ops: Ops) -> None:
    keyed = Noise(ops, 5, WIDTH)
    for number in range(3):
        (block,) = ops.to_host(keyed.block(20, number, Purpose.DRAFT))
        (some,) = ops.to_host(keyed.block(20, number, Purpose.DRAFT, ops.array([3, 1])))
        assert some[0] == pytest.approx([block[0][3], block[0][1]], abs=1e-5)
        for token, value in enumerate(block[0]):
            w0, w1 = (np.float64(w) for w in noise.words(5, 20, Purpose.DRAFT, number * WIDTH + token))
            assert value == pytest.approx(float(noise.gumbel(np, w0, w1, MASK - w0, MASK - w1)), abs=1e-4)


def test_coins(ops: Ops) -> None:
    keyed = Noise(ops, 42, WIDTH, stream=3)
    assert keyed.coin(17, 2) == noise.uniform(42, 17, Purpose.ACCEPT, 2, 3)
    coins = [keyed.coin(p, i) for p in range(60) for i in range(60)]
    assert len(set(coins)) > 0.999 * len(coins)
    assert all(0 <= c < 1 for c in coins)
    assert np.mean(coins) == pytest.approx(0.5, abs=5 * 0.2887 / 60)


def test_block_vectors_that_would_repeat_are_refused(ops: Ops) -> None:
    """Number x V + token must stay below 2^24, where the purpose bits begin: vector 64 would be vector 0 again."""
    keyed = Noise(ops, 5, 2**18)
    keyed.block(20, 63, Purpose.DRAFT, ops.array([0]))
    with pytest.raises(UsageError, match="at most 64"):
        keyed.block(20, 64, Purpose.DRAFT, ops.array([0]))
