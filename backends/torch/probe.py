"""The parity probe: at load, a tree pass must equal the same tokens decoded one by one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from speclocal.backends.torch.target import TorchTarget
from speclocal.core.tree import DraftTree
from speclocal.errors import ModelError

PARENTS = (-1, 0, 0, 1, 2, 2)
CHAIN = (0, 1, 3)
LEAF = (0, 2, 5)


def tolerance(dtype: torch.dtype) -> float:
    """Largest accepted difference, as a share of the logits' spread (rounding differs with the number of rows)."""
    return 1e-3 if dtype == torch.float32 else 0.15


def difference(a: Tensor, b: Tensor) -> float:
    """Mean absolute difference relative to the spread of `b`."""
    return ((a - b).abs().mean() / b.std().clamp_min(1e-12)).item()


def probe(target: TorchTarget, notify: Callable[[str], None]) -> None:
    """Set `target.trees`; ModelError if not even chains are exact. Leaves the cache empty.

    The control scores the tree with its nodes hung elsewhere: were positions and mask without effect, parity would
    prove nothing.
    """
    generator = torch.Generator().manual_seed(0)
    width = min(target.vocab, 1000)
    ids = torch.randint(0, width, (4 + len(PARENTS),), generator=generator).tolist()
    prompt, tokens = ids[:4], tuple(ids[4:])
    limit = tolerance(target.dtype)

    def rows(tree: DraftTree) -> Tensor:
        target.prefill(prompt)
        return target.score(tree).logits

    def one_by_one(nodes: tuple[int, ...]) -> Tensor:
        target.prefill(prompt)
        out = []
        for node in nodes:
            out.append(target.score(DraftTree.chain(tokens[node])).logits)
            target.commit(())
        return torch.cat(out)

    tree = DraftTree(tokens, PARENTS)
    scored = rows(tree)
    chain, leaf = one_by_one(CHAIN), one_by_one(LEAF)
    as_chain = rows(DraftTree.chain(tokens[0], [tokens[i] for i in CHAIN[1:]]))
    if (off := difference(as_chain, chain)) > limit:
        raise ModelError(
            f"{type(target.model).__name__} does not score several tokens at once as it does one by one",
            got=f"a difference of {off:.1e}",
            expected=f"at most {limit:.0e}",
        )
    error = max(difference(scored[list(CHAIN)], chain), difference(scored[list(LEAF)], leaf))
    control = difference(rows(DraftTree(tokens, (-1, 0, 1, 0, 1, 4)))[list(LEAF)], leaf)
    target.trees = error <= limit and control > error
    if not target.trees:
        notify(
            f"{type(target.model).__name__}: trees are not exact here (difference {error:.1e}); drafts become chains"
        )
    target.prefill([])
