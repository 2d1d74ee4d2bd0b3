#!/usr/bin/env python
"""What a tree of a head keeps a round, by how its children are chosen and checked.

At temperature 1: children that are best with the noise the target will draw with (coupled), against the likeliest
children checked as certain proposals (what EAGLE-2's reference does), against chains with a real q. Counts, no times.

  python scripts/compare_trees.py [--target FOLDER --head FOLDER]      # default: tiny fitted EAGLE-3 of the tests
  python scripts/compare_trees.py --simulate                           # one level of a tree, laws made up
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

import numpy as np

from speclocal import backends, heads
from speclocal.core.budget import Budget
from speclocal.core.decode import decode
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.stop import Stop
from speclocal.drafters import read_settings
from speclocal.drafters.eagle import Settings

TINY = Path(__file__).parents[1] / "tests" / "golden" / "heads" / "eagle3-specforge"
WAYS = {
    "tree, coupled": ("coupled", 8),
    "tree, likeliest children": ("rejection", 8),
    "chain, coupled": ("coupled", 1),
    "chain, rejection with q": ("rejection", 1),
    "chain, block with q": ("block", 1),
}


def simulate(words: int = 2000, spread: float = 3.0, trials: int = 1500) -> dict[str, dict[str, float]]:
    """Share of levels in which a child is kept, for a drafter whose logits are the target's plus noise of `error`."""
    draw, result = np.random.default_rng(0), {}
    for error in (0.3, 1.0, 2.0):
        for k in (1, 4, 8):
            coupled, likeliest = 0.0, 0.0
            for _ in range(trials):
                z = draw.normal(0, spread, words)
                drafted = z + draw.normal(0, error, words)
                noise = draw.gumbel(size=words)
                p = np.exp(z - z.max())
                coupled += (z + noise).argmax() in np.argpartition(-(drafted + noise), k)[:k]
                likeliest += p[np.argpartition(-drafted, k)[:k]].sum() / p.sum()
            result[f"error {error}, {k} children"] = {
                "coupled": round(coupled / trials, 3),
                "likeliest children": round(float(likeliest) / trials, 3),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TINY / "target")
    parser.add_argument("--head", type=Path, default=TINY)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--simulate", action="store_true")
    o = parser.parse_args()
    if o.simulate:
        print(json.dumps(simulate(), indent=1))
        return
    backend = backends.load(o.backend)
    target = backend.load_target(o.target, print, device="cpu")
    files = heads.HeadFiles.read(o.head, str(o.head))
    result = {}
    for temperature in (0.0, 0.7, 1.0):
        for way, (rule, topk) in WAYS.items():
            if temperature == 0 and rule != "coupled":
                continue
            options = {"depth": "4", "topk": str(topk), "nodes": "16"}
            settings = read_settings(Settings, "eagle3", options)
            drafter, spec = heads.load(files, "eagle3", settings, target, backend, print)
            target.tap(heads.taps_of(spec))
            kept = []
            for seed in range(o.texts):
                prompt = random.Random(seed).choices(range(target.vocab), k=8)
                sampler = Sampler(
                    target.ops, Sampling(temperature=temperature, seed=seed), target.vocab, prompt, rule=rule
                )
                rounds = list(decode(target, drafter, sampler, prompt, Stop(o.tokens), Budget(drafter.limit)))
                kept += [len(r.path) for r in rounds[:-1]]
            result[f"T={temperature}, {way}"] = {
                "kept_per_round": round(statistics.mean(kept), 3),
                "error": round(statistics.stdev(kept) / len(kept) ** 0.5, 3),
                "rounds": len(kept),
            }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
