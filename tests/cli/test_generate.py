"""`speclocal generate` (cases TOK-04, CTX-07, PRF-06, TUI-02, TUI-03, TUI-08)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speclocal.core.interfaces import Origin
from tests.cli.fake_engine import HEADER, FakeEngine, steps

SKY = "The sky is blue because air scatters short waves.\n"


def test_answer_on_stdout_all_else_on_stderr(run: Callable[..., Any]) -> None:
    result = run("generate", "hi", "--verbose")
    assert (result.exit_code, result.stdout) == (0, SKY)
    assert "fake (012345678901) on torch (cpu, float32), drafter ngram, coupled verification" in result.stderr
    assert "context 2048 tokens, vocabulary 96, answers end at <end>" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("7 tokens · 7.0 tokens/s · 4 rounds")


def test_quiet_is_silent(run: Callable[..., Any]) -> None:
    assert run("generate", "hi", "--quiet").stderr == ""


def test_tui_03_pipes_get_no_escapes(spawn: Callable[..., Any]) -> None:
    done = spawn("generate", "hi", TERM="xterm-256color", COLORTERM="truecolor")
    assert done.stdout.decode() == SKY
    assert b"\x1b" not in done.stderr


def test_color_can_be_forced_and_forbidden(spawn: Callable[..., Any]) -> None:
    assert b"\x1b[1;" in spawn("generate", "hi", "--color", "always").stdout
    assert b"\x1b" not in spawn("generate", "hi", "--color", "never", FORCE_COLOR="1").stdout


def test_answers_that_end_with_a_line_end_get_no_second_one(run: Callable[..., Any], engine: FakeEngine) -> None:
    engine.script = steps("a\n", "b\n")
    assert run("generate", "hi").stdout == "a\nb\n"


def test_tui_02_pipes_are_safe_unless_asked(run: Callable[..., Any], engine: FakeEngine) -> None:
    engine.script = steps("a\x1b[2J\x9b", "\b\tb")
    assert run("generate", "hi").stdout == "a␛[2J\\x9b␈\tb\n"
    assert run("generate", "hi", "--raw-output").stdout == "a\x1b[2J\x9b\b\tb"


@pytest.mark.parametrize(
    ("args", "stdin", "prompt"),
    [
        (["why?"], "", "why?"),
        ([], "from a pipe\n", "from a pipe"),
        (["-"], "two\nlines\r\n", "two\nlines"),
        (["--file", "-"], "x", "x"),
        (["--raw"], "ends here\n", "ends here\n"),
        (["--raw", ""], "", ""),
        ([], "\ufeffbyte order mark é", "byte order mark é"),
        (["[/INST] [bold]"], "", "[/INST] [bold]"),
    ],
)
def test_where_prompts_come_from(
    run: Callable[..., Any], engine: FakeEngine, args: list[str], stdin: str, prompt: str
) -> None:
    result = run("generate", *args, input=stdin.encode())
    assert result.exit_code == 0
    assert engine.requests[0].prompt == prompt
    assert engine.requests[0].raw == ("--raw" in args)


def test_prompt_from_a_file_with_a_system_message(run: Callable[..., Any], engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Grüße\n".encode())
    assert run("generate", "--file", str(file), "--system", "Be brief.").exit_code == 0
    assert engine.requests[0].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße"},
    ]


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        ([""], b"", "the prompt is empty"),
        ([], b"", "the prompt is empty"),
        ([], b"\n", "the prompt is empty"),
        ([], b"caf\xe9 au lait", "stdin is no text, got byte 3 = 0xe9, expected UTF-8"),
        (["hi", "--file", "-"], b"", "two prompts"),
        (["hi", "--raw", "--system", "x"], b"", "--system needs the chat template"),
        (["--file", "/no/such"], b"", "'/no/such' does not exist"),
    ],
)
def test_ctx_07_prompts_that_cannot_be(
    run: Callable[..., Any], engine: FakeEngine, args: list[str], stdin: bytes, message: str
) -> None:
    result = run("generate", *args, input=stdin)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert engine.loaded is None, "no model may be touched"


def test_no_prompt_at_a_terminal_gives_a_hint(console: Callable[..., Any]) -> None:
    shown = console("generate")
    assert shown.wait() == 2
    assert 'error: no prompt; try: speclocal generate "Why is the sky blue?"' in shown.text


def test_json_object(run: Callable[..., Any]) -> None:
    result = run("generate", "hi", "--json", "--seed", "5")
    made = json.loads(result.stdout)
    assert made["text"] == SKY.strip()
    assert made["finish_reason"] == "stop"
    assert made["usage"] == {"prompt_tokens": 4, "completion_tokens": 7, "cached_tokens": 0}
    assert made["token_ids"] == [token["id"] for token in made["tokens"]]
    assert [token["origin"] for token in made["tokens"]] == (
        ["plain", "accepted", "recovered", "accepted", "bonus", "accepted", "recovered"]
    )
    speculation = made["speculation"]
    assert speculation["active"] is True
    assert (speculation["drafter"], speculation["verify"], speculation["notices"]) == ("ngram", "coupled", [])
    assert (speculation["rounds"], speculation["drafted"], speculation["accepted"]) == (4, 8, 3)
    assert speculation["acceptance_by_position"] == [0.5, 0.0]
    assert made["seed"] == 5
    assert made["model"]["end_tokens"] == ["<end>"]
    assert result.stderr == ""


def test_prf_06_json_says_why_there_was_no_speculation(run: Callable[..., Any], engine: FakeEngine) -> None:
    engine.script = steps("a", origin=Origin.PLAIN)
    for drafter, reason in (("ngram", "the drafter proposed nothing"), ("none", "no drafter")):
        engine.set_drafter(drafter, {})
        speculation = json.loads(run("generate", "hi", "--json").stdout)["speculation"]
        assert speculation["active"] is False
        assert speculation["notices"] == [reason]


def test_tok_04_prompt_ids_can_be_seen(run: Callable[..., Any]) -> None:
    assert run("generate", "hi", "--dump-prompt").stdout == "[0, 1, 2, 3]\n"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp950", "utf-8"])
def test_tui_08_any_console(spawn: Callable[..., Any], encoding: str) -> None:
    plan = json.dumps({"texts": ["ok 😀 ", "é ", "中 ", "\x1b[2J"]})
    done = spawn("generate", "hi", "--verbose", "--show-rejected", FAKE=plan, PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode(encoding).startswith("ok ")
    assert b"Error" not in done.stderr
    if encoding == "ascii":
        assert done.stdout == b"ok ? ? ? \\x1b[2J\n"
        assert b"4 tokens | 4.0 tokens/s" in done.stderr
    done = spawn("generate", "hi", "--json", FAKE=plan, PYTHONIOENCODING=encoding)
    assert json.loads(done.stdout.decode(encoding))["text"] == "ok 😀 é 中 \x1b[2J"


def test_tui_08_lang_c(spawn: Callable[..., Any]) -> None:
    locale = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = spawn("generate", "hi", FAKE=json.dumps({"texts": ["ok 😀"]}), **locale)
    assert done.returncode == 0
    assert done.stdout == b"ok ?\n"


def test_what_is_not_lossless_says_so_everywhere(run: Callable[..., Any], engine: FakeEngine) -> None:
    caveat = "typical acceptance: not lossless"
    engine.header = replace(HEADER, verify="typical", lossless=False, caveat=caveat, head="medusa:org/heads")
    result = run("generate", "hi", "--verify", "typical", "--verbose")
    assert engine.loaded is not None
    assert engine.loaded.verify == "typical"
    first, *_, last = result.stderr.splitlines()
    assert first.endswith(f"drafter ngram (org/heads), typical verification; {caveat}")
    assert caveat in last, "beside the statistics"
    found = json.loads(run("generate", "hi", "--json").stdout)["speculation"]
    assert (found["lossless"], found["caveat"], found["head"]) == (False, caveat, "medusa:org/heads")


def test_what_turned_out_is_said_after_the_answer(run: Callable[..., Any], engine: FakeEngine) -> None:
    engine.found = ("this head accepts nothing",)
    result = run("generate", "hi")
    assert result.stderr.splitlines()[-1] == "note: this head accepts nothing"
    assert "this head accepts nothing" in json.loads(run("generate", "hi", "--json").stdout)["speculation"]["notices"]
