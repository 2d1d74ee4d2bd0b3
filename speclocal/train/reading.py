"""Conversations with the target that exist already: it reads them again, and its states become training data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speclocal.core.interfaces import Batch, Gradients, Ops
from speclocal.errors import UsageError
from speclocal.text import Text
from speclocal.train.jobs import read_lines
from speclocal.train.store import Store, as_stored

GROUP = 16
"""Texts read at once."""
ROWS = 1024
"""Rows whose logits are made at once."""


@dataclass(frozen=True)
class Conversation:
    """Tokens, and the first of them that the target wrote."""

    ids: tuple[int, ...]
    own: int


def read_conversations(path: Path, text: Text) -> list[Conversation]:
    """JSON lines with `messages` that end with the target's answer, or `prompt_ids` and `answer_ids`."""
    found = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            found.append(_conversation(json.loads(line), text))
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(
                f"line {number} of {path} holds no conversation",
                got=line[:60],
                expected="a JSON object with messages, the last one the assistant's; or prompt_ids and answer_ids",
            ) from error
    return found


def _conversation(entry: Mapping[str, Any], text: Text) -> Conversation:
    if "messages" not in entry:
        prompt, answer = ([int(id) for id in entry[key]] for key in ("prompt_ids", "answer_ids"))
        return Conversation((*prompt, *answer), len(prompt))
    messages = entry["messages"]
    if messages[-1]["role"] != "assistant":
        raise LookupError("assistant")
    prompt, whole = text.chat(messages[:-1]), text.chat(messages, generation=False)
    if whole[: len(prompt)] != prompt:
        raise ValueError("the template does not continue the prompt")
    return Conversation(tuple(whole), len(prompt))


def take_in(
    conversations: Sequence[Conversation],
    store: Store,
    ops: Ops,
    gradients: Gradients,
    batch: Callable[[int], Batch],
    tell: Callable[[int], None],
) -> None:
    """Add those to a store that it does not hold yet; their jobs count down from -1. tell: tokens read so far."""
    new = [(-1 - i, c) for i, c in enumerate(conversations) if -1 - i not in store.jobs and len(c.ids) > c.own > 0]
    new.sort(key=lambda each: len(each[1].ids))
    tokens = 0
    for first in range(0, len(new), GROUP):
        group = new[first : first + GROUP]
        read = [c.ids[:-1] for _, c in group]
        taps = gradients.numpy(batch(len(group)).read(range(len(group)), read).taps)
        for b, (job, conversation) in enumerate(group):
            states = taps[b, : len(read[b])]
            best = np.full(len(read[b]), -1, np.int32)
            best[conversation.own - 1 :] = _likeliest(states[conversation.own - 1 :, -1], ops, gradients)
            store.add(job, conversation.ids, conversation.own, as_stored(states), best)
            tokens += len(read[b])
            tell(tokens)


def _likeliest(features: np.ndarray, ops: Ops, gradients: Gradients) -> np.ndarray:
    """What the target would say after each of these features [n, D]."""
    found: list[int] = []
    for first in range(0, len(features), ROWS):
        logits = gradients.unembed(gradients.array(features[first : first + ROWS].astype(np.float32)))
        found += ops.to_host(ops.xp.argmax(logits, -1))[0]
    return np.asarray(found, np.int32)
