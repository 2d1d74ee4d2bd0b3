"""Loading and answering with everything a user sees meanwhile; shared by generate and chat."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from speclocal.ui.interrupt import Interrupt
from speclocal.ui.progress import DownloadBar
from speclocal.ui.stream import StreamView
from speclocal.ui.terminal import Spinner, Terminal

if TYPE_CHECKING:
    from speclocal.core.sampling import Sampling
    from speclocal.engine import Answer, Engine, Header, Load, Request


class _Downloads(DownloadBar):
    """The bar of a download takes the place of the spinner."""

    def __init__(self, terminal: Terminal, spinner: Spinner):
        super().__init__(terminal.err.console)
        self._spinner = spinner

    def start(self, description: str, total: int | None) -> None:
        self._spinner.hide()
        super().start(description, total)


def open_engine(terminal: Terminal, settings: Load) -> Engine:
    """Load target and drafter; notices, downloads and progress on stderr."""
    from speclocal import engine

    with terminal.status(f"loading {settings.target}") as spinner:
        bar = None if terminal.quiet else _Downloads(terminal, spinner)
        made = engine.load(settings, notify=terminal.note, progress=bar)
    header = made.header
    terminal.detail(describe(header))
    ends = " ".join(header.end_tokens) or "no token"
    cache = f" in {header.kv_bits} bits" if header.kv_bits else ""
    terminal.detail(f"context {header.context} tokens{cache}, vocabulary {header.vocabulary}, answers end at {ends}")
    return made


def describe(header: Header) -> str:
    """What answers, in one line."""
    commit = re.fullmatch("[0-9a-f]{40}", header.revision or "")
    revision = f" ({header.revision[:12] if commit else header.revision})" if header.revision else ""
    head = f" ({header.head.partition(':')[2]})" if header.head else ""
    caveat = f"; {header.caveat}" if header.caveat else ""
    return (
        f"{header.target}{revision} on {header.backend} ({header.device}, {header.dtype}), "
        f"drafter {header.drafter}{head}, {header.verify} verification{caveat}"
    )


def pick_sampling(engine: Engine, overrides: dict[str, Any]) -> Sampling | None:
    """None, the model's recommendation, unless the user changed some of it."""
    return engine.sampling(overrides) if overrides else None


def respond(
    engine: Engine, request: Request, terminal: Terminal, view: StreamView | None = None, patience: int = 1
) -> Answer:
    """Generate to the end, or to the round in which Ctrl-C was pressed.

    view: where to show it; None for answers that are shown whole, by the caller.
    patience: presses of Ctrl-C that ask; one more leaves at once.
    """
    limit, context = request.max_tokens, engine.header.context
    if limit is not None and limit > context:
        terminal.note(f"--max-tokens {limit} is more than the context holds; the answer may end at {context} tokens")
    with Interrupt(patience) as interrupt:
        with terminal.status("reading the prompt") as spinner:

            def on_prefill(done: int, total: int) -> None:
                interrupt.check()
                spinner.update(f"reading the prompt: {done} of {total} tokens")

            stream = engine.stream(request, on_prefill)
            try:
                step = next(stream, None)
            except KeyboardInterrupt:
                if not interrupt.asked:
                    raise
                step = None
        if view:
            view.begin()
        while step is not None:
            if view:
                view.add(step)
            if interrupt.asked:
                break
            step = next(stream, None)
        answer = stream.answer()
        if view:
            view.finish(answer)
        for notice in answer.notices:
            terminal.note(notice)
        return answer
