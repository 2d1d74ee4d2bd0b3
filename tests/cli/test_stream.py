"""How answers are drawn (cases TUI-05, UTF-03; zero statistics of CTX-07)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.color import ColorSystem

from speclocal.core.interfaces import Origin
from speclocal.core.stats import Seconds, Stats
from speclocal.engine import Answer, Piece, Request, Step
from speclocal.ui.stream import LOOKS, REJECTED, StreamView, summary
from speclocal.ui.terminal import Terminal
from tests.cli.fake_engine import ACCEPTED, BONUS, PLAIN, RECOVERED, SKY, FakeEngine, steps

SGR = re.compile(r"\x1b\[[\d;]*m")
COLORS = {"TERM": "xterm-256color", "COLORTERM": "truecolor"}


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def play(
    script: tuple[Step, ...] = SKY, environ: dict[str, str] | None = None, rejected: bool = False, **settings: Any
) -> tuple[str, str]:
    """What an answer leaves on stdout and stderr."""
    out, err = settings.pop("out", None) or Tty(newline=""), Tty()
    terminal = Terminal(stdout=out, stderr=err, environ=environ or {}, **settings)
    view = StreamView(terminal, rejected)
    stream = FakeEngine(script).stream(Request("hi"))
    view.begin()
    for step in stream:
        view.add(step)
    view.finish(stream.answer())
    return out.getvalue(), err.getvalue()


def test_every_origin_has_its_own_colour_and_its_own_attributes() -> None:
    """Told apart without colours, and with the 16 colours of a simple terminal."""
    assert set(LOOKS) == set(Origin)
    styles = [look for look in LOOKS.values() if look] + [REJECTED]
    attributes = {(s.bold, s.dim, s.underline, s.strike) for s in styles}
    assert len(attributes) == len(styles)
    assert (None, None, None, None) not in attributes, "no origin with a draft looks like plain text"
    for system in (ColorSystem.STANDARD, ColorSystem.EIGHT_BIT, ColorSystem.TRUECOLOR):
        colors = [look.color.downgrade(system) for look in LOOKS.values() if look and look.color]
        assert len(set(colors)) == len(colors) == 3


def test_pieces_are_drawn_in_the_look_of_their_origin() -> None:
    out, _ = play(environ=COLORS)
    assert SGR.sub("", out) == "The sky is blue because air scatters short waves.\n"
    assert out.startswith("The \x1b[1;38;2;0;158;115msky is\x1b[0m \x1b[4;38;2;213;94;0mblue\x1b[0m")
    assert " \x1b[1;4;38;2;0;114;178mscatters\x1b[0m" in out


def test_line_ends_and_spaces_carry_no_style() -> None:
    out, _ = play((Step((Piece("  a b \n\n  c\n", ACCEPTED),), ""),), environ=COLORS)
    assert re.sub(r"\x1b\[[1-9][\d;]*m", "<", out).replace("\x1b[0m", ">") == "  <a b> \n\n  <c>\n"


def test_rejected_text_is_struck_through_before_its_correction() -> None:
    out, err = play(environ=COLORS, rejected=True)
    assert "is\x1b[0m \x1b[2;9mgrey today\x1b[0m \x1b[4;38;2;213;94;0mblue" in out
    assert "\x1b[2;9mrefused draft\x1b[0m" in err
    assert "\n" not in SGR.sub("", out)[:-1], "a refused line end must not break the line"


@pytest.mark.parametrize(("settings", "environ"), [({"plain": True}, COLORS), ({}, COLORS | {"NO_COLOR": "1"})])
def test_rejected_text_without_colours_stands_in_brackets(settings: dict[str, Any], environ: dict[str, str]) -> None:
    out, err = play(environ=environ, rejected=True, **settings)
    assert out == "The sky is⟦- grey today-⟧ blue because air scatters short waves⟦-, says↵he-⟧.\n"
    assert "⟦-refused draft-⟧" in err


def test_tui_08_rejected_text_in_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    file.isatty = lambda: True  # type: ignore[method-assign]
    terminal = Terminal(plain=True, stdout=file, stderr=io.StringIO(), environ={})
    view = StreamView(terminal, show_rejected=True)
    view.add(SKY[3])
    assert raw.getvalue().decode() == " short waves[-, says\\nhe-]."


def test_rejected_text_never_reaches_a_pipe() -> None:
    out, err = play(rejected=True, out=io.StringIO())
    assert out == "The sky is blue because air scatters short waves.\n"
    assert "--show-rejected has no effect" in err


def test_refused_drafts_without_correction_come_last() -> None:
    out, _ = play((Step((Piece("a", ACCEPTED), Piece("b", BONUS)), "x"),), rejected=True, plain=True)
    assert out == "ab⟦-x-⟧\n"


def test_legend_comes_once() -> None:
    out, err = Tty(), Tty()
    view = StreamView(Terminal(stdout=out, stderr=err, environ=COLORS))
    for _ in range(2):
        view.begin()
        view.add(SKY[1])
    assert err.getvalue().count("drafted and accepted") == 1
    assert "refused" not in err.getvalue()


@pytest.mark.parametrize("settings", [{"plain": True}, {"quiet": True}, {"color": "never"}])
def test_no_legend_without_a_reason(settings: dict[str, Any]) -> None:
    assert "drafted and accepted" not in play(environ=COLORS, **settings)[1]


def test_text_that_is_still_missing_at_the_end_is_shown() -> None:
    """Ctrl-C can come between a round and its drawing."""
    out, err = Tty(), Tty()
    view = StreamView(Terminal(plain=True, stdout=out, stderr=err, environ={}))
    view.begin()
    view.add(SKY[0])
    view.finish(answer(text="The sky", finish="interrupted"))
    assert out.getvalue() == "The sky\n"
    assert err.getvalue().endswith("ended by interrupted\n")


LONG = "".join(f"{i:03} \N{FAMILY} 👩‍👩‍👧 漢字かな한국어 é ệ{' wide' * 20}\n" for i in range(100))


def test_tui_05_finished_text_is_written_once() -> None:
    """Nothing but text and colours leaves us, so no terminal can be made to draw a line twice."""
    script = steps(*(LONG[i : i + 7] for i in range(0, len(LONG), 7)))
    out, _ = play(script, environ=COLORS | {"COLUMNS": "80", "LINES": "10"})
    assert SGR.sub("", out) == LONG


def test_tui_05_a_real_terminal_that_is_resized(console: Callable[..., Any]) -> None:
    plan = {"texts": ["漢字 😀 " * 20] * 10, "delay": 0.03}
    shown = console("generate", "hi", columns=80, lines=10, FAKE=json.dumps(plan))
    for columns in (37, 90, 20):
        shown.expect("漢字")
        shown.resize(columns, 6)
    assert shown.wait() == 0
    assert shown.text.count("漢字 😀 ") == 200
    between = shown.output[shown.output.index("漢") : shown.output.rindex("漢")]
    assert set(re.findall(r"\x1b\[[\d;]*(.)", between)) == {"m"}, "colours only: the cursor is never moved"


@pytest.mark.parametrize("parts", [1, 3])
def test_utf_03_vietnamese_letters_stay_composed(parts: int) -> None:
    text = "Viết ba câu về cà phê sữa đá, tiện lợi ợ ữ ệ. " * 3
    out, _ = play(steps(*(text[i : i + parts] for i in range(0, len(text), parts))), COLORS | {"COLUMNS": "40"})
    assert SGR.sub("", out).encode() == text.encode() + b"\n"


def answer(text: str = "", finish: str = "stop", cached: int = 0, **stats: Any) -> Answer:
    return Answer(text, (), (), finish, 12, cached, Stats(**stats), 0)


def test_summary_says_everything_in_one_line() -> None:
    made = answer(
        cached=8,
        tokens=128,
        rounds=40,
        drafted=120,
        accepted=88,
        seconds=Seconds(0.5, draft=0.2, verify=3.6, other=0.2),
    )
    assert summary(made) == (
        "128 tokens · 32.0 tokens/s · 40 rounds · mean accepted length 3.20 · acceptance 73%"
        " · time draft 5%, verify 90%, other 5% · prompt 12 tokens, 8 cached in 0.50 s"
    )


def test_ctx_07_summary_of_nothing() -> None:
    assert summary(answer(finish="length"), " | ") == (
        "0 tokens | 0.0 tokens/s | 0 rounds | nothing drafted | prompt 12 tokens in 0.00 s | ended by length"
    )


def test_plain_tokens_have_no_style() -> None:
    assert LOOKS[PLAIN] is None
    assert LOOKS[RECOVERED] != LOOKS[BONUS]
