"""`speclocal chat` through pipes (cases TUI-06, TUI-07, TUI-08)."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speclocal.cli.slash import COMMANDS, HELP, Command, Mistyped, understand
from speclocal.errors import ContextError
from speclocal.ui.prompt import Message, fence_open, open_history, unfence
from tests.cli.fake_engine import FakeEngine, steps

SKY = "The sky is blue because air scatters short waves."
HI = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": SKY}


def talk(run: Callable[..., Any], *lines: str, args: tuple[str, ...] = ()) -> Any:
    return run("chat", *args, input="".join(line + "\n" for line in lines))


def prompts(engine: FakeEngine) -> list[Any]:
    """The messages of every request."""
    return [request.prompt for request in engine.requests]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("/exit", Command("exit", "")),
        ("/quit", Command("exit", "")),
        ("/HELP", Command("help", "")),
        ("/?", Command("help", "")),
        ("/clear", Command("reset", "")),
        ("/system You are\nkind. ", Command("system", "You are\nkind.")),
        ("/save /tmp/x/y.json", Command("save", "/tmp/x/y.json")),
        ("/etc/hosts what is this?", "/etc/hosts what is this?"),
        ("/etc/hosts", "/etc/hosts"),
        ("/exit/now", "/exit/now"),
        ("//comment", "//comment"),
        ("/* C */ int x;", "/* C */ int x;"),
        (" /help", "/help"),
        (" /eixt", "/eixt"),
        ("  /eixt", "  /eixt"),
        ("what is /exit?", "what is /exit?"),
        ("[/INST] [bold]", "[/INST] [bold]"),
    ],
)
def test_tui_07_what_a_line_means(text: str, meaning: Any) -> None:
    assert understand(Message(text)) == meaning


@pytest.mark.parametrize(
    ("text", "near"), [("/eixt", "/exit"), ("/var", ""), ("/sytem be kind", "/system"), ("/", ""), ("/RETYR", "/retry")]
)
def test_tui_07_unknown_words_are_not_sent(text: str, near: str) -> None:
    meaning = understand(Message(text))
    assert isinstance(meaning, Mistyped)
    assert ("did you mean" in meaning.hint) == bool(near)
    assert near in meaning.hint
    assert "a space in front sends it" in meaning.hint


def test_tui_07_fenced_text_is_never_a_command() -> None:
    assert understand(Message("/exit", literal=True)) == "/exit"
    assert understand(Message(" /exit", literal=True)) == " /exit"


def test_every_command_is_explained() -> None:
    for name in COMMANDS:
        assert f"/{name}" in HELP
    for word in ('"""', "Alt-Enter", "Ctrl-C", "stays in the conversation", "space in front"):
        assert word in HELP


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ('"""', True),
        ('"""a', True),
        ('"""a"""', False),
        ('""""""', False),
        ('"""\na\n"""  ', False),
        ("a", False),
        ('""""', True),
    ],
)
def test_fences(text: str, is_open: bool) -> None:
    assert fence_open(text) is is_open


def test_fences_are_taken_off() -> None:
    assert unfence('"""\n  a\n\tb\n"""\n') == Message("  a\n\tb", literal=True)
    assert unfence("  a b \n") == Message("  a b ")
    assert unfence('a\nb\n"""\n', multi=True) == Message("a\nb", literal=True)
    assert unfence('"""\n', multi=True) == Message("", literal=True)


def test_conversation_through_a_pipe(run: Callable[..., Any], engine: FakeEngine) -> None:
    result = talk(run, "hi", "", "and [b]now[/b]?", "/exit", "never read")
    assert result.exit_code == 0
    assert result.stdout == f"{SKY}\n{SKY}\n"
    assert prompts(engine) == [[HI], [HI, ANSWER, {"role": "user", "content": "and [b]now[/b]?"}]]
    assert result.stderr.count("7 tokens ·") == 2


def test_end_of_input_ends(run: Callable[..., Any]) -> None:
    assert talk(run).exit_code == 0


def test_tui_06_fenced_lines_are_one_message(run: Callable[..., Any], engine: FakeEngine) -> None:
    talk(run, '"""', "/exit", "", "\tb", '"""', "/multi", "c", "d", '"""')
    assert [messages[-1]["content"] for messages in prompts(engine)] == ["/exit\n\n\tb", "c\nd"]


def test_undo_retry_reset_system(run: Callable[..., Any], engine: FakeEngine) -> None:
    talk(run, "/system Be kind.", "hi", "/retry", "/retry", "more", "/undo", "again", "/system", "/reset", "hi")
    system = {"role": "system", "content": "Be kind."}
    again = {"role": "user", "content": "again"}
    more = {"role": "user", "content": "more"}
    assert prompts(engine) == [[system, HI]] * 3 + [[system, HI, ANSWER, more], [system, HI, ANSWER, again], [HI]]
    assert [request.sampling and request.sampling.seed for request in engine.requests[:4]] == [None, 1, 2, None]


def test_settings_within_the_session(run: Callable[..., Any], engine: FakeEngine) -> None:
    result = talk(
        run,
        "/set temperature=0.7 top-k=5 max-tokens=9",
        "hi",
        "/set temp=default max_tokens=-1",
        "hi",
        "/set",
        args=("--seed", "3"),
    )
    first, second = (request.sampling for request in engine.requests)
    assert first is not None
    assert second is not None
    assert (first.temperature, first.top_k, first.seed) == (0.7, 5, 3)
    assert (second.temperature, second.top_k, second.seed) == (0.6, 5, 3)
    assert [request.max_tokens for request in engine.requests] == [9, None]
    assert "seed=3, top_k=5, max_tokens=-1; the rest as the model recommends" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperature=hot", "impossible temperature, got 'hot'"),
        ("/set top_p=0", "impossible top_p"),
        ("/set heat=1", "no setting heat, expected one of temperature"),
        ("/set temperature", "a setting is missing"),
        ("/set max_tokens=-2", "impossible max_tokens"),
        ("/undo", "nothing was said yet"),
        ("/retry", "nothing was said yet"),
        ("/stats", "no answer yet"),
        ("/save", "no file named"),
        ("/load /no/such", "no such file or directory: /no/such"),
        ("/drafter warp", "no such drafter"),
        ("/eixt", "no command /eixt (did you mean /exit?)"),
    ],
)
def test_mistakes_in_a_pipe_end_it(run: Callable[..., Any], engine: FakeEngine, line: str, message: str) -> None:
    """Nobody is there to correct them."""
    result = talk(run, line, "hi")
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert engine.requests == []


def test_drafter_and_stats(run: Callable[..., Any], engine: FakeEngine) -> None:
    result = talk(run, "/drafter none depth=3", "/drafter", "hi", "/stats")
    assert engine.drafter_options == {"depth": "3"}
    assert result.stderr.count("drafter none, coupled verification") == 2
    assert result.stderr.count("7 tokens ·") == 2
    assert "acceptance by position: 50%, 0%" in result.stderr


def test_save_and_load(run: Callable[..., Any], engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "sp ace é.json"
    engine.script = steps("é 😀 \x1b[2J")
    talk(run, "/system S", "hi", f"/save {file}")
    assert json.loads(file.read_text(encoding="utf-8"))["messages"][1]["content"] == "é 😀 \x1b[2J"
    assert "😀" in file.read_text(encoding="utf-8"), "files are readable UTF-8"
    talk(run, f"/load {file}", "more")
    assert prompts(engine)[-1] == [
        {"role": "system", "content": "S"},
        HI,
        {"role": "assistant", "content": "é 😀 \x1b[2J"},
        {"role": "user", "content": "more"},
    ]
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"system": 3, "messages": []}',
        '{"system": null, "messages": [{"role": "user"}]}',
        '{"system": null, "messages": [{"role": "user", "content": "a"}]}',
    ],
)
def test_files_that_are_no_conversation(run: Callable[..., Any], tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    result = talk(run, f"/load {file}")
    assert result.exit_code == 2
    assert f"{file} is no" in result.stderr


def test_input_that_is_no_text(run: Callable[..., Any]) -> None:
    result = run("chat", input=b"caf\xe9\n")
    assert result.exit_code == 2
    assert "stdin cannot be read as text" in result.stderr


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp950"])
def test_tui_08_pipes_that_are_not_utf_8(spawn: Callable[..., Any], encoding: str) -> None:
    plan = json.dumps({"texts": ["ok 😀"]})
    done = spawn("chat", input=b"hi\n/help\n/stats\n", FAKE=plan, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"ok ?\n"


def test_history_is_private_and_survives_trouble(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    history = open_history(path)
    history.append_string("héllo\nworld")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(open_history(path).load_history_strings()) == ["héllo\nworld"]
    path.unlink()
    path.mkdir()
    history.append_string("no file any more")
    assert history.get_strings()[-1] == "no file any more"
    assert list(open_history(path).load_history_strings()) == []


def test_a_failure_keeps_the_session_and_the_text(
    run: Callable[..., Any], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTX: a prompt that does not fit; the message can be shortened."""
    from speclocal.cli.chat import Chat
    from speclocal.ui.stream import StreamView
    from speclocal.ui.terminal import Terminal

    class Script:
        editable = True

        def __init__(self) -> None:
            self.drafts: list[str] = []
            self.lines = ["too long", "hi", "/exit"]

        def read(self, default: str = "", multi: bool = False) -> Message:
            self.drafts.append(default)
            return Message(self.lines.pop(0))

    whole = engine.stream

    def stream(request: Any, on_prefill: Any = None) -> Any:
        if request.prompt[-1]["content"] == "too long":
            raise ContextError("the prompt is longer than the context")
        return whole(request, on_prefill)

    monkeypatch.setattr(engine, "stream", stream)
    script = Script()
    terminal = Terminal(plain=True)
    Chat(engine, terminal, StreamView(terminal), script, {}).run()  # type: ignore[arg-type]
    assert script.drafts == ["", "too long", ""]
    assert prompts(engine) == [[HI]]
