#!/usr/bin/env python
"""Speed on a CPU, side by side in one run: transformers, plain decoding, and n-gram speculation.

Every prompt is answered by each contestant before the next prompt is read, so that a noisy machine is noisy for all.
Greedy, float32. Ratios are of summed wall times over the same tokens, prompt processing included for everyone; the
columns that end in "decoding" leave the prompt out.

  python scripts/bench_cpu.py                          # the sample in scripts/data
  python scripts/bench_cpu.py --questions FILE --per-subtask 4 --tokens 96 --json out.json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from spec_bench import SAMPLE, read_prompts, rounds_of, timed, tokens_of
from transformers import AutoModelForCausalLM

from speclocal.core.budget import Budget
from speclocal.core.decode import Round, decode
from speclocal.core.interfaces import Limit
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.stop import Stop
from speclocal.drafters import ngram, none, scripted
from speclocal.engine import Engine, Load, load


class Bench:
    """One loaded engine and an untouched transformers model of the same weights."""

    def __init__(self, target: str, tokens: int):
        self.engine: Engine = load(Load(target=target, drafter="none", dtype="float32", device="cpu"), notify=print)
        self.tokens = tokens
        folder = self.engine.target.model.config._name_or_path
        self.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ends = sorted(self.engine.text.end_ids)

    def transformers(self, ids: Sequence[int], **options: Any) -> list[int]:
        """transformers' own generate."""
        with torch.inference_mode():
            out = self.reference.generate(
                torch.tensor([list(ids)]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                max_new_tokens=self.tokens,
                do_sample=False,
                eos_token_id=self.ends,
                pad_token_id=self.ends[0],
                **options,
            )
        return out[0, len(ids) :].tolist()

    def rounds(self, ids: Sequence[int], drafter: Any, sampling: Sampling | None = None) -> list[Round]:
        """Our own rounds, from an empty cache."""
        return rounds_of(self.engine, drafter, ids, self.tokens, sampling)


def compare(bench: Bench, prompts: dict[str, list[str]]) -> dict[str, Any]:
    """Seconds per subtask and contestant, interleaved prompt by prompt."""
    seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    decoding: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    emitted: dict[str, int] = defaultdict(int)
    rounds: dict[str, int] = defaultdict(int)
    unequal = []
    for subtask, texts in prompts.items():
        for number, text in enumerate(texts):
            ids = bench.engine.chat_ids([{"role": "user", "content": text}])
            contestants: dict[str, Callable[[], list[int] | list[Round]]] = {
                "transformers": lambda ids=ids: bench.transformers(ids),
                "plain": lambda ids=ids: bench.rounds(ids, none.Drafter()),
                "transformers_lookup": lambda ids=ids: bench.transformers(ids, prompt_lookup_num_tokens=10),
                "ngram": lambda ids=ids: bench.rounds(ids, ngram.Drafter()),
            }
            answers = {}
            for name, call in contestants.items():
                spent, out = timed(call)
                seconds[subtask][name] += spent
                if isinstance(out[0], Round):
                    decoding[subtask][name] += sum(r.seconds.decode for r in out)
                    rounds[subtask] += len(out) if name == "ngram" else 0
                    out = tokens_of(out)
                answers[name] = out
            emitted[subtask] += len(answers["plain"])
            unequal += [(subtask, number, n) for n in contestants if answers[n] != answers["plain"]]
            print(f"\r{subtask} {number + 1}/{len(texts)}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = {}
    for subtask, s in seconds.items():
        tokens, decode_only = emitted[subtask], decoding[subtask]
        rows[subtask] = {
            "tokens": tokens,
            "plain_tokens_per_second": tokens / decode_only["plain"],
            "plain_over_transformers": s["transformers"] / s["plain"],
            "ngram_over_plain": s["plain"] / s["ngram"],
            "ngram_over_plain_decoding": decode_only["plain"] / decode_only["ngram"],
            "ngram_over_transformers_lookup": s["transformers_lookup"] / s["ngram"],
            "lookup_over_transformers": s["transformers"] / s["transformers_lookup"],
            "mean_accepted_length": tokens / rounds[subtask],
        }
    return {"subtasks": rows, "unequal": unequal}


def overhead(bench: Bench, ids: Sequence[int], draft: int, sampling: Sampling) -> dict[str, float]:
    """Shares of a round of draft + 1 nodes: all that is no forward pass, and the noise alone (medians over rounds)."""
    target = bench.engine.target
    spent = {"forward": 0.0, "noise": 0.0}
    score, noise = target.score, target.ops.noise

    def watch(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            out = call(*args, **kwargs)
            spent[name] += time.perf_counter() - began
            return out

        return run

    full = [*ids, *(t for r in bench.rounds(ids, none.Drafter(), sampling) for t in r.tokens)]
    half = scripted.Drafter(
        plan=lambda tokens, limit: [[*full[len(tokens) : len(tokens) + draft // 2], *[0] * (draft - draft // 2)]]
    )
    half.limit = Limit(draft, draft)
    target.score = watch("forward", score)
    object.__setattr__(target.ops, "noise", watch("noise", noise))
    shares: dict[str, list[float]] = {"rest": [], "noise": []}
    target.prefill([])
    sampler = Sampler(target.ops, sampling, target.vocab, ids, end_ids=bench.ends)
    for r in decode(target, half, sampler, ids, Stop(bench.tokens, bench.ends), Budget(half.limit)):
        total = r.seconds.decode
        shares["rest"].append((total - spent["forward"]) / total)
        shares["noise"].append(spent["noise"] / total)
        spent.update(forward=0.0, noise=0.0)
    target.score = score
    object.__setattr__(target.ops, "noise", noise)
    return {name: statistics.median(values) for name, values in shares.items()}


def memory(bench: Bench) -> dict[str, float]:
    """MiB: the cache at 2,000 tokens of context, and how far speculative rounds raise the process's peak there."""
    target = bench.engine.target
    ids = (bench.engine.text.encode("The quick brown fox jumps over the lazy dog. ") * 250)[:2000]
    bench.rounds(ids, none.Drafter())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bench.rounds(ids, ngram.Drafter())
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"cache": target.cache.nbytes / 2**20, "rise_of_peak": (after - before) / 2**10}


def main() -> None:
    """Print the tables; write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, default=SAMPLE, help="Spec-Bench questions (JSON lines)")
    parser.add_argument("--per-subtask", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    prompts = read_prompts(args.questions, args.per_subtask)
    bench = Bench(args.target, args.tokens)
    warm = bench.engine.chat_ids([{"role": "user", "content": "Say hello."}])
    bench.transformers(warm), bench.rounds(warm, ngram.Drafter())
    result = compare(bench, prompts)
    columns = list(next(iter(result["subtasks"].values())))
    for number, column in enumerate(columns, 1):
        print(f"({number}) {column.replace('_', ' ')}")
    print(f"{'':16}" + "".join(f"{f'({number})':>9}" for number in range(1, len(columns) + 1)))
    for subtask, row in result["subtasks"].items():
        print(f"{subtask:16}" + "".join(f"{row[c]:9.2f}" for c in columns))
    print("answers that differ from plain decoding:", result["unequal"] or "none")
    ids = bench.engine.chat_ids([{"role": "user", "content": prompts["summarization"][0]}])
    settings = {
        "greedy": Sampling(),
        "T=1": Sampling(temperature=1.0, seed=1),
        "T=0.8, top-p 0.9": Sampling(temperature=0.8, top_p=0.9, seed=1),
        "T=0.8, top-k 50": Sampling(temperature=0.8, top_k=50, seed=1),
    }
    result["overhead"] = {}
    for nodes in (4, 8):
        for name, sampling in settings.items():
            shares = overhead(bench, ids, nodes - 1, sampling)
            result["overhead"][f"{nodes} nodes, {name}"] = shares
            print(f"{nodes} nodes, {name}: not forward {shares['rest']:.1%}, of it noise {shares['noise']:.1%}")
    result["memory"] = memory(bench)
    print("MiB at 2,000 tokens of context:", {k: round(v, 1) for k, v in result["memory"].items()})
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
