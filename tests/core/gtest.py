"""The G-test: do counts follow a law?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def p_value(counts: Mapping[Any, int], law: Mapping[Any, float]) -> float:
    """Probability of counts at least as far from `law`; 0 if something happened that cannot. Rare cells are pooled."""
    total = sum(counts.values())
    if any(n and law.get(k, 0.0) <= 0 for k, n in counts.items()):
        return 0.0
    cells, rare = [], [0.0, 0.0]
    for key, chance in law.items():
        cell = [float(counts.get(key, 0)), total * chance]
        if cell[1] >= 5:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    if rare[1] >= 1:
        cells.append(rare)
    if len(cells) < 2:
        return 1.0
    g = 2 * sum(seen * math.log(seen / expected) for seen, expected in cells if seen)
    return chi_squared_tail(max(g, 0.0), len(cells) - 1)


def chi_squared_tail(x: float, freedom: int) -> float:
    """P(chi squared > x), by the Wilson-Hilferty cube root: within a few per cent of the truth at 1e-4."""
    if not x:
        return 1.0
    spread = 2 / (9 * freedom)
    z = ((x / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return math.erfc(z / math.sqrt(2)) / 2


def visible(cells: int, rounds: int) -> float:
    """Total variation that a G-test surely sees.

    Its non-centrality is at least 4 N d^2; three times the threshold's distance from the mean is enough.
    """
    freedom = cells - 1
    needed = 3 * 3.72 * math.sqrt(2 * freedom)
    return math.sqrt(needed / (4 * rounds))
