#!/usr/bin/env python
"""Beside mlx-lm's own `--draft-model`, on one pair of models: greedy text, and what each acceptance rule accepts.

The draft model is the target itself in few bits. mlx-lm samples at every position and keeps a draft that equals its
sample; at temperature 1 that accepts sum(p q), where rejection sampling reaches sum(min(p, q)) and coupled noise comes
close. Tokens per pass and accepted share are counts, so they hold on any machine; nothing here is a speed.

  python scripts/compare_mlx_lm.py                     # default model, 4-bit copy of it as draft model
  python scripts/compare_mlx_lm.py --bits 3 --prompts 12 --tokens 96
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from speclocal import backends, catalogue, hub
from speclocal.backends.mlx.loading import read_config, spelled_for
from speclocal.convert import model_folder
from speclocal.core.budget import Budget
from speclocal.core.decode import decode
from speclocal.core.prefix import shared_prefix
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.stop import Stop
from speclocal.drafters import draft_model
from speclocal.engine import Load, load
from speclocal.sources import Policy

PROMPTS = Path(__file__).parent / "data" / "spec_bench_sample.jsonl"
DEPTH = 4


@dataclass(frozen=True)
class Count:
    """One answer: emitted tokens, and how many drafts each round kept."""

    tokens: list[int]
    kept: list[int]


def quantised_copy(folder: Path, place: Path, bits: int) -> Path:
    """The folder as mlx-lm's converter would write it in so many bits."""
    config = read_config(folder)
    model, config = load_model(folder, lazy=True, model_config=spelled_for(config, untied=False))
    model, config = quantize_model(model, config, group_size=64, bits=bits)
    save_model(place, model)
    save_config(config, place / "config.json")
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            (place / file.name).write_bytes(file.read_bytes())
    return place


def by_mlx_lm(model: Any, draft: Any, ids: Sequence[int], tokens: int, temperature: float, seed: int) -> Count:
    """mlx-lm's loop. It does not tell its rounds, but each ends with one token that was not drafted."""
    mx.random.seed(seed)
    out, kept, run = [], [], 0
    steps = speculative_generate_step(
        mx.array(list(ids)),
        model,
        draft,
        num_draft_tokens=DEPTH,
        max_tokens=tokens,
        sampler=make_sampler(temp=temperature),
    )
    for token, _, drafted in steps:
        out.append(int(token))
        if drafted:
            run += 1
        else:
            kept.append(run)
            run = 0
    return Count(out, kept)


def by_us(engine: Any, ids: Sequence[int], tokens: int, temperature: float, seed: int, rule: str) -> Count:
    """Our loop with the same length of drafts."""
    target = engine.target
    target.prefill([])
    sampler = Sampler(target.ops, Sampling(temperature=temperature, seed=seed), target.vocab, ids, rule=rule)
    drafter = draft_model.Drafter(draft_model.Settings(depth=DEPTH), engine.drafter.model)
    rounds = list(decode(target, drafter, sampler, ids, Stop(tokens), Budget(drafter.limit)))
    return Count([t for r in rounds for t in r.tokens], [len(r.path) for r in rounds])


def summary(counts: Sequence[Count]) -> dict[str, float]:
    """Kept drafts a round, with its standard error, and the share of first drafts that were kept.

    The last round of an answer is left out: the limit cuts it.
    """
    kept = [k for c in counts for k in c.kept[:-1]]
    return {
        "rounds": len(kept),
        "kept_per_round": statistics.mean(kept),
        "error": statistics.stdev(kept) / len(kept) ** 0.5,
        "first_kept": statistics.mean(k > 0 for k in kept),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--bits", type=int, default=4, help="of the draft model")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = compare(options, Path(temporary) / "draft")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def compare(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Every prompt through every contestant."""
    local = hub.fetch(catalogue.load().sources(options.target, "mlx"), Policy(), None, print)
    folder = model_folder(local, backends.load("mlx"), False, print)
    place.mkdir()
    quantised_copy(folder, place, options.bits)
    engine = load(
        Load(str(folder), "draft_model", str(place), {"depth": str(DEPTH)}, backend="mlx", dtype="auto"), notify=print
    )
    reference, _ = load_model(folder, model_config=spelled_for(read_config(folder), untied=False))
    draft, _ = load_model(place, model_config=spelled_for(read_config(place), untied=False))
    texts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text().splitlines()]
    texts = sorted(texts, key=len)[: options.prompts]
    contestants: dict[str, Callable[[list[int], int], Count]] = {
        "mlx-lm greedy": lambda ids, s: by_mlx_lm(reference, draft, ids, options.tokens, 0.0, s),
        "greedy": lambda ids, s: by_us(engine, ids, options.tokens, 0.0, s, "coupled"),
        "mlx-lm sampled": lambda ids, s: by_mlx_lm(reference, draft, ids, options.tokens, 1.0, s),
        **{
            rule: lambda ids, s, rule=rule: by_us(engine, ids, options.tokens, 1.0, s, rule)  # type: ignore[misc]
            for rule in ("coupled", "rejection", "block")
        },
    }
    counts: dict[str, list[Count]] = {name: [] for name in contestants}
    parted = []
    for number, text in enumerate(texts):
        ids = engine.chat_ids([{"role": "user", "content": text}])
        began = time.perf_counter()
        for name, run in contestants.items():
            counts[name].append(run(ids, number))
        ours, theirs = counts["greedy"][-1].tokens, counts["mlx-lm greedy"][-1].tokens
        if (same := shared_prefix(ours, theirs)) < min(len(ours), len(theirs)):
            parted.append({"prompt": number, "at": same})
        print(f"prompt {number}: {len(ids)} tokens, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return {
        "draft_bits": options.bits,
        "greedy_texts_equal": f"{len(texts) - len(parted)} of {len(texts)}",
        "greedy_parted": parted,
        **{name: summary(got) for name, got in counts.items()},
    }


if __name__ == "__main__":
    main()
