"""Text and token ids: tokenizer, chat template, incremental detokenizer, stop strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from speclocal.detokenize import Detokenizer, Window, mirror
from speclocal.errors import ModelError, UsageError

__all__ = ["Detokenizer", "StopStrings", "Text", "convert_gguf_tokenizer", "first_difference"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Names under which tokenizers keep what ends a text, a turn or a message.
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


class Text:
    """Everything of a model folder that turns text into ids and back. Load it with `Text.load`."""

    def __init__(self, tokenizer: Any, folder: Path):
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._generation = _read_json(folder / "generation_config.json")
        self._config = _read_json(folder / "config.json")
        self.start_id: int | None = tokenizer.bos_token_id
        bare, dressed = (tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
        self._prefix = _before(dressed, bare) if bare else [id for id in dressed[:1] if id == self.start_id]

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> Text:
        """Read the tokenizer of a model folder in Hugging Face format."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError("cannot load the tokenizer", got=folder, expected="a model folder")
        own_code = trust_remote_code and "auto_map" in _read_json(folder / "tokenizer_config.json")
        # tokenizer.json is the tokenizer as published. AutoTokenizer would pass it through the class the configuration
        # names, and some of those put a pre-tokenizer of their own in place; importing it costs a second, too.
        published = (folder / "tokenizer.json").is_file() and not own_code
        kind = getattr(import_module("transformers"), "PreTrainedTokenizerFast" if published else "AutoTokenizer")
        try:
            tokenizer = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as error:  # the Rust library knows no narrower one for a file it cannot read
            do = "download the model again"
            if "trust_remote_code" in str(error):
                do = "its tokenizer is code of the repository: pass --trust-remote-code if you trust it"
            raise ModelError(f"cannot load the tokenizer of {folder}", got=_line(error), do=do) from error
        tokenizer.model_max_length = int(1e30)  # no warning here about long prompts: the engine checks the context
        return cls(tokenizer, folder)

    # Text to ids

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the start token exactly once where the tokenizer adds one."""
        return self._start_once(self._tokenizer.encode(text, add_special_tokens=False))

    @property
    def has_template(self) -> bool:
        """Whether the model comes with a chat template."""
        template = self._tokenizer.chat_template
        return bool(template) and (isinstance(template, str) or "default" in template)

    def chat(self, messages: Sequence[Mapping[str, str]], *, generation: bool = True) -> list[int]:
        """Ids of a conversation, by the model's own template; `generation` opens the assistant's next turn."""
        if not self.has_template:
            raise ModelError("this model has no chat template", do="use --raw to continue plain text")
        _check_messages(messages)
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=generation, return_dict=False
            )
        except TemplateSyntaxError as error:
            raise ModelError("the model's chat template cannot be read", got=_line(error), do="use --raw") from error
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            do = "change the messages, or use --raw"
            raise UsageError("the model's chat template refuses these messages", got=_line(error), do=do) from error
        return self._start_once(ids)

    def _start_once(self, ids: list[int]) -> list[int]:
        prefix = self._prefix
        while prefix and ids[: len(prefix)] == prefix:
            ids = ids[len(prefix) :]
        return prefix + ids

    # Ids to text

    def decode(self, ids: Iterable[int]) -> str:
        """Text of all ids at once. Special tokens, and ids without an entry, give nothing."""
        if self._backend is None:
            return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder: what it gives piece by piece, joined, is what `decode` gives at once."""
        return self._new_detokenizer()

    @cached_property
    def _new_detokenizer(self) -> Callable[[], Detokenizer]:
        if self._backend is None:
            special, scheme = set(self._tokenizer.all_special_tokens), None
        else:
            special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
            scheme = mirror(self._backend.decoder)

        def visible(id: int) -> str | None:
            token = self.token(id)
            return None if token in special else token

        return scheme(visible) if scheme else lambda: Window(visible, self.decode)

    # The vocabulary

    @cached_property
    def _entries(self) -> dict[int, str]:
        return {id: token for token, id in self._tokenizer.get_vocab().items()}

    @cached_property
    def size(self) -> int:
        """1 + the highest id with an entry."""
        return 1 + max(self._entries, default=-1)

    def token(self, id: int) -> str | None:
        """The raw vocabulary string of an id, None where the tokenizer has no entry."""
        return self._entries.get(id)

    def unknown(self, width: int) -> list[int]:
        """Ids below `width` (of the logits) without an entry: padding rows and holes. They must never be drawn."""
        return [id for id in range(width) if id not in self._entries]

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Every id that ends the text: of the generation config, the model config and the tokenizer together."""
        found = [self._generation.get("eos_token_id"), self._config.get("eos_token_id")]
        found.append((self._config.get("text_config") or {}).get("eos_token_id"))
        found += [getattr(self._tokenizer, name, None) for name in _END_TOKENS]
        ids = (id for value in found for id in (value if isinstance(value, list) else [value]))
        return frozenset(id for id in ids if type(id) is int)

    @cached_property
    def recommended(self) -> dict[str, float | int]:
        """Sampling values the model's makers recommend; empty if they say greedy, or nothing."""
        if not self._generation.get("do_sample"):
            return {}
        given = {name: self._generation.get(name) for name in _RECOMMENDED}
        return {"temperature": 1.0} | {name: value for name, value in given.items() if value is not None}


def first_difference(a: Text, b: Text) -> tuple[int, str | None, str | None] | None:
    """The lowest id that two tokenizers define differently, with both strings; None if they agree.

    Ids above all of the other tokenizer's are no difference: vocabularies are padded and extended.
    """
    if a._entries == b._entries:
        return None
    for id in range(min(a.size, b.size)):
        if a.token(id) != b.token(id):
            return id, a.token(id), b.token(id)
    return None


def convert_gguf_tokenizer(path: Path) -> str:
    """The tokenizer of a GGUF file as transformers rebuilds it, in the form of a tokenizer.json."""
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except (OSError, ValueError, LookupError) as error:
        raise ModelError(f"cannot convert the tokenizer of {path.name}", got=_line(error)) from error
    return tokenizer.backend_tokenizer.to_str()


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _before(dressed: list[int], bare: list[int]) -> list[int]:
    """What the tokenizer itself puts before a text: usually the start token, or nothing."""
    return next((dressed[:i] for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), [])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}", got=error, do="download the model again") from error
    return content if isinstance(content, dict) else {}


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise UsageError("cannot answer an empty conversation", expected="at least one message")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            got = message.get("role") if isinstance(message, Mapping) else type(message).__name__
            raise UsageError(f"message {i} has no usable role", got=repr(got), expected="one of " + ", ".join(_ROLES))
        if not isinstance(message.get("content"), str):
            raise UsageError(f"message {i} has no text", got=type(message.get("content")).__name__, expected="a string")


class StopStrings:
    """Cuts a text at the stop string that is complete first; none of its characters is ever shown.

    Text that could be the beginning of a stop is held back until it turns out not to be.
    """

    def __init__(self, stops: Sequence[str]):
        if not all(stops):
            raise UsageError("a stop string is empty", expected="at least one character")
        self._stops = tuple(stops)
        self._beginnings = {stop[:i] for stop in stops for i in range(1, len(stop))}
        self._longest = max(map(len, self._beginnings), default=0)
        self._held = ""
        self._found = False

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop was found (it stays found)."""
        if self._found or not self._stops:
            return ("", True) if self._found else (text, False)
        text = self._held + text
        # By where a match ends, then by where it begins: so the result does not depend on how the text was cut up.
        matches = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if matches:
            self._found, self._held = True, ""
            return text[: min(matches)[1]], True
        first = max(0, len(text) - self._longest)
        safe = next((i for i in range(first, len(text)) if text[i:] in self._beginnings), len(text))
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """What was held back, at the end of a text in which no stop was found."""
        held, self._held = self._held, ""
        return held
