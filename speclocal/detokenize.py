"""Incremental decoding: each class mirrors one family of decoders of the tokenizers library, token by token."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

Visible = Callable[[int], str | None]  # id -> the raw token, None for what is skipped


class Detokenizer:
    """Text of a growing id sequence. Emitted text is never taken back; joined, it equals `Text.decode` of all ids."""

    def push(self, id: int) -> str:
        """The text that became complete with this id; "" while a character's bytes are incomplete."""
        raise NotImplementedError

    def flush(self) -> str:
        """The rest, at the end of the text: an unfinished character gives what decoding all ids gives."""
        raise NotImplementedError


class _Spelling(dict[int, Any]):
    """id -> how it is spelled, worked out on first use and kept."""

    def __init__(self, spell: Callable[[int], Any]):
        self._spell = spell

    def __missing__(self, id: int) -> Any:
        value = self[id] = self._spell(id)
        return value


class _Bytes(Detokenizer):
    """Byte-level vocabularies: tokens are bytes, and the text is their UTF-8, with invalid parts replaced."""

    def __init__(self, spelling: _Spelling):
        self._spelling = spelling
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        return self._utf8.decode(self._spelling[id])

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _Pieces(Detokenizer):
    """SentencePiece-style vocabularies: tokens are text, some are single bytes.

    A run of byte tokens is text only if the whole run is UTF-8 (else each byte becomes a replacement mark), so it is
    held until another token ends it.

    spelling: text, or the number of a byte, or None for what is skipped.
    opening:  text of the first token where that differs.
    strip:    how many characters `stripped` go from the start of the text.
    """

    def __init__(self, spelling: _Spelling, opening: _Spelling | None = None, strip: int = 0, stripped: str = " "):
        self._spelling, self._opening = spelling, opening
        self._strip, self._stripped = strip, stripped
        self._run = bytearray()

    def push(self, id: int) -> str:
        piece = self._spelling[id]
        if piece is None:
            return ""
        if type(piece) is int:
            self._run.append(piece)
            return ""
        if self._opening is not None:
            piece, self._opening = self._opening[id], None
        if self._run:
            piece = self._take_run() + piece
        return self._strip_start(piece) if self._strip else piece

    def flush(self) -> str:
        return self._strip_start(self._take_run())

    def _take_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _strip_start(self, text: str) -> str:
        while self._strip and text.startswith(self._stripped):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


class Window(Detokenizer):
    """Any other decoder: decodes a short window of ids and gives what is new in it. Exact as far as the window sees."""

    _kept, _most = 4, 32

    def __init__(self, visible: Visible, decode: Callable[[list[int]], str]):
        self._visible, self._decode = visible, decode
        self._ids: list[int] = []
        self._shown = ""

    def push(self, id: int) -> str:
        if self._visible(id) is None:  # it would only push what gives context out of the window
            return ""
        self._ids.append(id)
        text = self._decode(self._ids)
        if len(self._ids) <= self._most and (
            not text.startswith(self._shown) or text.endswith("\N{REPLACEMENT CHARACTER}")
        ):
            return ""
        new = text[len(self._shown) :]
        self._shown = text
        if len(self._ids) > self._most:
            self._ids = self._ids[-self._kept :]
            self._shown = self._decode(self._ids)
        return new

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._shown) :]


def mirror(decoder: Any) -> Callable[[Visible], Callable[[], Detokenizer]] | None:
    """How to mirror a decoder of the tokenizers library; None where it is of no known family."""
    if decoder is None:
        return None
    whole: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = whole["decoders"] if whole["type"] == "Sequence" else [whole]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    if kinds == ["Metaspace"]:
        return lambda visible: _metaspace(visible, steps[0])
    plain = [step for step in steps if step["type"] == "Replace" and "String" in step["pattern"]]
    rest = steps[len(plain) :]
    if steps[: len(plain)] == plain and [step["type"] for step in rest] in (
        ["ByteFallback", "Fuse"],
        ["ByteFallback", "Fuse", "Strip"],
    ):
        strip = rest[2] if len(rest) == 3 else {"start": 0, "stop": 0, "content": " "}
        return (lambda visible: _byte_fallback(visible, plain, strip)) if not strip["stop"] else None
    return None


def _byte_level(visible: Visible) -> Callable[[], Detokenizer]:
    # Byte-level vocabularies write printable Latin-1 as it is and move the other bytes up, behind U+0100.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(moved)}

    def spell(id: int) -> bytes:
        token = visible(id) or ""
        try:
            return bytes(byte_of[char] for char in token)
        except KeyError:  # an added token, written as plain text
            return token.encode()

    spelling = _Spelling(spell)
    return lambda: _Bytes(spelling)


def _metaspace(visible: Visible, step: dict[str, Any]) -> Callable[[], Detokenizer]:
    mark = step["replacement"]
    spelling = _Spelling(lambda id: None if (token := visible(id)) is None else token.replace(mark, " "))
    if step.get("prepend_scheme") == "never":
        return lambda: _Pieces(spelling)
    opening = _Spelling(lambda id: (visible(id) or "").replace(mark, ""))
    return lambda: _Pieces(spelling, opening)


def _byte_fallback(visible: Visible, replace: list[Any], strip: dict[str, Any]) -> Callable[[], Detokenizer]:
    def spell(id: int) -> str | int | None:
        token = visible(id)
        if token is None:
            return None
        for step in replace:
            token = token.replace(step["pattern"]["String"], step["content"])
        return int(token[3:5], 16) if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token) else token

    spelling = _Spelling(spell)
    return lambda: _Pieces(spelling, strip=strip["start"], stripped=strip["content"])
