"""Which backend is meant, and what is said where its framework is missing."""

from __future__ import annotations

import platform
import sys

import pytest

from speclocal import backends
from speclocal.errors import SpeclocalError, UsageError


@pytest.mark.parametrize(
    ("system", "machine", "installed", "expected"),
    [
        ("darwin", "arm64", ("torch", "transformers", "mlx", "mlx_lm"), "mlx"),
        ("darwin", "arm64", ("torch", "transformers", "mlx"), "torch"),
        ("darwin", "arm64", ("torch", "transformers"), "torch"),
        ("darwin", "x86_64", ("torch", "transformers", "mlx", "mlx_lm"), "torch"),
        ("linux", "x86_64", ("torch", "transformers", "mlx", "mlx_lm"), "torch"),
        ("linux", "arm64", ("torch", "transformers", "mlx", "mlx_lm"), "torch"),
    ],
)
def test_auto(monkeypatch, system, machine, installed, expected):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(backends, "find_spec", lambda name: name if name in installed else None)
    assert backends.choose() == expected


@pytest.mark.parametrize(
    ("name", "installed", "said"),
    [
        ("mlx", (), r"mlx and mlx_lm are not installed; pip install 'speclocal\[mlx\]'"),
        ("mlx", ("mlx",), r"mlx_lm is not installed; pip install 'speclocal\[mlx\]'"),
        ("torch", ("transformers",), "torch is not installed; pip install torch"),
        ("auto", (), "torch and transformers are not installed"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, name, installed, said):
    monkeypatch.setattr(backends, "find_spec", lambda framework: framework if framework in installed else None)
    with pytest.raises(SpeclocalError, match=said) as error:
        backends.load(name)
    assert error.value.exit_code == 1


def test_unknown_backends():
    with pytest.raises(UsageError, match="jax"):
        backends.load("jax")


@pytest.mark.parametrize("name", backends.NAMES)
def test_every_backend_offers_the_same(name):
    if backends.missing(name):
        pytest.skip(f"{name} is not installed")
    module = backends.load(name)
    for function in ("load_target", "on_cpu", "free_memory", "describe"):
        assert callable(getattr(module, function))
    assert isinstance(module.READS_PICKLES, bool)
