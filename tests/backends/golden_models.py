"""Golden targets with a tokenizer, and golden heads without what lies beside their weights: as a user has them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

import speclocal
from speclocal.core.sampling import Sampling
from speclocal.engine import Answer, Engine, Load, Request
from tests.core.golden_heads import HEADS, target_folder, weights

VOCAB = 128
FAMILY = {
    "eagle1": "eagle",
    "eagle2": "eagle",
    "eagle2-llama3": "eagle",
    "eagle3": "eagle3",
    "eagle3-narrow": "eagle3",
    "eagle3-speculators": "eagle3",
    "eagle31-speculators": "eagle3",
    "peagle-speculators": "p_eagle",
    "medusa1": "medusa",
    "medusa2": "medusa",
    "medusa-shared-head": "medusa",
}
TEXTS = 4, 60
"""How many prompts the probe's tests continue, and by how many tokens."""


def golden_target(name: str, place: Path) -> Path:
    """The target of a golden head in a new folder. Word i is token i; no token ends an answer."""
    place.mkdir(parents=True)
    for file in target_folder(name).iterdir():
        if file.name == "config.json" or file.name.startswith("model"):
            shutil.copy(file, place)
    words = Tokenizer(models.WordLevel(vocab={f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return place


def golden_head(name: str, place: Path, **config: Any) -> Path:
    """A golden head in a new folder. config: entries that its config.json gets."""
    place.mkdir(parents=True)
    shutil.copy(weights(name), place)
    said = json.loads((HEADS / name / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**said, **config}))
    return place


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Random ids, which is what golden heads were fitted to."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB) for _ in range(8)] for _ in range(count)]


def open_engine(target: Path, drafter: str, backend: str, notify: Any = None, **more: Any) -> Engine:
    fields = {"target": str(target), "drafter": drafter, "backend": backend, "device": "cpu", "allow_pickle": True}
    return speclocal.load(Load(**{**fields, **more}), notify)


def say(engine: Engine, prompt: list[int], n: int = 40, sampling: Sampling | None = None) -> Answer:
    stream = engine.stream(Request(prompt, sampling=sampling or Sampling(), max_tokens=n))
    for _ in stream:
        pass
    return stream.answer()
