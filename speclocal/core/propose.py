"""How a drafter that has a law q picks the children of a node, per acceptance rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speclocal.core.noise import Purpose

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array
    from speclocal.core.sampling import Law, Sampler


def propose(sampler: Sampler, law: Law, depth: int, k: int) -> tuple[Array, Array, Array]:
    """Children of nodes at `depth`, best first: their scores [N, k], tokens [N, k], and the rows' logsumexp [N].

    law: draft laws of N nodes. Temperature 0: the k best tokens. Coupled: the k best with the noise the target will
    draw with, so that drafts hit its draw. Rejection and block: with private noise, which makes the k best a sample
    without replacement from q, in draw order.
    """
    purpose = Purpose.TARGET if sampler.rule == "coupled" else Purpose.DRAFT
    scores, tokens = sampler.race(law, [depth] * law.scores.shape[0], purpose)
    best, columns = sampler.ops.top(scores, min(k, scores.shape[-1]))
    return best, columns if tokens is None else tokens[columns], sampler.ops.xp.logsumexp(scores, -1)
