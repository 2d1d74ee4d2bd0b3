"""Which tree suits Medusa heads: measured on the target's own texts, grown by what is most often right."""

from __future__ import annotations

import numpy as np

RANKS = 10
"""Ranks that are counted, and most children of a node."""


class Hits:
    """How often each head had the target's token at each rank: hits [heads, RANKS], of so many rows [heads]."""

    def __init__(self, heads: int):
        self.hits, self.rows = np.zeros((heads, RANKS), np.int64), np.zeros(heads, np.int64)

    def add(self, head: int, ranks: np.ndarray) -> None:
        """ranks: [m] from 0, those beyond the last counted one are misses."""
        self.hits[head] += np.bincount(np.minimum(ranks, RANKS), minlength=RANKS + 1)[:RANKS]
        self.rows[head] += len(ranks)


def calibrate(hits: np.ndarray, rows: np.ndarray, nodes: int) -> tuple[tuple[int, ...], ...]:
    """Paths of ranks of the best tree of at most `nodes` nodes, the most useful first: so many of them as one likes are
    the best tree of that size.

    A path is right as often as the product of its ranks' shares of hits, heads taken as independent (Cai et al.
    2401.10774). Each next node is the likeliest among first children and next siblings of those chosen; ranks that
    never were right are left out. hits: [heads, ranks]. rows: [heads].
    """
    share = hits / np.maximum(rows, 1)[:, None]

    def chance(path: tuple[int, ...]) -> float:
        return float(np.prod([share[h, rank] for h, rank in enumerate(path)]))

    chosen: list[tuple[int, ...]] = []
    near: set[tuple[int, ...]] = {(0,)}
    while near and len(chosen) < nodes:
        path = max(near, key=lambda path: (chance(path), -len(path), [-rank for rank in path]))
        if not chance(path):
            break
        near.remove(path)
        chosen.append(path)
        if path[-1] + 1 < share.shape[1]:
            near.add((*path[:-1], path[-1] + 1))
        if len(path) < len(share):
            near.add((*path, 0))
    return tuple(chosen)
