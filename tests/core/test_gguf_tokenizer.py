"""The tokenizer of a GGUF file, on tiny files written here."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGUFWriter, TokenType
from tokenizers import pre_tokenizers

from speclocal.errors import ModelError
from speclocal.gguf import write_tokenizer
from speclocal.text import Text

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CONTROL, USER, UNUSED = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNUSED
MERGES = ["Ġ a", "1 2", "Ċ Ċ", "a b", "Ġ Ġ"]


def bpe_tokens() -> tuple[list[str], list[int]]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜User｜>"]
    plain = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *(merge.replace(" ", "") for merge in MERGES),
        "Ġaaa",  # no merge makes it
    ]
    tokens = [*special, *plain, "<think>", "[PAD1]", "[PAD2]"]
    types = [CONTROL] * 4 + [TokenType.NORMAL] * len(plain) + [USER, UNUSED, UNUSED]
    return tokens, types


def write_gguf(path: Path, tokens: list[str], types: list[int], model: str = "gpt2", **fields: object) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def convert(folder: Path, pre: str | None, **fields: object) -> tuple[Text, str | None]:
    tokens, types = bpe_tokens()
    named = {"token_merges": MERGES, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0} | fields
    if pre is not None:
        named["tokenizer_pre"] = pre
    path = write_gguf(folder / "tiny.gguf", tokens, types, **named)
    notice = write_tokenizer(path, folder / "out")
    return Text.load(folder / "out"), notice


def pieces(text: Text, prompt: str) -> list[str | None]:
    return [text.token(id) for id in text.encode(prompt)]


def test_ids_are_those_of_the_file_and_padding_rows_have_no_entry(tmp_path: Path) -> None:
    text, notice = convert(tmp_path, "smollm")
    tokens, types = bpe_tokens()
    assert notice is None
    assert [text.token(id) for id in range(len(tokens))] == [
        None if type_ == UNUSED else token for token, type_ in zip(tokens, types, strict=True)
    ]
    assert text.unknown(len(tokens)) == [len(tokens) - 2, len(tokens) - 1]


@pytest.mark.parametrize(
    ("pre", "prompt", "expected"),
    [
        # Digits stand alone before anything else is cut: white space before a number stays together.
        ("smollm", "a\n\n12  1", ["a", "ĊĊ", "1", "2", "ĠĠ", "1"]),
        ("gpt-2", "a\n\n12  1", ["a", "Ċ", "Ċ", "12", "Ġ", "Ġ", "1"]),
        ("qwen2", "a\n\n12 ab", ["a", "ĊĊ", "1", "2", "Ġa", "b"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),  # composed first
        ("smollm", "e\u0301", ["e", "Ì", "ģ"]),
        ("llama-bpe", "12 ab1", ["<|im_start|>", "12", "Ġa", "b", "1"]),
        ("llama-bpe", " aaa", ["<|im_start|>", "Ġaaa"]),  # a piece of the vocabulary is taken whole
        ("glm4", " aaa", ["Ġa", "a", "a"]),
        ("tekken", "12", ["<|im_start|>", "1", "2"]),
        ("deepseek-v3", "\n\n12", ["ĊĊ", "12"]),
    ],
)
def test_text_is_cut_by_the_named_rule(tmp_path: Path, pre: str, prompt: str, expected: list[str]) -> None:
    text, notice = convert(tmp_path, pre)
    assert notice is None
    assert pieces(text, prompt) == expected


def test_control_tokens_are_special_and_user_defined_ones_are_shown(tmp_path: Path) -> None:
    text, _ = convert(tmp_path, "smollm")
    prompt = "<｜User｜>a<think><|im_end|>"
    assert pieces(text, prompt) == ["<｜User｜>", "a", "<think>", "<|im_end|>"]
    assert text.decode(text.encode(prompt)) == "a<think>"


def test_start_token_as_the_file_says(tmp_path: Path) -> None:
    for pre, says, expected in (
        ("smollm", True, 1),
        ("llama-bpe", False, 0),
        ("llama-bpe", None, 1),
        ("smollm", None, 0),
    ):
        folder = tmp_path / f"{pre}-{says}"
        folder.mkdir()
        text, _ = convert(folder, pre, **({} if says is None else {"add_bos_token": says}))
        assert pieces(text, "a").count("<|im_start|>") == expected
        assert text.start_id == 1


def test_named_tokens_template_and_end_ids(tmp_path: Path) -> None:
    text, _ = convert(tmp_path, "smollm", chat_template=TEMPLATE, eot_token_id=3)
    assert text.end_ids == {2, 3}
    ids = text.chat([{"role": "user", "content": "ab"}])
    assert [text.token(id) for id in ids] == ["<|im_start|>", *"user", "Ċ", "ab", "<|im_end|>", "Ċ"]


def test_the_default_template_of_several(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    text, _ = convert(tmp_path, "smollm", chat_template=templates)
    assert text.has_template
    assert text.token(text.chat([{"role": "user", "content": "a"}])[0]) == "<|im_start|>"


@pytest.mark.parametrize("pre", [None, "default", "some-new-rule"])
def test_a_rule_that_is_not_known_gives_a_notice(tmp_path: Path, pre: str | None) -> None:
    text, notice = convert(tmp_path, pre)
    assert notice is not None
    assert "tiny.gguf" in notice
    assert pre in (None, "default") or pre in notice
    assert text.decode(text.encode("ab é12 😀")) == "ab é12 😀"
    assert pieces(text, "<｜User｜>a<think>") == ["<｜User｜>", "a", "<think>"]


def test_transformers_reads_the_folder_the_same_way(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text, _ = convert(tmp_path, "smollm", chat_template=TEMPLATE)
    (tmp_path / "out" / "config.json").write_text('{"model_type": "llama"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = "<|im_start|>a\n\n12 é😀<think>"
    assert theirs.encode(prompt) == text.encode(prompt)
    assert theirs.model_max_length == 2048
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)


def test_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, CONTROL, CONTROL] + [TokenType.BYTE] * 256
    words = ["▁", "a", "b", "▁a", "ab", "▁ab", "<turn>", "[PAD1]"]
    tokens, types = tokens + words, types + [TokenType.NORMAL] * 6 + [USER, UNUSED]
    scores = [0.0] * 259 + [-3.0, -4.0, -5.0, -1.0, -2.0, -0.5, 0.0, -99.0]
    path = write_gguf(
        tmp_path / "spm.gguf",
        *(tokens, types, "llama"),
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )
    assert write_tokenizer(path, tmp_path / "out") is None
    text = Text.load(tmp_path / "out")
    assert pieces(text, "ab é") == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert text.decode(text.encode("ab é")) == "ab é"
    assert text.end_ids == {2}
    assert text.unknown(len(tokens)) == [len(tokens) - 1]
    assert "<turn>" in pieces(text, "a<turn>b")


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "none.gguf", "llama")
    writer.add_context_length(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match="no tokenizer"):
        write_tokenizer(tmp_path / "none.gguf", tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"not a GGUF file at all, but long enough to be one"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="GGUF"):
        write_tokenizer(tmp_path / "bad.gguf", tmp_path / "out")
