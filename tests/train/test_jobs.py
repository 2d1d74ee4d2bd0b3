"""What is asked for: openers, files of prompts, the turns of a chat template."""

from __future__ import annotations

import gzip
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from speclocal.errors import ModelError, UsageError
from speclocal.train.jobs import Turns, given_prompts, own_questions, read_openers, read_prompts


class Text:
    """A tokenizer of characters, with a template."""

    end_ids = frozenset({0})

    def __init__(self, template: str):
        self._template = template

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(c) for c in self._template.format(messages[0]["content"])]


def text(template: str = "<s>U:{}\nA:") -> Any:
    return Text(template)


def spell(ids: Any) -> str:
    return "".join(map(chr, ids))


def test_turns_are_what_stands_around_a_message() -> None:
    turns = Turns.of(text())
    assert (spell(turns.before), spell(turns.after), turns.ends) == ("<s>U:", "\nA:", {0})
    assert spell(turns.question(text(), "Why?")) == "Why?"


@pytest.mark.parametrize("template", ["<s>U:{}", "always the same", ""])
def test_templates_without_turns_are_refused(template: str) -> None:
    with pytest.raises(ModelError, match="where a question ends"):
        Turns.of(text(template))


def test_what_was_asked() -> None:
    turns = Turns.of(text())
    ids = text().chat([{"role": "user", "content": "Why?"}])
    assert spell(turns.asked([*ids, *map(ord, "So.\nA: no")])) == "Why?"
    assert turns.asked(ids[1:]) is None
    assert turns.asked(ids[:-1]) is None


def test_own_questions_use_every_opener_once_in_a_turn() -> None:
    openers = ["", "Why", "How"]
    turns = Turns.of(text())

    def jobs(seed: int) -> list[Any]:
        return list(islice(own_questions(text(), turns, openers, seed), 30))

    found = jobs(0)
    assert [job.number for job in found] == list(range(30))
    given = [spell(job.ids).removeprefix("<s>U:") for job in found]
    assert all(sorted(given[n : n + 3]) == sorted(openers) for n in range(0, 30, 3))
    assert [job.given for job in found] == list(map(len, given))
    assert all(job.asks for job in found)
    assert jobs(0) == found != jobs(1)


def test_given_prompts_in_turns() -> None:
    jobs = list(given_prompts(text(), ["a", "b"], 2))
    assert [(job.number, job.turn, spell(job.ids)) for job in jobs] == [
        (0, 0, "<s>U:a\nA:"),
        (1, 0, "<s>U:b\nA:"),
        (2, 1, "<s>U:a\nA:"),
        (3, 1, "<s>U:b\nA:"),
    ]
    assert not any(job.asks or job.given for job in jobs)


def test_openers_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "openers"
    path.write_text("# not me\nWhy\n\nTell:\\n\\n\n")
    assert read_openers(path) == ["Why", "", "Tell:\n\n"]
    path.write_text("# nothing\n")
    assert read_openers(path) == [""]
    assert "" in read_openers()
    assert len(read_openers()) > 10


def test_prompts_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffWhy?\r\n\n  \nHow\u2028much?\n".encode())
    assert read_prompts(path) == ["Why?", "How\u2028much?"]


def test_prompts_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a"}\n{"text": "b\u2028c"}\n\n{"instruction": "d", "output": "x"}\n{"turns": ["e", "f"]}\n',
        encoding="utf-8",
    )
    assert read_prompts(path) == ["a", "b\u2028c", "d", "e"]


@pytest.mark.parametrize(
    "line",
    ["{oh", "[]", "7", "null", '"text"', "{}", '{"prompt": 7}', '{"turns": []}', '{"turns": "abc"}', '{"turns": [{}]}'],
)
def test_broken_prompts_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(UsageError, match=r"line 2 of .* holds no prompt") as error:
        read_prompts(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_no_prompts_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="holds no prompts"):
        read_prompts(path)


@pytest.mark.parametrize("read", [read_prompts, read_openers])
def test_what_is_no_text_is_an_error(tmp_path: Path, read: Any) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"caf\xe9 au lait\n")
    with pytest.raises(UsageError, match="is no text, got byte 4"):
        read(path)


@pytest.mark.parametrize("name", ["prompts.txt.gz", "prompts.jsonl.gz"])
def test_packed_prompts(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    text = '{"prompt": "Why?"}\n{"prompt": "How?"}\n' if "jsonl" in name else "Why?\nHow?\n"
    path.write_bytes(gzip.compress(text.encode()))
    assert read_prompts(path) == ["Why?", "How?"]


def broken_packs() -> list[bytes]:
    whole = gzip.compress(b"Why?\n" * 50)
    return [whole[:-6], whole[:12], whole[:20] + bytes(4) + whole[24:], whole[:-8] + bytes(8)]


@pytest.mark.parametrize("data", broken_packs(), ids=["no end", "almost nothing", "garbled", "wrong checksum"])
def test_broken_packs_are_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "prompts.gz"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"prompts\.gz cannot be unpacked"):
        read_prompts(path)
