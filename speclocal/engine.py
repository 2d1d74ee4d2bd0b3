"""One façade for every front end: a target, a drafter and text, as a stream of rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from speclocal.core.budget import Budget
from speclocal.core.decode import Round, decode
from speclocal.core.interfaces import Drafter, Target
from speclocal.core.prefix import shared_prefix
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.stats import Stats
from speclocal.core.stop import Stop
from speclocal.errors import ContextError, UsageError
from speclocal.sources import Progress
from speclocal.stream import Answer, Piece, Step, Stream
from speclocal.text import Text

__all__ = ["Answer", "Engine", "Header", "Load", "Piece", "Request", "Step", "Stream", "load"]

Messages = Sequence[Mapping[str, str]]
PATIENCE = 8
"""Drafted rounds in a row that accept nothing before drafting pauses for a while."""
JUDGED, FEW = 12, 0.1
"""A head of which, after so many drafted rounds, less than this share had an accepted token is reported as broken."""


@dataclass(frozen=True)
class Load:
    """What to load. Everything has a default; front ends fill it from flags, environment and the user file.

    target:        alias, hub id (`org/name@revision`), local folder, or GGUF file.
    drafter:       `none`, `ngram`, `draft_model`, `scripted`; `eagle3`, `p_eagle`, `eagle`, `medusa`, with a head that
                   the catalogue knows; `method:source` names weights too; `auto`: the best there is for the target.
                   `+ngram` behind a head: lookup where it is sure. None: `draft_model` if one is named, else the
                   head that comes with speclocal for this target, else `ngram`.
    draft_model:   source of the draft model for `draft_model`, like `target`.
    options:       settings of the drafter by name (`-o depth=6`), checked against its own `Settings`.
    verify:        `coupled`, `rejection` or `block`; or `typical`, which is not lossless.
    dtype:         `auto`, `float32`, `bfloat16`, `float16`.
    device:        `auto`, `cpu`, `cuda`, `cuda:1`.
    kv_bits:       4 or 8 bits for the target's keys and values; None: its own numbers. A draft model keeps its own.
    wired_limit:   GiB that MLX keeps macOS from swapping out; None leaves the system's own.
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
    kv_bits: int | None = None
    wired_limit: float | None = None


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
class Header:
    """What is really in use, for headers and JSON.

    head:     the drafter's head as `--drafter` names it, None if it has none.
    lossless: whether the text is the target's own whatever is drafted.
    caveat:   in which way it is not, or not the original model's; "" for none.
    """

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
    kv_bits: int | None = None
    head: str | None = None
    lossless: bool = True
    caveat: str = ""


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
        self._drafted, self._kept, self._told = 0, 0, False  # rounds of the head in use, and whether it was reported

    def set_drafter(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        """Use another drafter from the next generation on. UsageError if it does not fit; then nothing changes."""
        if self._remake is None:
            raise UsageError("this engine was made without a way to load drafters")
        self.drafter, self.header = self._remake(name, options or {})
        self._drafted, self._kept, self._told = 0, 0, False

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
            cached = shared_prefix(self.target.cached, ids[:-1])
            stop = Stop(limit, self.text.end_ids, matches)
            budget = Budget(self.drafter.limit, misses=PATIENCE)
            yield from decode(self.target, self.drafter, sampler, ids, stop, budget, progress)

        return Stream(self.text, ids, sampling, request.stop, start, lambda: cached, self.header.caveat, self._judge)

    def _judge(self, stats: Stats) -> tuple[str, ...]:
        """Say once of a head that hardly anything it drafts is accepted: it fits by its sizes, and reads wrongly."""
        if not self.header.head or self._told or not stats.proposed_at:
            return ()
        self._drafted += stats.proposed_at[0]
        self._kept += stats.accepted_at[0] if stats.accepted_at else 0
        if self._drafted < JUDGED or self._kept >= FEW * self._drafted:
            return ()
        self._told = True
        return (
            f"of {self._drafted} drafts of this head {self._kept} had an accepted token: it may be made for another "
            "target, or read other layers of it (taps) or turn them otherwise (theta, residual, norm_output) than its "
            f"files say; see speclocal doctor --target {self.header.target} --drafter {self.header.head}",
        )


def load(
    settings: Load | None = None,
    notify: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Load target and drafter. `notify` gets one-line notices (fallbacks, mismatches); `progress` sees downloads."""
    from speclocal.assemble import assemble  # it needs this module

    return assemble(settings or Load(), notify or (lambda text: None), progress)
