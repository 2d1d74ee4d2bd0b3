"""The sampler once more, as plainly as possible: Python floats, one position, no arrays. An oracle, not a port."""

from __future__ import annotations

import math
from collections.abc import Sequence

from speclocal.core.sampling import Sampling


def law(
    logits: Sequence[float],
    s: Sampling,
    prompt: Sequence[int],
    answer: Sequence[int],
    unknown: Sequence[int] = (),
    end_ids: Sequence[int] = (),
) -> list[float]:
    """Probabilities of the token after `prompt` and `answer`."""
    scores = []
    for token, logit in enumerate(logits):
        x = logit + s.logit_bias.get(token, 0.0)
        if token in prompt or token in answer:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        if token in answer:
            x = x - s.presence_penalty - s.frequency_penalty * list(answer).count(token)
        if token in unknown or (token in end_ids and len(answer) < s.min_tokens):
            x = -math.inf
        scores.append(x)
    if s.temperature == 0:
        best = scores.index(max(scores))
        return [1.0 if token == best else 0.0 for token in range(len(scores))]
    weights = [math.exp((x - max(scores)) / s.temperature) for x in scores]
    if s.top_k:
        least = sorted(weights, reverse=True)[: s.top_k][-1]
        weights = [w if w >= least else 0.0 for w in weights]
    if s.top_p < 1:
        least, reached, total = 0.0, 0.0, sum(weights)
        for w in sorted(weights, reverse=True):
            if reached >= s.top_p * total:
                break
            least, reached = w, reached + w
        weights = [w if w >= least else 0.0 for w in weights]
    weights = [w if w >= s.min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]
