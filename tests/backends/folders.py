"""Model folders in Hugging Face format with random weights and a byte-level tokenizer of 500 ids."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from speclocal.core.interfaces import Scores
from speclocal.core.sampling import Sampling
from speclocal.core.tree import DraftTree
from speclocal.engine import Answer, Engine, Request

SIZE = 500
GREEDY = Sampling()
SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(swapped: tuple[int, int] | None = None, start: bool = True) -> Tokenizer:
    """All bytes, 240 pairs of letters, 4 special tokens. swapped: two ids that changed places."""
    letters = itertools.product(string.ascii_lowercase, repeat=2)
    pairs = list(itertools.islice(letters, SIZE - 256 - len(SPECIALS)))
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    if swapped:
        a, b = swapped
        entries[a], entries[b] = entries[b], entries[a]
    made = Tokenizer(models.BPE(vocab={entry: i for i, entry in enumerate(entries)}, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIALS))
    if start:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SIZE - 4)])
    return made


def model_folder(
    lab: ModuleType,
    folder: Path,
    *,
    swapped: tuple[int, int] | None = None,
    start: bool = True,
    template: bool = True,
    recommended: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a folder. changes: of the model, which is a llama of 512 rows unless they say otherwise."""
    kind = changes.pop("kind", "llama")
    lab.save(kind, folder, **{"vocab_size": 512, "eos_token_id": SIZE - 3, **changes})
    tokenizer(swapped, start).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    config |= {"bos_token": "<s>"} if start else {}
    config |= {"chat_template": TEMPLATE} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": SIZE - 3, **(recommended or {})}))
    return folder


class Forced:
    """A target whose best tokens are given: everything else about it, the cache included, is the real one's.

    text: prompt and answer; what stands at a position is what the node before it predicts.
    """

    def __init__(self, target: Any, text: Sequence[int]):
        self._target, self._text = target, list(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def score(self, tree: DraftTree, start: int = 0) -> Scores:
        scores = self._target.score(tree, start)
        raised = np.zeros((len(tree) - start, self._target.vocab))
        for row, depth in enumerate(tree.depth[start:]):
            position = len(self._target.cached) + depth + 1
            if position < len(self._text):
                raised[row, self._text[position]] = 1e4
        return Scores(scores.logits + self._target.ops.array(raised.tolist()), scores.taps)


def answer(engine: Engine, prompt: Any = "the quick brown fox", n: int = 40, sampling: Sampling = GREEDY) -> Answer:
    """A whole answer, greedy unless told otherwise."""
    stream = engine.stream(Request(prompt, raw=isinstance(prompt, str), sampling=sampling, max_tokens=n))
    for _ in stream:
        pass
    return stream.answer()


def one_line(error: Any) -> int:
    """The error is one line; returns the exit code."""
    assert "\n" not in str(error.value)
    return error.value.exit_code
