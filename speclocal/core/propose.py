"""How a drafter that has a law q picks the children of a node, per acceptance rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speclocal.core.noise import Purpose

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array
    from speclocal.core.sampling import Sampler


def perturb(sampler: Sampler, law: Array, depth: int) -> Array:
    """Scores whose k best tokens, in order, are the children of nodes at `depth`: [N, V], like `law`.

    Temperature 0: the law itself. Coupled: with the noise the target will draw with, so that drafts hit its draw.
    Rejection and block: with private noise, which makes the k best a sample without replacement from q in draw order.
    """
    if sampler.sampling.greedy:
        return law
    if sampler.rule == "coupled":
        return law + sampler.noise.rows(sampler.position + depth, 1)
    if sampler.rule == "rejection":
        return law + sampler.noise.rows(sampler.position + depth, 1, Purpose.DRAFT)
    # Block verification decides positions again in later rounds: the key is the round's first position.
    return law + sampler.noise.block(sampler.position, depth + 1, Purpose.DRAFT)[depth][None]
