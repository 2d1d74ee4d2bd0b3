"""Trees that grow on the device: expansion by cumulative confidence and the final choice, without a look from the host.

EAGLE-2 (Li et al. 2406.16858). All shapes depend on (depth, top-k, nodes) only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speclocal.core.pending import Pending
from speclocal.core.propose import propose
from speclocal.core.tree import DraftTree, Layout

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array, Ops
    from speclocal.core.sampling import Law, Sampler


@dataclass(frozen=True)
class Beam:
    """The nodes of a level that are run through the draft module next, [k] each.

    parents: row of the previous beam (0 for the first one: the root). depth: of the nodes. seen: [k, rows] 1 where a
    node sees a row run so far below the root, itself included; rows of all beams in order.
    """

    tokens: Array
    parents: Array
    depth: int
    seen: Array


def grow(
    sampler: Sampler, root: int, first: Law, run: Callable[[Beam], Law], topk: int, depth: int, nodes: int
) -> DraftTree:
    """A tree of at most `nodes` nodes below the root, no deeper than `depth`, that keeps the most confident paths.

    first: the draft law after the root, [1, V]. run: laws [k, V] of a beam's nodes.
    The confidence of a node is its share in the draft law after filters, with the noise of its position under the
    coupled rule: that is the law of what the target will draw, as far as the drafter knows it. It decides which nodes
    are checked, never what is accepted.
    """
    ops = sampler.ops
    xp = ops.xp
    best, ids, total = propose(sampler, first, 0, topk)
    k = best.shape[-1]
    scores = best[0] - total[0]
    beam = Beam(ids[0], ops.arange(k) * 0, 1, eye(ops, k))
    beam_scores = scores
    # Candidates in order of creation: their tokens, scores, parents (number of the candidate, -1 for the root).
    tokens, confidences, parents = [beam.tokens], [scores], [ops.arange(k) * 0 - 1]
    numbers, made = ops.arange(k), k
    for level in range(1, depth):
        law = run(beam)
        best, ids, total = propose(sampler, law, level, topk)
        width = best.shape[-1]
        flat = (beam_scores[:, None] + (best - total[:, None])).reshape(-1)
        tokens.append(ids.reshape(-1))
        confidences.append(flat)
        parents.append((numbers[:, None] + ops.arange(width)[None, :] * 0).reshape(-1))
        if level + 1 < depth:
            beam_scores, chosen = ops.top(flat[None], k)
            beam_scores, chosen = beam_scores[0], chosen[0]
            rows = chosen // width
            seen = xp.concat([beam.seen[rows], eye(ops, k)], -1)
            beam = Beam(tokens[-1][chosen], rows, level + 1, seen)
            numbers = chosen + made
        made += flat.shape[0]
    return choose(ops, root, xp.concat(tokens), xp.concat(confidences), xp.concat(parents), nodes, depth)


def choose(ops: Ops, root: int, tokens: Array, scores: Array, parents: Array, nodes: int, depth: int) -> DraftTree:
    """The best `nodes` candidates as a tree, in order of creation. A parent is never less confident than its child."""
    xp = ops.xp
    count = min(nodes, tokens.shape[0])
    _, kept = ops.top(scores[None], count)
    kept = kept[0][xp.argsort(kept[0])]
    marks = ops.arange(tokens.shape[0]) * 0
    marks[kept] = ops.arange(count) * 0 + 1
    place = xp.cumsum(marks, 0)
    above = parents[kept]
    above = xp.where(above < 0, 0, place[xp.where(above < 0, 0, above)])
    none = ops.array([-1])
    everything = xp.concat([ops.array([root]), tokens[kept]])
    layout = Layout.of(ops, xp.concat([none, above]), min(depth, count))
    return DraftTree(Pending(ops, everything), Pending(ops, layout.parents), layout=layout)


def eye(ops: Ops, n: int) -> Array:
    """[n, n] integers, 1 on the diagonal."""
    at = ops.arange(n)
    return ops.xp.where(at[:, None] == at[None, :], 1, 0)
