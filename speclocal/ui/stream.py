"""Draws an answer while it is made: each token in the look of its origin, written once and never redrawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style

from speclocal.core.interfaces import Origin
from speclocal.ui.terminal import Terminal

if TYPE_CHECKING:
    from speclocal.engine import Answer, Step

# Okabe and Ito's palette, which stays apart for colour-blind eyes, in hues that read on black and on white. Weight and
# underline differ as well, so that no origin is told by colour alone.
LOOKS: dict[Origin, Style | None] = {
    Origin.ACCEPTED: Style(color="#009e73", bold=True),
    Origin.RECOVERED: Style(color="#d55e00", underline=True),
    Origin.BONUS: Style(color="#0072b2", bold=True, underline=True),
    Origin.PLAIN: None,
}
REJECTED = Style(dim=True, strike=True)
LEGEND = {
    Origin.ACCEPTED: "drafted and accepted",
    Origin.RECOVERED: "correction",
    Origin.BONUS: "bonus",
    Origin.PLAIN: "no draft",
}


class StreamView:
    """Shows steps as they come. One view serves a session, so that the legend appears once."""

    def __init__(self, terminal: Terminal, show_rejected: bool = False):
        self._terminal = terminal
        self._show_rejected = show_rejected and (terminal.out.tty or terminal.styled)
        self._legend_due = (terminal.styled and terminal.err.color) or (self._show_rejected and not terminal.styled)
        self._shown = ""
        if show_rejected and not self._show_rejected:
            terminal.note("--show-rejected has no effect: stdout is not a terminal and holds only the answer")

    def begin(self) -> None:
        """A new answer starts."""
        self._shown = ""
        if self._legend_due:
            self._legend_due = False
            self._terminal.remark(*self._legend())

    def add(self, step: Step) -> None:
        """Append what one round added. Refused drafts stand before the token that replaced them."""
        rejected = step.rejected if self._show_rejected else ""
        for piece in step.pieces:
            if rejected and piece.origin is Origin.RECOVERED:
                self._reject(rejected)
                rejected = ""
            self._terminal.answer(piece.text, LOOKS[piece.origin])
            self._shown += piece.text
        if rejected:
            self._reject(rejected)

    def finish(self, answer: Answer) -> None:
        """The answer is over, whole or interrupted: show what is still missing, and the statistics."""
        if answer.text.startswith(self._shown):
            self._terminal.answer(answer.text[len(self._shown) :])
        self._terminal.end_answer()
        self._terminal.statistics(summary(answer, self._terminal.err.pick(" · ", " | ")))

    def _reject(self, text: str) -> None:
        self._terminal.aside(self._struck(text.replace("\n", self._terminal.out.pick("↵", "\\n"))), REJECTED)

    def _struck(self, text: str) -> str:
        """Brackets where there is no style to tell refused text by."""
        return text if self._terminal.styled else self._terminal.out.pick(f"⟦-{text}-⟧", f"[-{text}-]")

    def _legend(self) -> list[tuple[str, Style | None]]:
        refused = (self._struck("refused draft"), REJECTED)
        if not self._terminal.styled:
            return [refused]
        gap: tuple[str, Style | None] = ("  ", None)
        parts: list[tuple[str, Style | None]] = []
        for origin, label in LEGEND.items():
            parts += [(label, LOOKS[origin]), gap]
        return [*parts, refused] if self._show_rejected else parts[:-1]


def summary(answer: Answer, separator: str = " · ") -> str:
    """The statistics of an answer in one line."""
    stats, seconds = answer.stats, answer.stats.seconds
    parts = [f"{stats.tokens} tokens", f"{stats.tokens_per_second:.1f} tokens/s", f"{stats.rounds} rounds"]
    if stats.rounds:
        parts.append(f"mean accepted length {stats.mean_accepted_length:.2f}")
    parts.append(f"acceptance {stats.acceptance:.0%}" if stats.drafted else "nothing drafted")
    if seconds.decode > 0:
        shares = {"draft": seconds.draft, "verify": seconds.verify, "other": seconds.other}
        parts.append("time " + ", ".join(f"{name} {value / seconds.decode:.0%}" for name, value in shares.items()))
    cached = f", {answer.cached_tokens} cached" if answer.cached_tokens else ""
    parts.append(f"prompt {answer.prompt_tokens} tokens{cached} in {seconds.prefill:.2f} s")
    if answer.caveat:
        parts.append(answer.caveat)
    if answer.finish_reason != "stop":
        parts.append(f"ended by {answer.finish_reason}")
    return separator.join(parts)
