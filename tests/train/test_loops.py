"""Which texts count as written over and over."""

from __future__ import annotations

import numpy as np
import pytest

from speclocal.train.writing import PERIOD, REPEATED, loops


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], False),
        ([7] * (REPEATED - 1), False),
        ([7] * REPEATED, True),
        ([1, 2, 3, *[7] * REPEATED], True),
        ([*[7] * REPEATED, 8], False),
        ([4, 5] * (REPEATED // 2), True),
        ([9, 4, 5] * 5, False),
        ([9, 4, 5] * (REPEATED // 3), True),
        ([5, 4, 9, 4, 5, *[9, 4, 5] * (REPEATED // 3 - 1)], True),
        (list(range(30)) * 2, False),
        (list(range(30)) * 3, True),
        ([1, *list(range(30))[1:], *list(range(30)) * 2], False),
        (list(range(PERIOD)) * 3, True),
        (list(range(PERIOD + 1)) * 3, False),
        (list(range(200)), False),
    ],
)
def test_loops(ids: list[int], expected: bool) -> None:
    assert loops(ids) is expected


def test_loops_by_definition() -> None:
    """Against every period and repeat count, on random short texts of two words."""
    draw = np.random.default_rng(0)
    seen = set()
    for _ in range(2000):
        unit = draw.integers(0, 2, draw.integers(1, 12)).tolist()
        noise = draw.integers(0, 2, draw.integers(0, 4)).tolist()
        ids = (draw.integers(0, 2, 10).tolist() + unit * int(draw.integers(1, 30)))[:80] + noise
        expected = any(
            len(ids) >= max(3 * d, REPEATED)
            and all(ids[-1 - i] == ids[-1 - i - d] for i in range(max(3 * d, REPEATED) - d))
            for d in range(1, PERIOD + 1)
        )
        assert loops(ids) is expected
        seen.add(expected)
    assert seen == {True, False}
