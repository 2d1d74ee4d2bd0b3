"""Tokenizer, chat template, incremental decoding and stop strings, on small tokenizers built here."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from speclocal.errors import ModelError, UsageError
from speclocal.text import StopStrings, Text, first_difference

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level() -> Tokenizer:
    """All bytes, some tokens of several bytes (two of them end inside a character), added tokens of both sorts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("Ġ", "a"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ä", "ı"), ("1", "2")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("née→", normalized=False)])
    return tokenizer


def with_start(tokenizer: Tokenizer, token: str = "<s>") -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    return tokenizer


def byte_fallback(strip: int) -> Tokenizer:
    """SentencePiece style: pieces with a mark for the space, and a token for every byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "the", "é", "社", "▁a▁b", "\N{REPLACEMENT CHARACTER}", "<0xZZ>", "a", "h", "t", "e"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<▁x>", normalized=False)])
    return tokenizer


def words(decoder: decoders.Decoder | None) -> Tokenizer:
    pieces = ["[UNK]", "▁the", "the", "▁", "a▁b", "##s", "##.", ".", "don", "'", "t", "▁▁"]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


KINDS = {
    "byte level": byte_level,
    "byte fallback": lambda: byte_fallback(0),
    "byte fallback, one space stripped": lambda: byte_fallback(1),
    "byte fallback, two spaces stripped": lambda: byte_fallback(2),
    "metaspace": lambda: words(decoders.Metaspace(prepend_scheme="always")),
    "metaspace, no prefix": lambda: words(decoders.Metaspace(prepend_scheme="never")),
    "word pieces": lambda: words(decoders.WordPiece(prefix="##", cleanup=True)),
    "no decoder": lambda: words(None),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: Text.load(save(root / name, make())) for name, make in KINDS.items()}


def streamed(text: Text, ids: list[int]) -> list[str]:
    detokenizer = text.detokenizer()
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


# Incremental decoding


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_joined_pieces_are_the_text_of_all_ids(texts: dict[str, Text], kind: str, data: st.DataObject) -> None:
    text = texts[kind]
    # Few different ids, so that runs are likely, and often the last ones, where the pieces and the added tokens are.
    one = st.integers(0, text.size - 1) | st.integers(max(0, text.size - 14), text.size - 1)
    some = data.draw(st.lists(one, min_size=1, max_size=6))
    any_id = st.sampled_from(some) | st.integers(0, text.size + 3)
    ids = data.draw(st.lists(any_id, max_size=80))
    assert "".join(streamed(text, ids)) == text.decode(ids)


@settings(deadline=None)  # the first example imports transformers
@given(raw=st.binary(max_size=40), cuts=st.sets(st.integers(0, 40)))
def test_any_bytes_with_special_tokens_between_them(texts: dict[str, Text], raw: bytes, cuts: set[int]) -> None:
    for kind in ("byte level", "byte fallback", "byte fallback, one space stripped"):
        text = texts[kind]
        if kind == "byte level":
            ids = [byte_id(text, byte) for byte in raw]
        else:
            ids = [text._backend.token_to_id(f"<0x{byte:02X}>") for byte in raw]
        special = text._backend.token_to_id("</s>")
        ids = [id for i, id in enumerate(ids) for id in ([special, id] if i in cuts else [id])]
        assert "".join(streamed(text, ids)) == text.decode(ids)
        if kind == "byte level":
            assert text.decode(ids) == raw.decode(errors="replace")


@cache
def byte_alphabet() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # not the table under test

    return bytes_to_unicode()


def byte_id(text: Text, byte: int) -> int:
    return text._backend.token_to_id(byte_alphabet()[byte])


@pytest.mark.parametrize("sample", ["ďábelské", "Swift 社区 😀!", "Viết ba câu về cà phê sữa đá: ệ ữ ợ", "é e\u0301"])
def test_a_character_appears_with_its_last_byte_and_not_before(texts: dict[str, Text], sample: str) -> None:
    text = texts["byte level"]
    detokenizer = text.detokenizer()
    for char in sample:
        *first, last = [byte_id(text, byte) for byte in char.encode()]
        assert [detokenizer.push(id) for id in first] == [""] * len(first)
        assert detokenizer.push(last) == char
    assert detokenizer.flush() == ""


def test_an_emoji_split_over_tokens_is_held_until_complete(texts: dict[str, Text]) -> None:
    text = texts["byte level"]
    ids = text.encode("a 😀b")
    assert text._backend.token_to_id("ðŁĺ") in ids  # the merges made a token of its first three bytes
    assert [piece for piece in streamed(text, ids) if piece] == ["a", " ", "😀", "b"]


def test_an_unfinished_character_gives_one_mark_at_the_end(texts: dict[str, Text]) -> None:
    text = texts["byte level"]
    ids = text.encode("a😀")[:-1]
    assert streamed(text, ids) == ["a", "", "\N{REPLACEMENT CHARACTER}"]
    assert text.decode(ids) == "a\N{REPLACEMENT CHARACTER}"


def test_special_tokens_are_hidden_and_other_added_tokens_are_shown(texts: dict[str, Text]) -> None:
    text = texts["byte level"]
    ids = text.encode("<s>a<think>née→</s>")
    assert [text.token(id) for id in ids] == ["<s>", "a", "<think>", "née→", "</s>"]
    assert streamed(text, ids) == ["", "a", "<think>", "née→", "", ""]


@pytest.mark.parametrize(("strip", "expected"), [(0, "   the"), (1, "  the"), (2, " the")])
def test_leading_spaces_go_once(texts: dict[str, Text], strip: int, expected: str) -> None:
    text = texts[["byte fallback", "byte fallback, one space stripped", "byte fallback, two spaces stripped"][strip]]
    ids = [text._backend.token_to_id(token) for token in ("▁", "</s>", "▁", "▁the")]
    assert "".join(streamed(text, ids)) == text.decode(ids) == expected


def test_detokenizers_of_one_text_do_not_share_state(texts: dict[str, Text]) -> None:
    text = texts["byte level"]
    first, second = text.detokenizer(), text.detokenizer()
    head, tail = [byte_id(text, byte) for byte in "é".encode()]
    assert first.push(head) == ""
    assert second.push(byte_id(text, ord("a"))) == "a"
    assert first.push(tail) == "é"


# Stop strings


def naive(text: str, stops: list[str]) -> str | None:
    """The text before the stop that is complete first (the longest of those that end together)."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


def feed(stops: list[str], chunks: list[str]) -> tuple[str, list[str], bool]:
    matcher, shown, found = StopStrings(stops), [], False
    for chunk in chunks:
        piece, found = matcher.push(chunk)
        shown.append(piece)
        if found:
            break
    return "".join(shown) + matcher.flush(), shown, found


@given(
    text=st.text(alphabet="ab|", max_size=30),
    stops=st.lists(st.text(alphabet="ab|", min_size=1, max_size=5), max_size=3),
    cuts=st.sets(st.integers(0, 30)),
)
def test_stops_cut_as_a_search_of_the_whole_text_does(text: str, stops: list[str], cuts: set[int]) -> None:
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    chunks = [text[a:b] for a, b in pairwise(edges)]
    expected = naive(text, stops)
    shown, _, found = feed(stops, chunks)
    assert (shown, found) == ((text, False) if expected is None else (expected, True))


@given(text=st.text(alphabet="ab|", max_size=30), stops=st.lists(st.text("ab|", min_size=1, max_size=5), max_size=3))
def test_no_more_is_held_back_than_could_begin_a_stop(text: str, stops: list[str]) -> None:
    matcher, shown = StopStrings(stops), ""
    for i, char in enumerate(text, 1):
        piece, found = matcher.push(char)
        if found:
            return
        shown += piece
        held = text[len(shown) : i]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_of_a_stop_leaks_and_false_starts_are_released() -> None:
    shown = feed(["d boat wa"], ["The re", "d", " boat", " sank. The red", " boa", "t wa", "s"])
    assert shown[1] == ["The re", "", "", "d boat sank. The re", "", ""]
    assert shown[0] == "The red boat sank. The re"


def test_the_stop_that_comes_first_in_the_text_wins() -> None:
    assert feed(["pier", "boat"], ["a red boat at the pier"])[0] == "a red "
    assert feed(["pier", "boat"], ["a pier with a red boat"])[0] == "a "


def test_the_cut_does_not_depend_on_chunks_where_stops_overlap() -> None:
    assert feed(["abcd", "bc"], ["abcd"])[0] == feed(["abcd", "bc"], [*"abcd"])[0] == "a"
    assert feed(["bc", "abc"], ["xabc"])[0] == feed(["bc", "abc"], [*"xabc"])[0] == "x"


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopStrings(["x"])
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_an_unfinished_stop_is_released_at_the_end() -> None:
    matcher = StopStrings(["###"])
    assert matcher.push("a##") == ("a", False)
    assert matcher.flush() == "##"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["a", ""])


# Text to ids


@pytest.mark.parametrize("prompt", ["a12", "<s>a12", "<s><s>a12"])
def test_a_raw_prompt_has_one_start_token(tmp_path: Path, prompt: str) -> None:
    text = Text.load(save(tmp_path, with_start(byte_level()), bos_token="<s>"))
    assert [text.token(id) for id in text.encode(prompt)] == ["<s>", "a", "1", "2"]


def test_no_start_token_where_the_tokenizer_adds_none(tmp_path: Path) -> None:
    text = Text.load(save(tmp_path, byte_level(), bos_token="<s>"))
    assert [text.token(id) for id in text.encode("a")] == ["a"]
    assert text.token(text.start_id or -1) == "<s>"


@pytest.mark.parametrize("printed", ["{{ bos_token }}", "{{ bos_token + bos_token }}", "<s>", ""])
def test_a_chat_prompt_has_one_start_token_whatever_the_template_prints(tmp_path: Path, printed: str) -> None:
    folder = save(tmp_path, with_start(byte_level()), bos_token="<s>", chat_template=printed + CHATML)
    text = Text.load(folder)
    ids = text.chat([{"role": "user", "content": "a"}])
    assert [text.token(id) for id in ids] == ["<s>", "<|user|>", "a", "<|assistant|>"]
    assert text.chat([{"role": "user", "content": "a"}], generation=False) == ids[:-1]


def test_the_template_gives_what_transformers_gives(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    (folder := save(tmp_path, byte_level(), bos_token="<s>")).joinpath("chat_template.jinja").write_text(CHATML)
    messages = [{"role": "system", "content": "é 12"}, {"role": "user", "content": "<think>\n x"}]
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
    assert Text.load(folder).chat(messages) == theirs["input_ids"]


def test_no_template_says_to_use_raw(tmp_path: Path) -> None:
    text = Text.load(save(tmp_path, byte_level()))
    assert not text.has_template
    with pytest.raises(ModelError, match="--raw"):
        text.chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty conversation"),
        ([{"role": "user", "content": "a"}, {"role": "usr", "content": "a"}], "message 2 has no usable role"),
        ([{"content": "a"}], "role"),
        (["hello"], "role"),
        ([{"role": "user"}], "message 1 has no text"),
        ([{"role": "user", "content": 3}], "got int"),
        ([{"role": "system", "content": "a"}], "no system here"),
        ([{"role": "tool", "content": "a"}], "refuses"),
    ],
)
def test_messages_that_cannot_work_are_a_usage_error(tmp_path: Path, messages: list, says: str) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        "{% if messages[0]['role'] == 'tool' %}{{ 'a' + 1 }}{% endif %}" + CHATML
    )
    text = Text.load(save(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(UsageError, match=says):
        text.chat(messages)


def test_a_broken_template_is_the_models_fault(tmp_path: Path) -> None:
    text = Text.load(save(tmp_path, byte_level(), chat_template="{% for m in %}"))
    with pytest.raises(ModelError, match="template"):
        text.chat([{"role": "user", "content": "a"}])


def test_the_published_tokenizer_is_used_whatever_class_the_configuration_names(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), tokenizer_class="GPT2Tokenizer")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    text = Text.load(folder)
    assert [text.token(id) for id in text.encode("12")] == ["1", "2"]  # a GPT-2 pre-tokenizer would merge them


@pytest.mark.parametrize("content", [None, "{", '{"model": 3}'])
def test_a_tokenizer_that_cannot_be_read_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        Text.load(tmp_path)
    assert "\n" not in str(caught.value)


# The vocabulary


def toy(folder: Path, vocab: dict[str, int], **config: object) -> Text:
    return Text.load(save(folder, Tokenizer(models.WordLevel(vocab, unk_token="a")), **config))


def test_ids_without_an_entry(tmp_path: Path) -> None:
    text = toy(tmp_path, {"a": 0, "b": 1, "c": 4})
    assert text.size == 5
    assert text.unknown(8) == [2, 3, 5, 6, 7]
    assert text.unknown(3) == [2]
    assert [text.token(id) for id in (1, 2, 4, 99, -1)] == ["b", None, "c", None, None]


def test_the_first_id_that_differs(tmp_path: Path) -> None:
    text = toy(tmp_path / "0", {"a": 0, "b": 1, "c": 2})
    swapped = toy(tmp_path / "1", {"a": 0, "c": 1, "b": 2})
    longer = toy(tmp_path / "2", {"a": 0, "b": 1, "c": 2, "d": 3})
    hole = toy(tmp_path / "3", {"a": 0, "c": 2, "d": 3})
    assert first_difference(text, text) is None
    assert first_difference(text, swapped) == (1, "b", "c")
    assert first_difference(text, longer) is None  # more on top, as padding and extensions are
    assert first_difference(longer, text) is None
    assert first_difference(text, hole) == (1, "b", None)
    assert first_difference(hole, text) == (1, None, "b")


@pytest.mark.parametrize(
    ("generation", "config", "own", "expected"),
    [
        ([1, 106], None, "b", {1, 106, 7}),
        (5, None, None, {5}),
        (None, [3, 4], "b", {3, 4, 7}),
        (None, None, None, set()),
        (1, 2, "b", {1, 2, 7}),
    ],
)
def test_every_end_id_counts(tmp_path: Path, generation: object, config: object, own: object, expected: set) -> None:
    folder = tmp_path
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert toy(folder, {"a": 0, "b": 7}, eos_token=own).end_ids == expected


def test_end_ids_of_a_nested_text_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [8, 9]}}))
    assert toy(tmp_path, {"a": 0}).end_ids == {8, 9}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {}),
        ({"temperature": 0.6, "top_p": 0.9}, {}),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None, "max_length": 4},
            {"temperature": 0.6, "top_p": 0.9},
        ),
        (
            {"do_sample": True, "top_k": 64, "min_p": 0.05, "repetition_penalty": 1.1},
            {"temperature": 1.0, "top_k": 64, "min_p": 0.05, "repetition_penalty": 1.1},
        ),
    ],
)
def test_recommended_sampling(tmp_path: Path, generation: dict | None, expected: dict) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert toy(tmp_path, {"a": 0}).recommended == expected


def test_an_unreadable_configuration_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        toy(tmp_path, {"a": 0})
