"""One façade for every front end: a target, a drafter and text, as a stream of rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from speclocal.core.budget import Budget
from speclocal.core.decode import Round, decode
from speclocal.core.interfaces import Drafter, Origin, Target
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.stats import Stats
from speclocal.core.stop import Stop
from speclocal.errors import ContextError, UsageError
from speclocal.sources import Progress
from speclocal.text import StopStrings, Text

Messages = Sequence[Mapping[str, str]]
PATIENCE = 8
"""Drafted rounds in a row that accept nothing before drafting pauses for a while."""


@dataclass(frozen=True)
class Load:
    """What to load. Everything has a default; front ends fill it from flags, environment and the user file.

    target:        alias, hub id (`org/name@revision`), local folder, or GGUF file.
    drafter:       `none`, `ngram`, `draft_model`, `scripted`; `method:source` names weights too. None: `draft_model` if
                   one is named, else `ngram`.
    draft_model:   source of the draft model for `draft_model`, like `target`.
    options:       settings of the drafter by name (`-o depth=6`), checked against its own `Settings`.
    verify:        `coupled`, `rejection` or `block`.
    dtype:         `auto`, `float32`, `bfloat16`, `float16`.
    device:        `auto`, `cpu`, `cuda`, `cuda:1`.
    """

    target: str = "smollm2-135m"
    drafter: str | None = None
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


@dataclass(frozen=True)
class Header:
    """What is really in use, for headers and JSON."""

    target: str
    revision: str | None
    backend: str
    device: str
    dtype: str
    context: int
    drafter: str
    verify: str
    end_tokens: tuple[str, ...]
    vocabulary: str
    notices: tuple[str, ...]


class Stream(Iterator[Step]):
    """One generation. Iterate to get steps as rounds end; `answer()` is valid at any time, also after an interrupt."""

    def __init__(
        self,
        text: Text,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        stops: Sequence[str],
        start: Callable[[Callable[[int], bool]], Iterator[Round]],
        cached: Callable[[], int],
    ):
        self.prompt_ids = tuple(prompt_ids)
        self._text, self._sampling, self._cached = text, sampling, cached
        self._detokenizer, self._stops = text.detokenizer(), StopStrings(stops)
        self._rounds = start(self._push)
        self._stats = Stats()
        self._finish = "interrupted"
        self._ids: list[int] = []
        self._origins: list[Origin] = []
        self._spans: list[int] = []
        self._shown = ""
        self._length = 0
        self._stopped = False
        self._texts: list[str] = []
        self._ready = ""
        self._waiting: deque[tuple[str, Origin]] = deque()

    def _push(self, token: int) -> bool:
        """Told every emitted token by the loop; True once the text holds a stop string."""
        self._spans.append(self._length)
        text = self._detokenizer.push(token)
        self._length += len(text)
        self._texts.append(text)
        safe, self._stopped = self._stops.push(text)
        self._ready += safe
        return self._stopped

    def __next__(self) -> Step:
        round = next(self._rounds, None)
        if round is None:
            if not self._stats.rounds:
                self._finish = "length"
            raise StopIteration
        self._stats.add(round)
        self._ids.extend(round.tokens)
        self._origins.extend(round.origins)
        self._waiting.extend(zip(self._texts, round.origins, strict=True))
        self._texts.clear()
        if round.finish:
            self._end(round.finish)
        return Step(self._release(), self._rejected(round))

    def _end(self, finish: str) -> None:
        self._finish = finish
        if self._stopped:
            # Tokens that only spell the stop string are no part of the answer.
            kept = len(self._shown) + len(self._ready)
            while self._ids and self._spans[-1] >= kept:
                for column in (self._ids, self._origins, self._spans):
                    column.pop()
            self._stats.tokens = len(self._ids)
            return
        rest = self._detokenizer.flush()
        if rest:
            self._waiting.append((rest, self._origins[-1]))
        self._ready += self._stops.push(rest)[0] + self._stops.flush()

    def _release(self) -> tuple[Piece, ...]:
        """Text that may be shown now, cut where the origin changes."""
        pieces: list[Piece] = []
        ready, self._ready = self._ready, ""
        self._shown += ready
        while ready:
            text, origin = self._waiting.popleft()
            taken, left = text[: len(ready)], text[len(ready) :]
            ready = ready[len(taken) :]
            if left:
                self._waiting.appendleft((left, origin))
            if pieces and pieces[-1].origin == origin:
                pieces[-1] = Piece(pieces[-1].text + taken, origin)
            elif taken:
                pieces.append(Piece(taken, origin))
        return tuple(pieces)

    def _rejected(self, round: Round) -> str:
        """The drafted text the target refused: the first refused branch."""
        node, tokens = round.path[-1] if round.path else 0, []
        while round.tree.children[node]:
            node = round.tree.children[node][0]
            tokens.append(round.tree.tokens[node])
        return self._text.decode(tokens) if tokens else ""

    def answer(self) -> Answer:
        """The answer so far."""
        return Answer(
            # What was held back, in case it began a stop string, belongs to an answer that was cut short.
            text=self._text.decode(self._ids) if self._finish == "interrupted" else self._shown,
            token_ids=tuple(self._ids),
            origins=tuple(self._origins),
            finish_reason=self._finish,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self._cached(),
            stats=self._stats,
            seed=self._sampling.seed,
        )


class Engine:
    """A loaded target with its drafter. One generation at a time; the cache is reused between generations."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        text: Text,
        header: Header,
        remake: Callable[[str, Mapping[str, Any]], tuple[Drafter, Header]] | None = None,
    ):
        self.target, self.drafter, self.text, self.header = target, drafter, text, header
        self._remake = remake
        self._unknown = text.unknown(target.vocab)

    def set_drafter(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Use another drafter from the next generation on. UsageError if it does not fit; then nothing changes."""
        if self._remake is None:
            raise UsageError("this engine was made without a way to load drafters")
        self.drafter, self.header = self._remake(name, options or {})

    def sampling(self, overrides: Mapping[str, Any]) -> Sampling:
        """The model's recommended settings with some replaced. Greedy where the model recommends nothing."""
        known = {f.name for f in fields(Sampling)}
        recommended = {name: value for name, value in self.text.recommended.items() if name in known}
        return Sampling(**{**recommended, **overrides})

    def chat_ids(self, messages: Messages) -> list[int]:
        """Prompt ids of a conversation, made with the target's own template."""
        return self.text.chat(messages)

    def prompt_ids(self, request: Request) -> list[int]:
        """Ids of a request's prompt; UsageError if there are none."""
        prompt = request.prompt
        if isinstance(prompt, str):
            if request.raw or (prompt and not self.text.has_template):
                ids = self.text.encode(prompt) or [i for i in [self.text.start_id] if i is not None]
            elif prompt:
                ids = self.chat_ids([{"role": "user", "content": prompt}])
            else:
                ids = []
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self.chat_ids(prompt)  # type: ignore[arg-type]
        else:
            ids = list(prompt)  # type: ignore[arg-type]
        if not ids:
            raise UsageError("the prompt is empty", expected="some text")
        if any(not 0 <= i < self.target.vocab for i in ids):
            raise UsageError("a prompt id is outside the vocabulary", expected=f"ids below {self.target.vocab}")
        return ids

    def stream(self, request: Request, on_prefill: Callable[[int, int], None] | None = None) -> Stream:
        """Start a generation. `on_prefill(done, total)` reports prompt tokens.

        Raises UsageError for an empty prompt, ContextError for one that does not fit; both before any model work.
        """
        if request.max_tokens is not None and request.max_tokens < 0:
            raise UsageError("impossible max_tokens", got=request.max_tokens, expected="0 or more")
        ids = self.prompt_ids(request)
        room = self.target.context - len(ids)
        if room < 1:
            raise ContextError(
                "the prompt is longer than the context",
                got=f"{len(ids)} tokens",
                expected=f"at most {self.target.context - 1} (a context of {self.target.context} with room to answer)",
                do="shorten the prompt; nothing is cut silently",
            )
        limit = room if request.max_tokens is None else min(request.max_tokens, room)
        sampling = request.sampling or self.sampling({})
        sampler = Sampler(
            self.target.ops,
            sampling,
            self.target.vocab,
            ids,
            unknown=self._unknown,
            end_ids=self.text.end_ids,
            rule=self.header.verify,
        )
        cached = 0

        def progress(done: int) -> None:
            if on_prefill:
                on_prefill(done, len(ids) - 1)

        def start(matches: Callable[[int], bool]) -> Iterator[Round]:
            nonlocal cached
            for a, b in zip(self.target.cached, ids[:-1], strict=False):
                if a != b:
                    break
                cached += 1
            stop = Stop(limit, self.text.end_ids, matches)
            budget = Budget(self.drafter.limit, misses=PATIENCE)
            yield from decode(self.target, self.drafter, sampler, ids, stop, budget, progress)

        return Stream(self.text, ids, sampling, request.stop, start, lambda: cached)


def load(
    settings: Load | None = None,
    notify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Load target and drafter. `notify` gets one-line notices (fallbacks, mismatches); `progress` sees downloads."""
    from speclocal.assemble import assemble  # it needs this module

    return assemble(settings or Load(), notify or (lambda text: None), progress)
