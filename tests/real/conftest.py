"""The default model, converted from its GGUF file, and the same weights in untouched transformers classes.

`scripts/test` fetches it and sets SPECLOCAL_TEST_MODEL=required; without it these tests are skipped, loudly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from speclocal.engine import Engine, Load, load
from speclocal.errors import DownloadError

PROMPTS = (
    "Copy this line ten times: the red boat waits by pier 7",
    "Write three sentences about a river in spring.",
    "What is 12 plus 30? Answer, then explain in two steps.",
)


@pytest.fixture(scope="session")
def engine() -> Engine:
    try:
        return load(Load(drafter="none", dtype="float32", device="cpu", offline=True))
    except DownloadError as error:
        if os.environ.get("SPECLOCAL_TEST_MODEL") == "required":
            raise
        pytest.skip(
            f"the default model is not here ({error}); run scripts/test, or: speclocal models pull smollm2-135m"
        )


@pytest.fixture(scope="session")
def reference(engine: Engine) -> Callable[[Sequence[int], int], list[int]]:
    """(prompt ids, n) -> the greedy continuation by transformers' own generate."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(engine.target.model.config._name_or_path, dtype=torch.float32)
    ends = sorted(engine.text.end_ids)

    def generate(ids: Sequence[int], n: int) -> list[int]:
        out = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=n,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
        )
        return out[0, len(ids) :].tolist()

    return generate


@pytest.fixture(scope="session")
def answers(engine: Engine, reference: Callable[[Sequence[int], int], list[int]]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, 48 greedy tokens) per prompt, by transformers."""
    prompts = [engine.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]
    return [(ids, reference(ids, 48)) for ids in prompts]
