"""The decoding loop: every method, plain decoding included, runs through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from speclocal.core.budget import Budget
from speclocal.core.interfaces import Drafter, Origin, Scores, Target
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


_Pass = tuple[DraftTree, Scores, Seconds]


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

    Where passes can run while the host does something else (`Ops.submit`), the next one is on its way before a round is
    yielded, so that the device works while the consumer decodes and draws text. Until it asks for the next round, the
    consumer must leave the target alone; it may close the iterator at any time.
    """
    if not stop.left:
        return
    submit = target.ops.submit

    def advance(seconds: Seconds) -> _Pass:
        """The next draft, and its pass through the target."""
        t0 = clock()
        tree = drafter.draft(budget.now(stop.left))
        t1 = clock()
        scores = target.score(tree)
        if submit:
            submit(*(made for made in (scores.logits, scores.taps) if made is not None))
        seconds.draft, seconds.verify = t1 - t0, clock() - t1
        return tree, scores, seconds

    began = clock()
    scores = target.prefill(prompt[:-1], on_prefill)
    drafter.begin(prompt, scores, sampler)
    coming: _Pass | None = advance(Seconds(prefill=clock() - began))
    finish = None
    while finish is None:
        tree, scores, seconds = coming or advance(Seconds())
        t0 = clock()
        taken = verify(sampler.law(scores.logits, tree), tree, sampler)
        t1 = clock()
        kept, finish = stop.cut(taken, tree)
        target.commit(kept.path)
        tokens = kept.tokens(tree)
        sampler.commit(tokens)
        drafter.commit(tree, kept, scores)
        budget.learn(tree, taken)
        origins = (Origin.ACCEPTED,) * len(kept.path) + (kept.origin,)
        seconds.verify += t1 - t0
        seconds.other = clock() - t1
        coming = advance(Seconds()) if submit and finish is None else None
        yield Round(tokens, origins, tree, taken.path, seconds, finish)
