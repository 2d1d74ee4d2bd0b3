"""The tokenizer inside a GGUF file, written out as a Hugging Face tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType

from speclocal.errors import ModelError
from speclocal.text import convert_gguf_tokenizer

Json = dict[str, Any]


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(*patterns: str) -> list[Json]:
    return [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]


# Patterns of published tokenizers. Most are one shape: contractions, words, numbers, punctuation, white space.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)


def _words(number: str, letter: str = r"\p{L}") -> str:
    word, signs = rf"[^\r\n\p{{L}}\p{{N}}]?[{letter}]+", rf" ?[^\s{letter}\p{{N}}]+[\r\n]*"
    return "|".join([_CONTRACTION, word, number, signs, _SPACE])


def _cased_words(number: str, ending: str = "") -> str:
    return "|".join([form + ending for form in _CASED] + [number, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACE])


@dataclass(frozen=True)
class _Kind:
    """How one family of byte-level BPE vocabularies cuts a text before the merges.

    whole: a piece that is itself in the vocabulary is taken as it is, without merging.
    start: the start token is added where the file does not say.
    """

    steps: tuple[Json, ...]
    normalizer: Json | None = None
    whole: bool = False
    start: bool = False


_NFC = {"type": "NFC"}
_DIGIT = {"type": "Digits", "individual_digits": True}
_GPT2 = _Kind((_byte_level(True),))
_GPT_NEOX = _Kind((_byte_level(True),), _NFC)
_STARCODER = _Kind((_DIGIT, _byte_level(True)))
_LLAMA3 = _Kind((*_split(_words(r"\p{N}{1,3}")), _byte_level(False)), whole=True, start=True)
_QWEN2 = _Kind((*_split(_words(r"\p{N}")), _byte_level(False)), _NFC)
_GPT4O = _Kind((*_split(_cased_words(r"\p{N}{1,3}", _CONTRACTION + "?")), _byte_level(False)), whole=True)
_HAN = "[一-龥ࠀ-一가-퟿]+"

# By `tokenizer.ggml.pre`. A name that is not here falls back to what transformers makes of it, with a notice.
_KINDS: dict[str, _Kind] = {
    **dict.fromkeys(("gpt-2", "phi-2"), _GPT2),
    **dict.fromkeys(("olmo", "mpt"), _GPT_NEOX),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _STARCODER),
    "command-r": _Kind(_STARCODER.steps, _NFC),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _Kind(_LLAMA3.steps)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _Kind((*_split(_words(r"\p{N}", r"\p{L}\p{M}")), _byte_level(False)), _NFC),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _Kind((*_split(_cased_words(r"\p{N}")), _byte_level(False)), whole=True, start=True),
    "deepseek-llm": _Kind(
        (
            *_split(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN),
            _DIGIT,
            _byte_level(False),
        )
    ),
    "deepseek-coder": _Kind(
        (*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN), _DIGIT, _byte_level(False)),
    ),
    "deepseek-v3": _Kind(
        (
            *_split(
                r"\p{N}{1,3}",
                "[一-龥぀-ゟ゠-ヿ]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}",
            ),
            _byte_level(False),
        )
    ),
}

_NAMED = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_ALWAYS_CONTROL = ("bos", "eos", "eot", "eom")


class _File:
    """The tokenizer part of a GGUF file's metadata."""

    def __init__(self, path: Path, reader: GGUFReader | None = None):
        self.path = path
        try:
            self._reader = reader or GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise ModelError(f"cannot read {path}", got=error, expected="a GGUF file") from error
        self.model = self.get("ggml.model")
        self.pre = self.get("ggml.pre")
        self.tokens: Sequence[str] = self.get("ggml.tokens", ())
        self.types: Sequence[int] = self.get("ggml.token_type", [TokenType.NORMAL] * len(self.tokens))
        if not self.model or not self.tokens:
            raise ModelError(f"{path.name} holds no tokenizer", expected="a GGUF file of a language model")
        ids = {name: self.get(f"ggml.{key}_token_id") for name, key in _NAMED.items()}
        self.named: dict[str, int] = {n: i for n, i in ids.items() if i is not None and i < len(self.tokens)}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(f"tokenizer.{key}")
        return default if field is None else field.contents()

    @property
    def context(self) -> int | None:
        architecture = self._reader.get_field("general.architecture")
        field = architecture and self._reader.get_field(f"{architecture.contents()}.context_length")
        return int(field.contents()) if field else None


def write_tokenizer(path: Path, folder: Path, reader: GGUFReader | None = None) -> str | None:
    """Write `tokenizer.json` and `tokenizer_config.json` of a GGUF file into `folder`.

    reader: the file, if it is open already (opening one takes seconds).
    Returns a notice if the result may cut text differently from the original tokenizer, else None.
    """
    file = _File(Path(path), reader)
    notice = None
    if file.model == "gpt2":
        body, notice = _byte_level_bpe(file)
    else:
        body = _without_padding(json.loads(convert_gguf_tokenizer(file.path)), file)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(body, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(file), ensure_ascii=False, indent=2), "utf-8")
    return notice


def _byte_level_bpe(file: _File) -> tuple[Json, str | None]:
    kind, notice = _KINDS.get(file.pre), None
    if file.pre in (None, "default"):
        kind, notice = _GPT2, f"{file.path.name} does not say how its tokenizer cuts text; GPT-2's rule is used"
    if kind is None:
        notice = (
            f"{file.path.name} cuts text by a rule not known here ({file.pre}); token ids may differ from the model's"
        )
        rebuilt = json.loads(convert_gguf_tokenizer(file.path))
        kind = _Kind((rebuilt["pre_tokenizer"],), rebuilt["normalizer"])
    merges = file.get("ggml.merges")
    if merges is None:
        raise ModelError(f"{file.path.name} lists no merges", expected="a complete byte-level BPE vocabulary")
    vocab: dict[str, int] = {}
    for id, (token, type_) in enumerate(zip(file.tokens, file.types, strict=True)):
        if type_ != TokenType.UNUSED:  # a padding row: an id without an entry, never drawn
            vocab.setdefault(token, id)
    start = file.named.get("bos") if file.get("ggml.add_bos_token", kind.start) else None
    body = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(file),
        "normalizer": kind.normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(kind.steps)},
        "post_processor": None if start is None else _prepend(file.tokens[start], start),
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind.whole,
            "vocab": vocab,
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }
    return body, notice


def _added(file: _File) -> list[Json]:
    """Tokens that are matched whole in a text: control tokens (special, not shown) and user-defined ones (shown)."""
    control = {id for id, type_ in enumerate(file.types) if type_ == TokenType.CONTROL}
    control |= {file.named[name] for name in _ALWAYS_CONTROL if name in file.named}  # some files mislabel them
    whole = control | {id for id, type_ in enumerate(file.types) if type_ == TokenType.USER_DEFINED}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": id, "content": file.tokens[id], **flags, "special": id in control} for id in sorted(whole)]


def _prepend(token: str, id: int) -> Json:
    first, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second],
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }


def _without_padding(body: Json, file: _File) -> Json:
    """Drop `[PAD123]` rows, which fill a vocabulary up to the width of the model, from what transformers made."""
    names = {t for t, type_ in zip(file.tokens, file.types, strict=True) if type_ == TokenType.UNUSED}
    padding = {name for name in names if re.fullmatch(r"\[PAD\d+\]", name)}
    model = body["model"]
    if padding and isinstance(model["vocab"], dict):
        model["vocab"] = {token: id for token, id in model["vocab"].items() if token not in padding}
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in padding]
    return body


def _config(file: _File) -> Json:
    config: Json = {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    config |= {f"{name}_token": file.tokens[id] for name, id in file.named.items()}
    if file.context:
        config["model_max_length"] = file.context
    template = file.get("chat_template")
    named = {name: file.get(f"chat_template.{name}") for name in file.get("chat_templates", ())}
    if template is not None and named:
        config["chat_template"] = [{"name": n, "template": t} for n, t in ({"default": template} | named).items()]
    elif template is not None:
        config["chat_template"] = template
    return config
