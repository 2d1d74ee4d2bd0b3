"""The decoding loop: every method, plain decoding included, runs through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from speclocal.core.budget import Budget
from speclocal.core.interfaces import Drafter, Origin, Target
from speclocal.core.sampling import Sampler
from speclocal.core.stats import Seconds
from speclocal.core.stop import Stop
from speclocal.core.tree import DraftTree
from speclocal.core.verify import verify


@dataclass(frozen=True)
class Round:
    """One draft, one pass of the target, and what came of it.

    tokens:  emitted tokens, with their `origins`; cut at a stop.
    tree:    what was proposed; `path`: the nodes the rule accepted (before a stop cut them).
    finish:  why the text ends with this round, or None.
    """

    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    tree: DraftTree
    path: tuple[int, ...]
    seconds: Seconds
    finish: str | None


def decode(
    target: Target,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Sequence[int],
    stop: Stop,
    budget: Budget,
    on_prefill: Callable[[int], None] | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[Round]:
    """Yield rounds until `stop` ends the text.

    prompt: token ids, at least one. The last one is the root of the first tree, so every emitted token, the first
    included, comes out of the same verification.
    """
    if not stop.left:
        return
    began = clock()
    scores = target.prefill(prompt[:-1], on_prefill)
    drafter.begin(prompt, scores, sampler)
    prefill = clock() - began
    finish = None
    while finish is None:
        t0 = clock()
        tree = drafter.draft(budget.now(stop.left))
        t1 = clock()
        scores = target.score(tree)
        taken = verify(sampler.law(scores.logits, tree), tree, sampler)
        t2 = clock()
        kept, finish = stop.cut(taken, tree)
        target.commit(kept.path)
        tokens = kept.tokens(tree)
        sampler.commit(tokens)
        if finish is None:
            drafter.commit(tree, taken, scores)
            budget.learn(tree, taken)
        origins = (Origin.ACCEPTED,) * len(kept.path) + (kept.origin,)
        seconds = Seconds(prefill, draft=t1 - t0, verify=t2 - t1, other=clock() - t2)
        yield Round(tokens, origins, tree, taken.path, seconds, finish)
        prefill = 0.0
