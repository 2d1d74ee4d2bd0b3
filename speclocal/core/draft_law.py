"""Logits of a draft module as laws over the target's vocabulary, and how children are picked from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speclocal.core.propose import propose
from speclocal.core.sampling import Law, Sampler
from speclocal.core.tree import DraftTree

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array


def fit(sampler: Sampler, logits: Array) -> Array:
    """Draft logits [n, V'] in the target's width V: padding ids cut off or added as impossible."""
    width, ops = logits.shape[-1], sampler.ops
    if width == sampler.width:
        return logits
    if width > sampler.width:
        return logits[:, : sampler.width]
    missing = ops.arange(sampler.width - width)[None, :] * 0.0 - math.inf
    return ops.xp.concat([logits, missing + logits[:, :1] * 0.0], -1)


@dataclass(frozen=True)
class DraftLaws:
    """Laws of a draft module of vocabulary Vd, on one text.

    ids: [Vd] the target's id of each column, None if columns are ids. root: last committed token.
    plain: children are the likeliest tokens, without noise, and are checked as certain proposals.
    """

    sampler: Sampler
    ids: Array | None
    root: int
    plain: bool = False

    @classmethod
    def of(cls, sampler: Sampler, ids: Array | None, root: int, is_chain: bool) -> DraftLaws:
        """As the acceptance rule wants them: only chains are drawn with a q, and not for a rule that looks at none."""
        plain = sampler.rule == "typical" or (sampler.rule != "coupled" and not is_chain)
        return cls(sampler, ids, root, plain)

    @property
    def narrow(self) -> bool:
        """Whether columns may stay as they are: nothing but their order matters."""
        s = self.sampler.sampling
        return self.ids is not None and s.greedy and not s.penalised and not s.logit_bias

    def law(self, logits: Array) -> Law:
        """Logits [n, Vd] → laws; [n, V] with nothing outside the map, or [n, Vd] if `narrow`.

        Penalties count the committed text only: drafted tokens may still be on the device.
        """
        if self.narrow:
            return Law(logits)
        if self.ids is None:
            wide = fit(self.sampler, logits)
        else:
            wide = self.sampler.ops.arange(self.sampler.width)[None, :] * 0.0 - math.inf + logits[:, :1] * 0.0
            wide[:, self.ids] = logits
        return self.sampler.law(wide, DraftTree.chain(self.root))

    def pick(self, law: Law, depth: int, k: int) -> tuple[Array, Array]:
        """The k best children of nodes at `depth`, best first: log-confidences [n, k] and ids [n, k]; see `propose`."""
        sampler, ops = self.sampler, self.sampler.ops
        if self.plain:
            full = sampler.full(law)
            best, columns = ops.top(full, min(k, full.shape[-1]))
            total = ops.xp.logsumexp(full, -1)
        else:
            best, columns, total = propose(sampler, law, depth, k)
        ids = self.ids[columns] if self.narrow and self.ids is not None else columns
        return best - total[:, None], ids

    @property
    def drawn(self) -> bool:
        """Whether children are random draws whose law verification must know."""
        return not (self.plain or self.sampler.rule == "coupled" or self.sampler.sampling.greedy)
