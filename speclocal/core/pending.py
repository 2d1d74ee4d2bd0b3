"""Token ids that are still on the device: a model reads them there, and the host waits for them once or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array, Ops


class Pending(Sequence[int]):
    """A sequence of ids whose first reading on the host fetches all of them, which waits for the device.

    array:  device [N] integers. `len` needs no more than its shape.
    values: the same on the host, where they are known.
    """

    def __init__(self, ops: Ops, array: Array, values: Sequence[int] | None = None):
        self.array = array
        self._ops = ops
        self._values = None if values is None else tuple(values)

    def settle(self, values: Sequence[int]) -> None:
        """Say what the ids are, when they have come to the host with something else."""
        self._values = tuple(values)

    @property
    def settled(self) -> bool:
        """True if reading costs nothing any more."""
        return self._values is not None

    def __len__(self) -> int:
        return int(self.array.shape[0])

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if self._values is None:
            self._values = tuple(self._ops.to_host(self.array)[0])
        return self._values[index]
