"""Conversations that exist already, as training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speclocal.errors import UsageError
from speclocal.train.reading import Conversation, read_conversations


class Plain:
    """A template that writes `<role>` before and `.` after each message, in code points."""

    def chat(self, messages: list[dict[str, str]], *, generation: bool = True) -> list[int]:
        text = "".join(f"<{m['role'][0]}>{m['content']}." for m in messages) + ("<a>" if generation else "")
        return [ord(c) for c in text]


def read(tmp_path: Path, *lines: Any) -> list[Conversation]:
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return read_conversations(path, Plain())  # type: ignore[arg-type]


def test_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    assert read(tmp_path, {"prompt_ids": [1, 2], "answer_ids": [3]}, "") == [Conversation((1, 2, 3), 2)]


def test_of_messages_the_last_answer_is_the_targets_own(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (found,) = read(tmp_path, {"messages": messages})
    assert "".join(map(chr, found.ids)) == "<u>hi.<a>yo."
    assert "".join(map(chr, found.ids[found.own :])) == "yo."


@pytest.mark.parametrize(
    "line",
    ["{", "[1]", "7", {"prompt_ids": [1]}, {"messages": []}, {"messages": [{"role": "user", "content": "hi"}]}],
)
def test_a_line_that_holds_none_is_named(tmp_path: Path, line: Any) -> None:
    with pytest.raises(UsageError, match=r"line 2 of .* holds no conversation"):
        read(tmp_path, {"prompt_ids": [1], "answer_ids": [2]}, line)
