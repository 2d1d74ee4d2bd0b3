"""The rope of a head."""

from __future__ import annotations

import mlx.core as mx

from speclocal.core.heads import EagleSpec
from speclocal.core.rope import frequencies


class Rope:
    """Turns pairs of numbers by angles of the head's own base and scaling, computed for the positions asked for."""

    def __init__(self, spec: EagleSpec):
        radians, self._scale = frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        self._wavelengths = 1.0 / mx.array(radians)

    def __call__(self, x: mx.array, position: int, abreast: bool) -> mx.array:
        """x [1, heads, n, d] at `position`, the rows after the first one step further each, unless they are `abreast`.

        The halves form.
        """
        if abreast:
            # Batch rows of length 1 all begin at the same position.
            return self(x.transpose(2, 1, 0, 3), position, False).transpose(2, 1, 0, 3)
        if self._scale != 1:
            x = x * self._scale
        return mx.fast.rope(
            x, x.shape[-1], traditional=False, base=None, scale=1.0, offset=position, freqs=self._wavelengths
        )
