"""The acceptance rules. Each turns laws into the few numbers per node that the walk needs, with one sync.

Leviathan et al. 2211.17192, Chen et al. 2302.01318 (rejection), Miao et al. 2305.09781 (siblings), Sun et al.
2403.10444 (block), Daliri et al. 2408.07978 (coupled), Cai et al. 2401.10774 (typical). p is the target's law, q the
law the drafts were drawn from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speclocal.core.accept import deepest, follow, longest, try_children
from speclocal.core.interfaces import Acceptance, Array, Ops
from speclocal.core.noise import Purpose
from speclocal.core.pending import Pending
from speclocal.core.sampling import Law
from speclocal.core.tree import DraftTree
from speclocal.errors import UsageError

if TYPE_CHECKING:
    from speclocal.core.sampling import Sampler

EXACT = ("coupled", "rejection", "block")
"""The rules that keep the target's law."""
RULES = (*EXACT, "typical")
LEAST = 1e30
"""Minus this is below the logarithm of every weight but 0."""
TINY = 2.0**-20
"""Residual mass below which rounding rules: the residual is then drawn from p (see `residual`)."""
EPSILON, ALPHA = 0.09, 0.3
"""The typical rule keeps a draft whose probability is above min(EPSILON, ALPHA exp(-entropy))."""
SMALL = 1e-5
"""Added to probabilities before their logarithm, as where the typical rule was published."""


def verify(law: Law, tree: DraftTree, sampler: Sampler) -> Acceptance:
    """Decide which drafted nodes survive, and the token the target adds.

    law: the target's at every node (`Sampler.law`). Tokens of the tree that are still on the device come to the host
    with the rule's numbers. Penalties read them before, to make the law: then they cost a synchronisation of their own.
    """
    if sampler.rule == "coupled" or sampler.sampling.greedy:
        return coupled(law, tree, sampler)
    if sampler.rule == "rejection":
        return rejection(law, tree, sampler)
    if sampler.rule == "typical":
        return typical(law, tree, sampler)
    return block(law, tree, sampler)


def fetch(ops: Ops, tree: DraftTree, *arrays: Array) -> list[Any]:
    """Arrays on the host, and with them what of the tree is not there yet: one synchronisation."""
    missing = [ids for ids in (tree.tokens, tree.parents) if isinstance(ids, Pending) and not ids.settled]
    values = ops.to_host(*arrays, *(ids.array for ids in missing))
    for ids in reversed(missing):
        ids.settle(values.pop())
    return values


def on_device(ops: Ops, tree: DraftTree) -> Array:
    """The tree's tokens, device [N]."""
    return tree.tokens.array if isinstance(tree.tokens, Pending) else ops.array(list(tree.tokens))


def coupled(law: Law, tree: DraftTree, sampler: Sampler) -> Acceptance:
    """The target draws its own token at every node; a child survives iff it is that token.

    y_v = argmax(log p_v + noise of the position): exact sampling from p. What is emitted depends on neither tree nor
    drafter, so the text of a seed is the same with and without speculation.
    """
    ops = sampler.ops
    (drawn,) = fetch(ops, tree, draw(law, tree, sampler, Purpose.TARGET))
    return follow(tree, drawn)


def draw(law: Law, tree: DraftTree, sampler: Sampler, purpose: Purpose) -> Array:
    """One token per node, [N]: a draw from its law, keyed by the node's position; the argmax at temperature 0."""
    layout = tree.layout
    if layout is None:
        scores, tokens = sampler.race(law, tree.depth, purpose)
    else:
        scores, tokens = sampler.race(law, layout.depth, purpose, layout.deepest)
    best = sampler.ops.xp.argmax(scores, -1)
    return best if tokens is None else tokens[best]


def part_of(law: Law, weights: Array, ops: Ops) -> Law:
    """Weights [N, V] as a law; where `law` leaves most tokens out, so do they."""
    scores = ops.xp.log(weights)
    return Law(scores, None if law.floor is None else law.floor * 0.0 - LEAST)


def rejection(law: Law, tree: DraftTree, sampler: Sampler) -> Acceptance:
    """Token-level speculative sampling, sibling by sibling.

    Coins and residual draws are keyed by the absolute position: a top-down rule decides every position once.
    """
    ops, noise, position = sampler.ops, sampler.noise, sampler.position
    keep_p, keep_q, left = odds(ops, sampler.probabilities(law), tree)
    last = draw(part_of(law, left, ops), tree, sampler, Purpose.RESIDUAL)
    p, q, last = fetch(ops, tree, keep_p, keep_q, last)

    def survives(node: int, rank: int) -> bool:
        parent = tree.parents[node]
        return noise.coin(position + tree.depth[parent], rank) * q[rank][parent] < p[rank][parent]

    return try_children(tree, survives, last)


def odds(ops: Ops, p: Array, tree: DraftTree) -> tuple[Array, Array, Array]:
    """What recursive rejection needs: child number r of node v survives iff u * q[r, v] < p[r, v].

    p: [N, V] the target's law at every node. The law children were drawn from is `tree.q` and `tree.siblings`.
    Returns p [K, N], q [K, N] of the child of every rank (given that its elder siblings were refused), and [N, V], the
    law of the last token if all children of the node were refused (p itself at a leaf).
    """
    xp, n = ops.xp, len(tree)
    kids, rows = tree.children, ops.arange(n)
    ids, tokens = ops.arange(p.shape[-1])[None, :], on_device(ops, tree)
    q = tree.q
    ps, qs = [], []
    for rank in range(max(map(len, kids))):
        has = ops.array([rank < len(k) for k in kids])[:, None]
        # Where there is no such child, any drafted token will do.
        token = tokens[ops.array([k[rank] if rank < len(k) else 1 for k in kids])]
        hit = ids == token[:, None]
        ps.append(p[rows, token])
        if tree.siblings == "one-hot":
            qs.append(ps[-1] * 0.0 + 1.0)
            minus = xp.where(hit, 1.0, 0.0)
        else:
            qs.append(q[rows, token])
            minus = q
        p = xp.where(has, residual(ops, p, minus), p)
        if tree.siblings == "without-replacement":
            rest = xp.where(hit, 0.0, q)
            total = xp.sum(rest, -1)[:, None]
            q = xp.where(has, rest / xp.where(total > 0, total, 1.0), q)
    if not ps:
        ps, qs = [p[:, 0] * 0.0], [p[:, 0] * 0.0 + 1.0]
    return xp.stack(ps), xp.stack(qs), p


def residual(ops: Ops, p: Array, q: Array) -> Array:
    """norm([p - q]+) per row; p where that mass is lost in rounding (then a refusal had probability ~0 too)."""
    xp = ops.xp
    left = xp.where(p > q, p - q, 0.0)
    mass = xp.sum(left, -1)[:, None]
    return xp.where(mass > TINY, left / xp.where(mass > TINY, mass, 1.0), p)


def block(law: Law, tree: DraftTree, sampler: Sampler) -> Acceptance:
    """Block verification of a sampled chain: the longest prefix whose joint test succeeds.

    Bottom-up rules look at coins of positions that are decided again later, so everything is keyed by the position of
    the round's first token (verification.md 8.4).
    """
    if not tree.is_chain or (len(tree) > 1 and tree.q is None):
        raise UsageError("block verification checks sampled chains", expected="a drafter that draws a chain from its q")
    ops, noise, position = sampler.ops, sampler.noise, sampler.position
    thresholds, left = block_thresholds(ops, sampler.probabilities(law), tree)
    # One last token is drawn a round, so the nodes may share the noise of the round's first position.
    scores, tokens = sampler.race(part_of(law, left, ops), [0] * len(tree), Purpose.RESIDUAL)
    last = ops.xp.argmax(scores, -1)
    t, last = fetch(ops, tree, thresholds, last if tokens is None else tokens[last])
    return longest(tree, [noise.coin(position, i) < t[i] for i in range(len(t))], last)


def block_thresholds(ops: Ops, p: Array, tree: DraftTree) -> tuple[Array, Array]:
    """Thresholds [N] (entry i: keep at least i drafts iff a coin is below it) and last-token laws [N, V].

    p: [N, V]. Follows Sun et al., algorithm 2: w is the clipped running ratio, S the mass of [w p - q]+.
    """
    xp, n = ops.xp, len(tree)
    one = xp.sum(p[0]) * 0.0 + 1.0
    w, thresholds, laws = one, [], []
    if n > 1:
        at = ops.arange(n - 1), on_device(ops, tree)[1:]
        px, qx = p[at], tree.q[at]
        # A drafted token whose q was rounded to 0 survives wherever p is not 0.
        ratio = xp.where(qx > 0, px / xp.where(qx > 0, qx, 1.0), px * 1e30)
    for i in range(n):
        if i:
            w = xp.clip(w * ratio[i - 1], 0.0, 1.0)
        if i == n - 1:
            thresholds.append(w if i else one)
            laws.append(p[i])
            break
        excess = w * p[i] - tree.q[i]
        excess = xp.where(excess > 0, excess, 0.0)
        mass = xp.sum(excess)
        below = mass + 1.0 - w
        thresholds.append(xp.where(below > 0, mass / xp.where(below > 0, below, 1.0), 1.0) if i else one)
        laws.append(xp.where(mass > TINY, excess / xp.where(mass > TINY, mass, 1.0), p[i]))
    return xp.stack(thresholds), xp.stack(laws)


def typical(law: Law, tree: DraftTree, sampler: Sampler) -> Acceptance:
    """Typical acceptance: a draft is kept if it is likely enough, not as often as the target would say it.

    Not exact: the text does not follow the target's law. The longest path of nodes that are likely enough is kept, of
    equally long ones the likeliest, and the target's likeliest token follows it.
    """
    ops = sampler.ops
    xp = ops.xp
    p = sampler.probabilities(law)
    limits = ALPHA * xp.exp(xp.sum(p * xp.log(p + SMALL), -1))
    limits = xp.where(limits < EPSILON, limits, EPSILON)
    best = xp.argmax(p, -1)
    if len(tree) == 1:
        return follow(tree, fetch(ops, tree, best)[0])
    parents = ops.array(list(tree.parents)) if tree.layout is None else tree.layout.parents
    above = parents[1:]
    chances = p[above, on_device(ops, tree)[1:]]
    chances, limits, best = fetch(ops, tree, chances, limits[above], best)
    return deepest(tree, [1.0, *chances], [0.0, *limits], best)
