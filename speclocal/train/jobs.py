"""What the target is asked to write: given prompts, or the user turn of its chat template, opened in various ways."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import count
from pathlib import Path
from random import Random

from speclocal.errors import UsageError
from speclocal.text import Text


@dataclass(frozen=True)
class Job:
    """One text to write.

    ids: what it begins with. asks: the target first writes the rest of the question. given: tokens of an opener at the
    end of `ids`, which count as part of the question.
    """

    number: int
    ids: tuple[int, ...]
    asks: bool
    given: int = 0


@dataclass(frozen=True)
class Turns:
    """The chat template around a user's message: tokens before it, after it up to the answer, and those that end."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, text: Text) -> Turns:
        """Found by comparing two conversations; ModelError without a template."""
        one, other = (text.chat([{"role": "user", "content": content}]) for content in ("one", "Seven"))
        before = next(i for i in range(len(one)) if one[i] != other[i])
        after = next(i for i in range(1, len(one)) if one[-i] != other[-i]) - 1
        return cls(tuple(one[:before]), tuple(one[len(one) - after :]), text.end_ids)

    def question(self, text: Text, content: str) -> tuple[int, ...]:
        """The tokens of a message alone."""
        ids = text.chat([{"role": "user", "content": content}])
        return tuple(ids[len(self.before) : len(ids) - len(self.after)])


def own_questions(text: Text, turns: Turns, openers: Sequence[str], seed: int) -> Iterator[Job]:
    """Without end: the target writes its own questions, after the openers in an order that the seed decides."""
    rank = Random(seed)
    opened = [turns.question(text, opener) if opener else () for opener in openers]
    order: list[int] = []
    for number in count():
        if not order:
            order = list(range(len(opened)))
            rank.shuffle(order)
        given = opened[order.pop()]
        yield Job(number, turns.before + given, asks=True, given=len(given))


def given_prompts(text: Text, prompts: Sequence[str], turns: int) -> Iterator[Job]:
    """Each prompt so many times."""
    ids = [tuple(text.chat([{"role": "user", "content": prompt}])) for prompt in prompts]
    for number in range(turns * len(ids)):
        yield Job(number, ids[number % len(ids)], asks=False)


def read_openers(path: Path | None = None) -> list[str]:
    """The openers of a file, or those that come with speclocal."""
    source = path or files("speclocal.train") / "openers.txt"
    lines = [line for line in source.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [line.replace("\\n", "\n") for line in lines] or [""]


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a line each, or JSON lines with `prompt`, `text`, `instruction` or `turns`."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            prompts.append(line)
            continue
        try:
            prompts.append(_prompt(json.loads(line)))
        except (ValueError, LookupError, TypeError) as error:
            raise UsageError(
                f"line {number} of {path} holds no prompt",
                got=line[:60],
                expected="a JSON object with prompt, text, instruction or turns",
            ) from error
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return prompts


def _prompt(entry: dict[str, object]) -> str:
    for key in ("prompt", "text", "instruction"):
        if isinstance(value := entry.get(key), str):
            return value
    turns = entry["turns"]
    if isinstance(turns, list) and isinstance(turns[0], str):
        return turns[0]
    raise LookupError("turns")
