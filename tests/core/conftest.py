"""A model hub on this machine, and caches of the test's own."""

from __future__ import annotations

import socket
import subprocess

import pytest

from tests.core.mock_hub import Hub, Repository, sharded


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Caches in a folder of the test, no token, and no way to the real hub."""
    import huggingface_hub
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "SPECLOCAL_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SPECLOCAL_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # so that small files come in parts
    _point_to(monkeypatch, "http://127.0.0.1:9")  # a port where nobody listens
    yield tmp_path
    huggingface_hub.close_session()


@pytest.fixture
def mock(caches, monkeypatch):
    server = Hub({"org/model": Repository(sharded())})
    _point_to(monkeypatch, server.address)
    yield server
    server.close()


@pytest.fixture
def no_network(monkeypatch):
    """Every attempt to open a connection or start a program is an error."""

    def refuse(*_, **__):
        raise AssertionError("the network was used")

    def forbid():
        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setattr(subprocess, "Popen", refuse)

    return forbid


def _point_to(monkeypatch, address):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
