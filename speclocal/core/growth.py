"""Trees whose tokens, and if need be whose shape, stay on the device until they are checked.

EAGLE-2 (Li et al. 2406.16858) for trees that grow; fixed trees as in EAGLE-1 and Medusa. All array shapes depend on
depth, top-k and nodes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speclocal.core.pending import Pending
from speclocal.core.tree import DraftTree, Layout

if TYPE_CHECKING:
    from speclocal.core.draft_law import DraftLaws
    from speclocal.core.interfaces import Array, Ops


@dataclass(frozen=True)
class Beam:
    """The nodes of a level that are run through the draft module next, [k] each.

    parents: row of the previous call (0 for the first beam: the root's). depth: of the nodes. seen: [k, rows] 1 where a
    node sees a row run so far below the root, itself included; rows of all beams in order.
    """

    tokens: Array
    parents: Array
    depth: int
    seen: Array


LESS = 1e-5
"""A child counts as less confident than its parent by this much at least, so that none is kept without its parent."""
Run = Callable[[Beam], "Array"]
"""Runs a beam through the draft module: logits [k, Vd], or one row for all."""


def chain(laws: DraftLaws, first: Array, run: Run, depth: int) -> DraftTree:
    """A path of `depth` tokens. first: logits after the root, [1, Vd]."""
    ops = laws.sampler.ops
    logits, tokens, q = first, [], []
    zero, one = ops.arange(1) * 0, ops.arange(1) * 0 + 1
    for level in range(depth):
        law = laws.law(logits)
        _, ids = laws.pick(law, level, 1)
        tokens.append(ids[0])
        if laws.drawn:
            q.append(laws.sampler.probabilities(law))
        if level + 1 < depth:
            logits = run(Beam(ids[0], zero, level + 1, ops.xp.stack([one] * (level + 1), -1)))[-1:]
    ids = Pending(ops, ops.xp.concat([ops.array([laws.root]), *tokens]))
    shape = tuple(range(-1, depth))
    if not laws.drawn:
        return DraftTree(ids, shape)
    return DraftTree(ids, shape, ops.xp.concat([*q, q[-1]]), "iid")


def grow(laws: DraftLaws, first: Array, run: Run, topk: int, depth: int, nodes: int) -> DraftTree:
    """A tree of at most `nodes` nodes below the root, no deeper than `depth`, that keeps the most confident paths.

    first: logits after the root, [1, Vd]. The confidence of a node is its share in the draft law after filters, with
    the noise of its position under the coupled rule: that is the law of what the target will draw, as far as the
    drafter knows it. It decides which nodes are checked, never what is accepted.
    """
    ops = laws.sampler.ops
    best, ids = laws.pick(laws.law(first), 0, topk)
    scores, k = best[0], best.shape[-1]
    beam = Beam(ids[0], ops.arange(k) * 0, 1, eye(ops, k))
    # Candidates in order of creation: their tokens, confidences, and parents (number of the candidate, -1: the root).
    tokens, confidences, parents = [beam.tokens], [scores], [beam.parents - 1]
    numbers, made = ops.arange(k), k
    for level in range(1, depth):
        best, ids = laws.pick(laws.law(run(beam)), level, topk)
        width = best.shape[-1]
        column = ops.arange(width)[None, :] * 0
        flat = (scores[:, None] + best - LESS).reshape(-1)
        tokens.append((ids + numbers[:, None] * 0).reshape(-1))
        confidences.append(flat)
        parents.append((numbers[:, None] + column).reshape(-1))
        if level + 1 < depth:
            top, chosen = ops.top(flat[None], k)
            scores, chosen = top[0], chosen[0]
            rows = chosen // width
            beam = Beam(tokens[-1][chosen], rows, level + 1, ops.xp.concat([beam.seen[rows], eye(ops, k)], -1))
            numbers = chosen + made
        made += flat.shape[0]
    concat = ops.xp.concat
    return choose(ops, laws.root, concat(tokens), concat(confidences), concat(parents), nodes, depth)


def choose(ops: Ops, root: int, tokens: Array, scores: Array, parents: Array, nodes: int, depth: int) -> DraftTree:
    """The best `nodes` candidates as a tree, in order of creation.

    A parent is more confident than its child. Should rounding make them equal it may be left out: then the child hangs
    below another node, which costs a node and nothing else.
    """
    xp = ops.xp
    count = min(nodes, tokens.shape[0])
    kept = ops.top(scores[None], count)[1][0]
    kept = kept[xp.argsort(kept)]
    marks = ops.arange(tokens.shape[0]) * 0
    marks[kept] = ops.arange(count) * 0 + 1
    place = xp.cumsum(marks, 0)
    above = parents[kept]
    above = xp.where(above < 0, 0, place[xp.where(above < 0, 0, above)])
    ids = xp.concat([ops.array([root]), tokens[kept]])
    layout = Layout.of(ops, xp.concat([ops.array([-1]), above]), min(depth, count))
    return DraftTree(Pending(ops, ids), Pending(ops, layout.parents), layout=layout)


def eye(ops: Ops, n: int) -> Array:
    """[n, n] integers, 1 on the diagonal."""
    at = ops.arange(n)
    return ops.xp.where(at[:, None] == at[None, :], 1, 0)
