"""Options become settings of the engine, impossible ones end early (cases SMP-09, STP-06, PRF-05)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.fake_engine import FakeEngine


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
        ("--kv-bits", "5"),
        ("--wired-limit", "0"),
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
        ([], None, {}),
        (["--num-draft-tokens", "4 "], None, {"depth": "4"}),
        (["--draft-max", "1000"], None, {"depth": "1000"}),
        (["--num-draft-tokens", "0", "--ngram-max", "3"], "none", {}),
        (
            ["--tree-nodes", "8", "--tree-topk", "3", "--tree-depth", "2"],
            None,
            {"nodes": "8", "topk": "3", "depth": "2"},
        ),
        (["--ngram-min", "2", "--ngram-max", "5", "-o", "depth=6"], None, {"min": "2", "max": "5", "depth": "6"}),
        (["--drafter", "eagle3:org/head", "-o", "a = b=c"], "eagle3:org/head", {"a": "b=c"}),
        (["--draft-model", "small"], "draft_model:small", {}),
        (["--drafter", "draft_model", "--draft-model", "a/b@c:d.gguf"], "draft_model:a/b@c:d.gguf", {}),
        (["--tree-depth", "3", "--num-draft-tokens", "3"], None, {"depth": "3"}),
    ],
)
def test_prf_05_drafter_options(
    run: Callable[..., Any], engine: FakeEngine, args: list[str], drafter: str | None, options: dict[str, str]
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
        (["--verify", "lucky"], "'lucky' is not one of"),
        (["--targett", "x"], "--targett"),
    ],
)
def test_settings_that_contradict(run: Callable[..., Any], args: list[str], message: str) -> None:
    result = run("generate", "hi", *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_all_model_options_reach_the_engine(run: Callable[..., Any], engine: FakeEngine) -> None:
    flags = "--target t --verify block --backend torch --dtype float32 --device cuda:1 --context 99 --kv-bits 4"
    run(
        "generate",
        "hi",
        *flags.split(),
        "--wired-limit",
        "2.5",
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
    assert (loaded.kv_bits, loaded.wired_limit) == (4, 2.5)
    assert loaded.offline
    assert loaded.allow_pickle
    assert loaded.trust_remote_code
    assert engine.requests[0].stop == ("a", "b")
