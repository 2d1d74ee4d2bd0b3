"""What the benchmarks on Spec-Bench's questions share: reading them, and answering one from an empty cache."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from speclocal.core.budget import Budget
from speclocal.core.decode import Round, decode
from speclocal.core.interfaces import Drafter
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.stop import Stop
from speclocal.engine import PATIENCE, Engine

SAMPLE = Path(__file__).parent / "data" / "spec_bench_sample.jsonl"
CONVERSATION = "conversation"
KINDS = (CONVERSATION, "translation", "summarization", "qa", "math_reasoning", "rag")
"""The six subtasks. Spec-Bench names the questions of the first by their eight categories."""


def read_prompts(path: Path, per_kind: int) -> dict[str, list[str]]:
    """The first turn of the questions, by kind, spread evenly over the file."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        category = question.get("subtask") or question["category"]
        found[category if category in KINDS else CONVERSATION].append(question["turns"][0])
    return {kind: found[kind][:: max(1, len(found[kind]) // per_kind)][:per_kind] for kind in KINDS if kind in found}


def rounds_of(
    engine: Engine, drafter: Drafter, ids: Sequence[int], tokens: int, sampling: Sampling | None = None
) -> list[Round]:
    """All rounds of an answer of at most so many tokens, from an empty cache; greedy unless told otherwise."""
    target, ends = engine.target, sorted(engine.text.end_ids)
    target.prefill([])
    sampler = Sampler(target.ops, sampling or Sampling(), target.vocab, ids, end_ids=ends)
    budget = Budget(drafter.limit, misses=PATIENCE)
    return list(decode(target, drafter, sampler, ids, Stop(tokens, ends), budget))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    """Everything emitted."""
    return [token for round in rounds for token in round.tokens]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result."""
    began = time.perf_counter()
    out = call()
    return time.perf_counter() - began, out
