"""`speclocal generate` (cases TOK-04, SMP-09, STP-06, CTX-07, PRF-05, TUI-03, TUI-04, TUI-08 at the command line)."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speclocal.core.interfaces import Origin
from tests.cli.fake_engine import FakeEngine, steps

SKY = "The sky is blue because air scatters short waves.\n"
SLOW = json.dumps({"texts": ["one ", "two ", "three ", "four "], "delay": 0.5})


def test_answer_on_stdout_all_else_on_stderr(run: Callable[..., Any]) -> None:
    result = run("generate", "hi", "--verbose")
    assert (result.exit_code, result.stdout) == (0, SKY)
    assert "fake@0123456789ab on torch (cpu, float32), drafter ngram, coupled verification" in result.stderr
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


def test_json_object(run: Callable[..., Any], engine: FakeEngine) -> None:
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


def test_json_says_why_there_was_no_speculation(run: Callable[..., Any], engine: FakeEngine) -> None:
    """PRF-06"""
    engine.set_drafter("none", {})
    engine.script = steps("a", origin=Origin.PLAIN)
    made = json.loads(run("generate", "hi", "--json").stdout)
    assert made["speculation"]["active"] is False
    assert made["speculation"]["notices"] == ["no drafter"]


def test_tok_04_prompt_ids_can_be_seen(run: Callable[..., Any]) -> None:
    assert run("generate", "hi", "--dump-prompt").stdout == "[0, 1, 2, 3]\n"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "-3"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--temp", "hot"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--top-k", "-5"),
        ("--top-k", "2.5"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "inf"),
        ("--frequency-penalty", "x"),
        ("--min-tokens", "-1"),
        ("--seed", "-1"),
        ("--seed", str(2**64)),
        ("--logit-bias", "7=nan"),
        ("--logit-bias", "x=1"),
        ("--logit-bias", "7"),
        ("--max-tokens", "ten"),
        ("--max-tokens", "-2"),
        ("--num-draft-tokens", "-1"),
        ("--num-draft-tokens", "1.9"),
        ("--context", "0"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_smp_09_stp_06_prf_05_impossible_values(
    run: Callable[..., Any], engine: FakeEngine, command: str, option: str, value: str
) -> None:
    result = run(command, f"{option}={value}", input="hi")
    assert result.exit_code == 2
    assert option in result.stderr
    assert value.split("=")[0] in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert engine.loaded is None, "no model may be touched"


@pytest.mark.parametrize("value", ["0", "0.0", "-0.0"])
def test_smp_09_edges_are_possible(run: Callable[..., Any], engine: FakeEngine, value: str) -> None:
    args = ["--temperature", value, "--top-p", "1", "--top-k", "0", "--min-p", "0", "--logit-bias", "7=-100"]
    assert run("generate", "hi", *args).exit_code == 0
    sampling = engine.requests[0].sampling
    assert sampling is not None
    assert sampling.greedy
    assert sampling.logit_bias == {7: -100}


def test_without_flags_the_model_decides(run: Callable[..., Any], engine: FakeEngine) -> None:
    run("generate", "hi")
    assert engine.requests[0].sampling is None


def test_a_flag_changes_one_field_of_what_the_model_recommends(run: Callable[..., Any], engine: FakeEngine) -> None:
    run("generate", "hi", "--top-k", "40")
    run("generate", "hi", "--greedy")
    first, second = (request.sampling for request in engine.requests)
    assert first is not None
    assert second is not None
    assert (first.temperature, first.top_k) == (0.6, 40)
    assert second.greedy


def test_greedy_and_temperature_contradict(run: Callable[..., Any]) -> None:
    assert run("generate", "hi", "--greedy", "--temperature", "0").exit_code == 0
    result = run("generate", "hi", "--greedy", "--temperature", "1")
    assert result.exit_code == 2
    assert "--greedy contradicts --temperature" in result.stderr


@pytest.mark.parametrize(("value", "limit"), [("-1", None), ("1", 1), ("0", 0), ("1000000000", 10**9)])
def test_stp_06_limits(run: Callable[..., Any], engine: FakeEngine, value: str, limit: int | None) -> None:
    result = run("generate", "hi", "--max-tokens", value)
    assert result.exit_code == 0
    assert engine.requests[0].max_tokens == limit
    assert ("the answer may end at 2048 tokens" in result.stderr) == (limit == 10**9)
    if limit == 0:
        assert result.stdout == ""
        assert result.stderr.startswith("0 tokens")
        assert result.stderr.endswith("ended by length\n")


@pytest.mark.parametrize(
    ("args", "drafter", "options"),
    [
        ([], "ngram", {}),
        (["--num-draft-tokens", "4 "], "ngram", {"depth": "4"}),
        (["--draft-max", "1000"], "ngram", {"depth": "1000"}),
        (["--num-draft-tokens", "0", "--ngram-max", "3"], "none", {}),
        (
            ["--tree-nodes", "8", "--tree-topk", "3", "--tree-depth", "2"],
            "ngram",
            {"nodes": "8", "topk": "3", "depth": "2"},
        ),
        (["--ngram-min", "2", "--ngram-max", "5", "-o", "depth=6"], "ngram", {"min": "2", "max": "5", "depth": "6"}),
        (["--drafter", "eagle3:org/head", "-o", "a = b=c"], "eagle3:org/head", {"a": "b=c"}),
        (["--draft-model", "small"], "draft_model:small", {}),
        (["--drafter", "draft_model", "--draft-model", "a/b@c:d.gguf"], "draft_model:a/b@c:d.gguf", {}),
        (["--tree-depth", "3", "--num-draft-tokens", "3"], "ngram", {"depth": "3"}),
    ],
)
def test_prf_05_drafter_options(
    run: Callable[..., Any], engine: FakeEngine, args: list[str], drafter: str, options: dict[str, str]
) -> None:
    assert run("generate", "hi", *args).exit_code == 0
    assert engine.loaded is not None
    assert (engine.loaded.drafter, engine.loaded.options) == (drafter, options)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tree-depth", "3", "--num-draft-tokens", "4"], "two values for the drafter's depth"),
        (["-o", "max=3", "--ngram-max", "4"], "two values for the drafter's max, got 3 and 4 (--ngram-max)"),
        (["-o", "depth"], "expected key=value"),
        (["--drafter", "ngram", "--draft-model", "small"], "--draft-model without effect"),
        (["--verify", "typical"], "'typical' is not one of"),
        (["--targett", "x"], "--targett"),
    ],
)
def test_settings_that_contradict(run: Callable[..., Any], args: list[str], message: str) -> None:
    result = run("generate", "hi", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_all_model_options_reach_the_engine(run: Callable[..., Any], engine: FakeEngine) -> None:
    flags = "--target t --verify block --backend torch --dtype float32 --device cuda:1 --context 99"
    run(
        "generate",
        "hi",
        *flags.split(),
        "--offline",
        "--allow-pickle",
        "--trust-remote-code",
        "--stop",
        "a",
        "--stop",
        "b",
    )
    loaded = engine.loaded
    assert loaded is not None
    assert (loaded.target, loaded.verify, loaded.backend, loaded.dtype) == ("t", "block", "torch", "float32")
    assert (loaded.device, loaded.context) == ("cuda:1", 99)
    assert loaded.offline
    assert loaded.allow_pickle
    assert loaded.trust_remote_code
    assert engine.requests[0].stop == ("a", "b")


def test_failures_are_one_line_without_traceback(run: Callable[..., Any]) -> None:
    result = run("generate", "hi", "--target", "missing")
    assert result.exit_code == 1
    assert result.stderr == "error: no such model, got 'missing', expected an alias; see `speclocal models`\n"


@pytest.mark.parametrize("args", [["--debug", "generate", "hi"], ["generate", "hi", "--debug"]])
def test_debug_shows_the_traceback(spawn: Callable[..., Any], args: list[str]) -> None:
    done = spawn(*args, "--target", "missing")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"ModelError" in spawn("generate", "hi", "--target", "missing", SPECLOCAL_DEBUG="1").stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "error: out of memory; take a smaller model"),
        (
            OSError(errno.ENOSPC, "No space left on device", "/cache/x"),
            "error: no space left on device: /cache/x; free",
        ),
    ],
)
def test_machine_failures_are_one_line(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: BaseException, message: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("speclocal.engine.load", fail)
    result = run("generate", "hi")
    assert result.exit_code == 1
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(command: list[str], environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, "generate", "hi"], env=environment, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stderr == b"error: no space left on device; free some space and start again\n"


def test_a_reader_that_leaves_is_no_failure_to_talk_about(command: list[str], environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [*command, "generate", "hi", "--quiet"],
        env=environment | {"FAKE": json.dumps({"texts": ["x" * 1000] * 20, "delay": 0.05})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) != 0


def interrupted(command: list[str], environment: dict[str, str], *args: str, presses: int = 1) -> tuple[int, str, str]:
    """Run with a slow engine and press Ctrl-C while it waits for its third step."""
    process = subprocess.Popen(
        [*command, "generate", "hi", "--verbose", *args],
        env=environment | {"FAKE": SLOW},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(2):
        process.stderr.readline()  # what --verbose says once the model is loaded
    first = b""
    if "--json" in args:
        time.sleep(1.25)
    else:
        first = process.stdout.read(len("one two "))
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    out, err = process.communicate(timeout=30)
    return process.returncode, (first + out).decode(), err.decode()


def test_tui_04_ctrl_c_keeps_what_there_is(command: list[str], environment: dict[str, str]) -> None:
    code, out, err = interrupted(command, environment)
    assert code == 130
    assert out == "one two three \n"
    assert err.startswith("3 tokens")
    assert err.endswith("ended by interrupted\n")


def test_tui_04_ctrl_c_twice_leaves_at_once(command: list[str], environment: dict[str, str]) -> None:
    code, out, err = interrupted(command, environment, presses=2)
    assert (code, out.strip(), err.strip()) == (130, "one two", "")


def test_tui_04_ctrl_c_in_prompt_work(console: Callable[..., Any]) -> None:
    shown = console("generate", "hi", FAKE='{"prefill": 0.4}')
    shown.expect("reading the prompt: 1 of 4")
    shown.send("\x03")
    assert shown.wait() == 130
    assert "0 tokens" in shown.text
    assert "The sky" not in shown.text
    assert "Traceback" not in shown.text
    assert shown.output.rindex("\x1b[?25h") > shown.output.rindex("\x1b[?25l"), "the cursor is visible again"


def test_json_of_an_interrupted_answer(command: list[str], environment: dict[str, str]) -> None:
    code, out, _ = interrupted(command, environment, "--json")
    made = json.loads(out)
    assert code == 130
    assert made["finish_reason"] == "interrupted"
    assert len(made["token_ids"]) == 3
    assert made["usage"]["completion_tokens"] == len(made["token_ids"])


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
    assert (
        json.loads(spawn("generate", "hi", "--json", FAKE=plan, PYTHONIOENCODING=encoding).stdout.decode(encoding))[
            "text"
        ]
        == "ok 😀 é 中 \x1b[2J"
    )


def test_tui_08_lang_c(spawn: Callable[..., Any]) -> None:
    done = spawn(
        "generate",
        "hi",
        FAKE=json.dumps({"texts": ["ok 😀"]}),
        LANG="C",
        LC_ALL="C",
        PYTHONUTF8="0",
        PYTHONCOERCECLOCALE="0",
    )
    assert done.returncode == 0
    assert done.stdout == b"ok ?\n"
