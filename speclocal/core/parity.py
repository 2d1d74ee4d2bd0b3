"""The parity probe: at load, a tree pass must equal the same tokens decoded one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from speclocal.core.tree import DraftTree
from speclocal.errors import ModelError

if TYPE_CHECKING:
    from speclocal.core.interfaces import Array, Ops, Target

PARENTS = (-1, 0, 0, 1, 2, 2)
ELSEWHERE = (-1, 0, 1, 0, 1, 4)
CHAIN = (0, 1, 3)
LEAF = (0, 2, 5)


def difference(ops: Ops, a: Array, b: Array) -> float:
    """Root of the mean squared difference, relative to the spread of each row of `b`; inf where one is not finite."""
    xp = ops.xp
    centred = b - (xp.sum(b, -1) / b.shape[-1])[:, None]
    off, spread = ops.to_host(xp.sum((a - b) * (a - b)), xp.sum(centred * centred))
    ratio = (off / spread) ** 0.5 if spread > 0 else float("inf")
    return ratio if ratio == ratio else float("inf")


def probe(
    target: Target,
    name: str,
    tolerance: float,
    notify: Callable[[str], None],
    impossible: tuple[type[Exception], ...] = (),
) -> None:
    """Set `target.trees`; ModelError if not even chains are exact. Leaves the cache empty.

    name:       of the model's class, for messages.
    tolerance:  largest accepted `difference` (rounding differs with the number of rows).
    impossible: what a model raises that cannot take a tree at all.

    The control scores the tree with its nodes hung elsewhere: were positions and mask without effect, parity would
    prove nothing.
    """
    draw = random.Random(0)
    ids = [draw.randrange(min(target.vocab, 1000)) for _ in range(4 + len(PARENTS))]
    prompt, tokens = ids[:4], tuple(ids[4:])
    ops = target.ops

    def rows(tree: DraftTree) -> Array:
        target.prefill(prompt)
        return target.score(tree).logits

    def one_by_one(nodes: Sequence[int]) -> Array:
        target.prefill(prompt)
        out = []
        for node in nodes:
            out.append(target.score(DraftTree.chain(tokens[node])).logits)
            target.commit(())
        return ops.xp.concat(out)

    def pick(scored: Array, nodes: Sequence[int]) -> Array:
        return scored[ops.array(list(nodes))]

    chain, leaf = one_by_one(CHAIN), one_by_one(LEAF)
    as_chain = rows(DraftTree.chain(tokens[0], [tokens[i] for i in CHAIN[1:]]))
    if (off := difference(ops, as_chain, chain)) > tolerance:
        raise ModelError(
            f"{name} does not score several tokens at once as it does one by one",
            got=f"a difference of {off:.1e}",
            expected=f"at most {tolerance:.0e}",
        )
    try:
        scored = rows(DraftTree(tokens, PARENTS))
        error = max(
            difference(ops, pick(scored, CHAIN), chain),
            difference(ops, pick(scored, LEAF), leaf),
        )
        control = difference(ops, pick(rows(DraftTree(tokens, ELSEWHERE)), LEAF), leaf)
        target.trees = error <= tolerance and control > error
        reason = f"difference {error:.1e}"
    except impossible as raised:
        target.trees = False
        reason = (str(raised).strip().splitlines() or [type(raised).__name__])[0]
    if not target.trees:
        notify(f"{name}: trees are not exact here ({reason}); drafts become chains")
    target.prefill([])
