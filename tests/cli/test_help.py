"""Help, version, completion, settings: the outside of the program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speclocal import __version__
from speclocal.cli import COMMANDS
from tests.cli.fake_engine import FakeEngine

HEAVY = ("torch", "transformers", "mlx", "mlx_lm", "huggingface_hub", "numpy", "accelerate", "safetensors")


def loaded_by(environment: dict[str, str], *args: str) -> set[str]:
    """Which heavy packages a command line loads."""
    code = (
        "import sys\nfrom speclocal.cli import main\n"
        f"try:\n    main({list(args)!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("LOADED")[2].split()) & set(HEAVY)


@pytest.mark.parametrize("args", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_quick(environment: dict[str, str], args: list[str]) -> None:
    assert loaded_by(environment, *args) == set()


def test_wrong_usage_loads_nothing_either(environment: dict[str, str]) -> None:
    code = "import sys\nfrom speclocal.cli import main\ntry:\n    main(['generate', 'x', '--top-p', '7'])\n"
    code += "except SystemExit as end:\n    print(end.code, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    status, *modules = done.stdout.split()
    assert status == "2"
    assert not set(modules) & set(HEAVY)


def test_overview_names_every_command_and_shows_examples(run: Callable[..., Any]) -> None:
    text = run("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in text
    assert 'speclocal generate "Why is the sky blue?"' in text


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_options_come_in_sections_with_defaults(run: Callable[..., Any], name: str) -> None:
    text = run(name, "--help").stdout
    sections = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert [section.partition(" (")[0].rstrip(":") for section in sections] == (
        ["Prompt", "Model", "Drafting", "Sampling", "Output"]
    )
    assert "[default: smollm2-135m]" in " ".join(text.split())
    assert "--num-draft-tokens, --draft-max N" in text
    assert f"speclocal {name}" in text.partition("Prompt:")[0].partition("\n")[2], "examples"
    assert all(len(line) <= 100 for line in text.splitlines())


def test_version(run: Callable[..., Any]) -> None:
    assert run("--version").stdout == f"speclocal {__version__}\n"


def test_no_command_shows_the_overview(run: Callable[..., Any]) -> None:
    result = run()
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: speclocal")
    assert "error" not in result.stderr


def test_unknown_commands_are_one_line(run: Callable[..., Any]) -> None:
    result = run("generat")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: No such command 'generat'")
    assert result.stderr.endswith("; see speclocal --help\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Callable[..., Any], shell: str) -> None:
    script = run("completion", shell).stdout
    assert f"_SPECLOCAL_COMPLETE={shell}_complete" in script
    assert "_speclocal" in script


def test_completion_answers_the_shell(command: list[str], environment: dict[str, str]) -> None:
    env = environment | {"_SPECLOCAL_COMPLETE": "bash_complete", "COMP_WORDS": "speclocal ge", "COMP_CWORD": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "plain,generate\n"


def write_settings(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "XDG_CONFIG_HOME" / "speclocal"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text, encoding="utf-8")


def test_flags_beat_environment_beats_file(
    run: Callable[..., Any], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_settings(tmp_path, 'target = "file"\ndevice = "cpu"\nverify = "block"\n[generate]\ntemperature = 0.25\n')
    monkeypatch.setenv("SPECLOCAL_TARGET", "environment")
    monkeypatch.setenv("SPECLOCAL_DEVICE", "cuda")
    assert run("generate", "hi", "--target", "flag").exit_code == 0
    assert engine.loaded is not None
    assert (engine.loaded.target, engine.loaded.device, engine.loaded.verify) == ("flag", "cuda", "block")
    sampling = engine.requests[0].sampling
    assert sampling is not None
    assert sampling.temperature == 0.25


@pytest.mark.parametrize(
    ("args", "drafter", "options"),
    [
        ([], "eagle3", {"depth": "5", "nodes": "9"}),
        (["--drafter", "ngram"], "ngram", {"depth": "5", "nodes": "9"}),
        (["--draft-model", "small"], "draft_model:small", {"depth": "5", "nodes": "9"}),
        (["--tree-depth", "3"], "eagle3", {"depth": "3", "nodes": "9"}),
        (["-o", "depth=2"], "eagle3", {"depth": "2"}),
    ],
)
def test_flags_do_not_contradict_the_file(
    run: Callable[..., Any], engine: FakeEngine, tmp_path: Path, args: list[str], drafter: str, options: dict[str, str]
) -> None:
    write_settings(tmp_path, 'drafter = "eagle3"\nnum_draft_tokens = 5\noptions = ["nodes=9"]\ntemperature = 1\n')
    assert run("generate", "hi", "--greedy", *args).exit_code == 0
    assert engine.loaded is not None
    assert (engine.loaded.drafter, engine.loaded.options) == (drafter, options)
    assert engine.requests[0].sampling is not None
    assert engine.requests[0].sampling.greedy


def test_a_wrong_settings_file_is_one_line(run: Callable[..., Any], tmp_path: Path) -> None:
    write_settings(tmp_path, "temprature = 1\n")
    result = run("generate", "hi")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: unknown setting")
    assert "perhaps temperature" in result.stderr
    assert result.stderr.count("\n") == 1
