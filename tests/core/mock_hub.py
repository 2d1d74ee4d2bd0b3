"""A model hub on this machine: what the real one answers, its errors, and a log of what was asked."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

GOOD_TOKEN = "hf_goodgoodgoodgoodgoodgoodgoodgood"


def safetensors(size: int = 1000, seed: int = 0) -> bytes:
    """A valid file with `size` bytes of one tensor."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    body = (hashlib.sha256(bytes([seed])).digest() * (size // 32 + 1))[:size]
    return struct.pack("<Q", len(header)) + header + body


def sharded() -> dict[str, bytes]:
    """The files of a model in two shards."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"metadata": {}, "weight_map": {"a": names[0], "b": names[1]}}
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        names[0]: safetensors(400_000, 1),
        names[1]: safetensors(500_000, 2),
    }


class Recorder:
    """Remembers progress; raises KeyboardInterrupt, as Ctrl-C does, after `stop` bytes."""

    def __init__(self, stop: int | None = None):
        self.started: list[tuple[str, int | None]] = []
        self.count = 0
        self.finished = 0
        self.stop = stop

    def start(self, description: str, total: int | None) -> None:
        self.started.append((description, total))

    def advance(self, count: int) -> None:
        assert count > 0
        self.count += count
        if self.stop is not None and self.count > self.stop:
            raise KeyboardInterrupt

    def finish(self) -> None:
        self.finished += 1


@dataclass
class Repository:
    """One repository: `revisions` are names of `sha`."""

    files: dict[str, bytes]
    sha: str = "a" * 40
    revisions: tuple[str, ...] = ("main",)
    gated: bool = False


@dataclass
class Hub:
    """The server. `cut`: file name → bytes after which the connection is closed, once."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.handle_error = lambda *_: None  # clients that hang up are part of the tests
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fetched(self) -> list[str]:
        """Names of the files that were downloaded, in order."""
        return [line.rsplit("/", 1)[1] for line in self.requests if line.startswith("GET") and "/resolve/" in line]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        found = re.fullmatch(r"(/api/models)?/([^/]+/[^/]+?)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?", path)
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        if token and token != GOOD_TOKEN:
            return self._send(401, message="Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(found[2]) if found else None
        if repository is None:
            return self._send(404 if token else 401, "RepoNotFound", "Repository not found")
        kind, revision, name = found[3], found[4] or "main", found[5]
        if revision not in (*repository.revisions, repository.sha):
            return self._send(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if kind == "resolve":
            if repository.gated:
                return self._send(403 if token else 401, "GatedRepo", "Access to model is restricted")
            return self._file(repository, name)
        if kind == "tree":
            rows = [{"type": "file", "path": n, "size": len(b), "oid": _etag(b)} for n, b in repository.files.items()]
            return self._send(200, body=json.dumps(rows).encode())
        siblings = [{"rfilename": n, "size": len(b)} for n, b in repository.files.items()]
        return self._send(200, body=json.dumps({"id": found[2], "sha": repository.sha, "siblings": siblings}).encode())

    def _file(self, repository: Repository, name: str) -> None:
        if name not in repository.files:
            return self._send(404, "EntryNotFound", "Entry not found")
        content = repository.files[name]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": repository.sha}
        wanted = self.headers.get("range")
        if wanted:
            self.hub.ranges.append(wanted)
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._send(206, body=content[start:], headers=headers)
        cut = self.hub.cut.pop(name, None) if self.command == "GET" else None
        return self._send(200, body=content, headers=headers, cut=cut)

    def _send(
        self,
        status: int,
        code: str | None = None,
        message: str | None = None,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "X-Error-Message": message, **(headers or {})}.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
