"""One façade for every front end: a target, a drafter and text, as a stream of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from speclocal.core.interfaces import Origin
from speclocal.core.sampling import Sampling
from speclocal.core.stats import Stats

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Load:
    """What to load. Everything has a default; front ends fill it from flags, environment and the user file.

    target:        alias, hub id (`org/name@revision`), local folder, or GGUF file.
    drafter:       `none`, `ngram`, `draft_model`, `scripted`; `method:source` names weights too.
    draft_model:   source of the draft model for `draft_model`, like `target`.
    options:       settings of the drafter by name (`-o depth=6`), checked against its own `Settings`.
    verify:        `coupled`, `rejection` or `block`.
    dtype:         `auto`, `float32`, `bfloat16`, `float16`.
    device:        `auto`, `cpu`, `cuda`, `cuda:1`.
    """

    target: str = "smollm2-135m"
    drafter: str = "ngram"
    draft_model: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    verify: str = "coupled"
    backend: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    offline: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False
    context: int | None = None


@dataclass(frozen=True)
class Request:
    """What to generate.

    prompt:     text, chat messages (`[{"role": "user", "content": "..."}]`), or token ids.
    raw:        a text prompt is continued as it is; otherwise it becomes one user message of the chat template.
    sampling:   None: the model's own recommended settings.
    max_tokens: None: until the context is full.
    """

    prompt: str | Messages | Sequence[int]
    raw: bool = False
    sampling: Sampling | None = None
    max_tokens: int | None = 512
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """Text that became visible, all of one origin."""

    text: str
    origin: Origin


@dataclass(frozen=True)
class Step:
    """What one round adds to the screen. `rejected` is the drafted text the target refused, "" if none."""

    pieces: tuple[Piece, ...]
    rejected: str


@dataclass(frozen=True)
class Answer:
    """A finished (or interrupted) generation; `text`, `token_ids`, `origins` and the counts agree.

    finish_reason: `stop`, `length` or `interrupted`.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    stats: Stats
    seed: int


class Stream(Iterator[Step]):
    """Iterate to get steps as rounds end; `answer()` is valid at any time, also after an interrupt."""

    prompt_ids: tuple[int, ...]

    def answer(self) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True)
class Header:
    """What is really in use, for headers and JSON: printed by `--verbose` and `doctor`."""

    target: str
    revision: str | None
    backend: str
    device: str
    dtype: str
    context: int
    drafter: str
    verify: str
    end_tokens: tuple[str, ...]
    notices: tuple[str, ...]


class Engine:
    """A loaded target with its drafter. One generation at a time; the cache is reused between generations."""

    header: Header

    def stream(self, request: Request, on_prefill: Callable[[int, int], None] | None = None) -> Stream:
        """Start a generation. `on_prefill(done, total)` reports prompt tokens.

        Raises UsageError for an empty prompt, ContextError for one that does not fit; both before any model work.
        """
        raise NotImplementedError

    def chat_ids(self, messages: Messages) -> list[int]:
        """Prompt ids of a conversation, made with the target's own template."""
        raise NotImplementedError


def load(settings: Load, notify: Callable[[str], None] | None = None, **_: Any) -> Engine:
    """Load target and drafter. `notify` gets one-line notices (fallbacks, mismatches)."""
    raise NotImplementedError
