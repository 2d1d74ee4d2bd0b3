"""Columns of a head's logits: its own draft vocabulary, and tokens of the text at hand whose rows the target lends.

A small draft vocabulary lacks names, numbers and words of other languages, and these come just where an answer repeats
its prompt. A head whose output rows are the target's own can draft any token: the target's row is one more column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array, Ops

NEAR = 0.2
"""Rows are the target's if most differ from them by less than this share of their size: rounding to 4 bits stays below
it, training does not."""


class Columns:
    """The columns a head has, and those it borrows.

    ids: [Vd] the target's id of each of the head's own columns; None if columns are ids. own: the head's output rows
    [Vd, D], None if it uses the target's output layer. lend: see `Target.output_rows`. Looks at the device once.
    """

    def __init__(self, ops: Ops, ids: Sequence[int] | None, own: Array | None, lend: Callable[[Array], Array | None]):
        self._ops, self._lend = ops, lend
        self._known = frozenset(ids or ())
        self._own = self.ids = None if ids is None else ops.array(list(ids))
        self.lends = ids is not None and own is not None and _alike(ops, own, lend(self._own))
        self._borrowed: frozenset[int] = frozenset()
        self._rows: Array = None

    def borrow(self, tokens: Iterable[int], most: int) -> None:
        """From now on also the last `most` of these distinct tokens that the head lacks; nothing if not `lends`."""
        if not self.lends:
            return
        lacking = [token for token in tokens if token not in self._known]
        lacking = lacking[max(len(lacking) - most, 0) :]
        if self._borrowed == (wanted := frozenset(lacking)):
            return
        self._borrowed, self.ids, self._rows = wanted, self._own, None
        if lacking:
            more = self._ops.array(lacking)
            self.ids = self._ops.xp.concat([self._own, more])
            self._rows = self._lend(more)

    def widen(self, logits: Array, y: Array) -> Array:
        """Logits [n, Vd] of the head's own columns and what its output layer read [n, D] → [n, Vd + borrowed]."""
        if self._rows is None:
            return logits
        return self._ops.xp.concat([logits, y @ self._rows.T], -1)


def _alike(ops: Ops, own: Array, lent: Array | None) -> bool:
    """Whether output rows [Vd, D] are the target's."""
    if lent is None or own.shape != lent.shape:
        return False
    near = ((own - lent) * (own - lent)).sum(-1) < NEAR**2 * (lent * lent).sum(-1)
    (count,) = ops.to_host(ops.xp.where(near, 1, 0).sum())
    return 2 * count > own.shape[0]
