"""A scripted engine for tests of the command line; run as a program it is speclocal with that engine inside."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from speclocal.core.interfaces import Origin
from speclocal.core.sampling import Sampling
from speclocal.core.stats import Seconds, Stats
from speclocal.engine import Answer, Header, Load, Piece, Request, Step, Stream
from speclocal.errors import ModelError, UsageError

ACCEPTED, RECOVERED, BONUS, PLAIN = Origin.ACCEPTED, Origin.RECOVERED, Origin.BONUS, Origin.PLAIN

SKY = (
    Step((Piece("The", PLAIN),), ""),
    Step((Piece(" sky is", ACCEPTED), Piece(" blue", RECOVERED)), " grey today"),
    Step((Piece(" because air", ACCEPTED), Piece(" scatters", BONUS)), ""),
    Step((Piece(" short waves", ACCEPTED), Piece(".", RECOVERED)), ", says\nhe"),
)
HEADER = Header("fake", "0123456789" * 4, "torch", "cpu", "float32", 2048, "ngram", "coupled", ("<end>",), "96", ())


def steps(*texts: str, origin: Origin = ACCEPTED) -> tuple[Step, ...]:
    """One step per text."""
    return tuple(Step((Piece(text, origin),), "") for text in texts)


class FakeStream(Stream):
    """Plays steps; every piece counts as one token."""

    def __init__(self, script: Iterator[Step], request: Request, prompt_ids: Sequence[int], engine: FakeEngine):
        self._script, self._request, self._engine = script, request, engine
        self.prompt_ids = tuple(prompt_ids)
        self._pieces: list[Piece] = []
        self._rejected = 0
        self._rounds = 0
        self._finish = "interrupted"

    def __next__(self) -> Step:
        if self._request.max_tokens == 0:
            self._finish = "length"
            raise StopIteration
        try:
            step = next(self._script)
        except StopIteration:
            self._finish = "stop"
            raise
        self._rounds += 1
        self._rejected += len(step.rejected.split())
        self._pieces += step.pieces
        return step

    def answer(self) -> Answer:
        drafted = [piece for piece in self._pieces if piece.origin is ACCEPTED]
        stats = Stats(
            tokens=len(self._pieces),
            rounds=self._rounds,
            drafted=len(drafted) + self._rejected,
            accepted=len(drafted),
            proposed_at=[2, 1],
            accepted_at=[1],
            seconds=Seconds(0.25, 0.1, 0.8, 0.1) if self._rounds else Seconds(),
        )
        sampling = self._request.sampling
        return Answer(
            text="".join(piece.text for piece in self._pieces),
            token_ids=tuple(range(len(self._pieces))),
            origins=tuple(piece.origin for piece in self._pieces),
            finish_reason=self._finish,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=0,
            stats=stats,
            seed=sampling.seed if sampling else 0,
            caveat=self._engine.header.caveat,
            notices=self._engine.found,
        )


class FakeEngine:
    """Answers every request with the same steps and remembers what it was asked."""

    def __init__(self, script: Sequence[Step] = SKY, header: Header = HEADER, delay: float = 0.0, prefill: float = 0.0):
        self.script, self.header, self.delay, self.prefill = script, header, delay, prefill
        self.requests: list[Request] = []
        self.loaded: Load | None = None
        self.found: tuple[str, ...] = ()

    def load(self, settings: Load, notify: Callable[[str], None] | None = None, **_: Any) -> FakeEngine:
        """Stands in for `speclocal.engine.load`."""
        if settings.target == "missing":
            raise ModelError("no such model", got="'missing'", expected="an alias", do="see `speclocal models`")
        self.loaded = settings
        for notice in self.header.notices:
            if notify:
                notify(notice)
        return self

    def stream(self, request: Request, on_prefill: Callable[[int, int], None] | None = None) -> FakeStream:
        self.requests.append(request)
        return FakeStream(self._play(on_prefill), request, range(4), self)

    def _play(self, on_prefill: Callable[[int, int], None] | None) -> Iterator[Step]:
        for done in range(1, 5):
            time.sleep(self.prefill)
            if on_prefill:
                on_prefill(done, 4)
        for step in self.script:
            time.sleep(self.delay)
            yield step

    def chat_ids(self, messages: Any) -> list[int]:
        return list(range(4))

    def sampling(self, overrides: Mapping[str, Any]) -> Sampling:
        """This model recommends a temperature of 0.6."""
        return Sampling(**{"temperature": 0.6, **overrides})

    def set_drafter(self, name: str, options: Mapping[str, str]) -> None:
        if name not in {"none", "ngram"}:
            raise UsageError("no such drafter", got=repr(name), expected="one of none, ngram")
        self.header = replace(self.header, drafter=name)
        self.drafter_options = dict(options)


def main() -> None:
    """The program. FAKE is a JSON object of texts, and seconds: load, prefill and delay (of each step)."""
    import speclocal.engine
    from speclocal.cli import main as cli

    plan = json.loads(os.environ.get("FAKE", "{}"))
    script = steps(*plan["texts"]) if "texts" in plan else SKY
    fake = FakeEngine(script, delay=plan.get("delay", 0), prefill=plan.get("prefill", 0))

    def load(*args: Any, **kwargs: Any) -> FakeEngine:
        time.sleep(plan.get("load", 0))
        return fake.load(*args, **kwargs)

    speclocal.engine.load = load  # type: ignore[assignment]
    cli(sys.argv[1:])


if __name__ == "__main__":
    main()
