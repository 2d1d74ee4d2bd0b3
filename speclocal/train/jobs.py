"""What the target is asked to write: given prompts, or the user turn of its chat template, opened in various ways."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from speclocal.errors import ModelError, UsageError
from speclocal.text import Text

GZIP = b"\x1f\x8b"
"""How packed files begin."""


@dataclass(frozen=True)
class Job:
    """One text to write.

    ids: what it begins with. asks: the target first writes the rest of the question. given: tokens of an opener at the
    end of `ids`, which count as part of the question. turn: how many jobs before it had the same prompt.
    """

    number: int
    ids: tuple[int, ...]
    asks: bool
    given: int = 0
    turn: int = 0


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
        before, after = _common(one, other), _common(one[::-1], other[::-1])
        if not after or before + after >= len(one):
            raise ModelError(
                "the chat template does not show where a question ends and its answer begins",
                do="train on another model of the family, or give --prompts with a template that does",
            )
        return cls(tuple(one[:before]), tuple(one[len(one) - after :]), text.end_ids)

    def question(self, text: Text, content: str) -> tuple[int, ...]:
        """The tokens of a message alone."""
        ids = text.chat([{"role": "user", "content": content}])
        return tuple(ids[len(self.before) : len(ids) - len(self.after)])

    def asked(self, ids: Sequence[int]) -> tuple[int, ...] | None:
        """The message that a conversation of these tokens begins with; None if it is none."""
        first, size = len(self.before), len(self.after)
        if tuple(ids[:first]) != self.before:
            return None
        ends = (i for i in range(first, len(ids) - size + 1) if tuple(ids[i : i + size]) == self.after)
        return next((tuple(ids[first:end]) for end in ends), None)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


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
        yield Job(number, ids[number % len(ids)], asks=False, turn=number // len(ids))


def read_openers(path: Path | None = None) -> list[str]:
    """The openers of a file, or those that come with speclocal."""
    lines = [line for line in read_lines(path or files("speclocal.train") / "openers.txt") if not line.startswith("#")]
    return [line.replace("\\n", "\n") for line in lines] or [""]


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file, packed or not: a line each, or JSON lines with `prompt`, `text`, `instruction` or `turns`."""
    prompts = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        if ".jsonl" not in path.suffixes:
            prompts.append(line)
            continue
        try:
            prompts.append(_prompt(json.loads(line)))
        except (ValueError, LookupError) as error:
            raise UsageError(
                f"line {number} of {path} holds no prompt",
                got=line[:60],
                expected="a JSON object with prompt, text, instruction or turns",
            ) from error
    if not prompts:
        raise UsageError(f"{path} holds no prompts")
    return prompts


def _prompt(entry: Any) -> str:
    held = entry if isinstance(entry, dict) else {}
    turns = held.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    for value in (held.get("prompt"), held.get("text"), held.get("instruction"), first):
        if isinstance(value, str):
            return value
    raise LookupError("prompt")


def read_lines(source: Path | Traversable) -> list[str]:
    """Lines of a file of text, packed with gzip or not. Only line ends part them: JSON may hold other separators."""
    data = source.read_bytes()
    try:
        text = (gzip.decompress(data) if data.startswith(GZIP) else data).decode("utf-8-sig")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{source} cannot be unpacked: {error}", do="fetch or pack it again") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is no text", got=f"byte {error.start + 1}", expected="UTF-8") from error
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
