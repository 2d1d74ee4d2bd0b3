#!/usr/bin/env python
"""What drafting with an EAGLE-3 head costs on a CPU, beside the arithmetic it cannot avoid.

A random head of the target's shape drafts a tree that grows (depth x top-k). Reported: its share of the target's
arithmetic and bytes, the time of its matrix products alone, the time of a whole draft, and of the target's pass over
the tree. Acceptance means nothing here; cost does not depend on weights.

  python scripts/bench_heads.py [--depth 6 --topk 8 --nodes 16 --vocabulary 8192]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from speclocal.backends.torch.heads import load as load_head
from speclocal.checks import stored_tensors
from speclocal.core import eagle_layout
from speclocal.core.head_spec import EagleSpec
from speclocal.core.interfaces import Limit
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.tree import DraftTree
from speclocal.drafters.eagle import Drafter, Settings
from speclocal.engine import Load, load

CONTEXT = 300
ROUNDS = 60


def spec_of(config: object, vocabulary: int) -> EagleSpec:
    """A head of one layer of the target's own shape."""
    c, layers = config, config.num_hidden_layers  # type: ignore[attr-defined]
    heads = c.num_attention_heads  # type: ignore[attr-defined]
    return EagleSpec(
        family="eagle3",
        hidden=c.hidden_size,  # type: ignore[attr-defined]
        target_hidden=c.hidden_size,  # type: ignore[attr-defined]
        vocab=c.vocab_size,  # type: ignore[attr-defined]
        draft_vocab=vocabulary,
        layers=1,
        heads=heads,
        kv_heads=c.num_key_value_heads,  # type: ignore[attr-defined]
        head_dim=c.hidden_size // heads,  # type: ignore[attr-defined]
        intermediate=c.intermediate_size,  # type: ignore[attr-defined]
        eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        fc=True,
        fc_bias=False,
        attention_bias=False,
        output_bias=False,
        qk_norm=False,
        taps=(2, layers // 2, layers - 3),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        own_embedding=False,
        own_head=True,
        mapped=True,
        mask_token=None,
        mask_width=None,
        suggested_depth=None,
        notices=(),
    )


def milliseconds(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median of many calls."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    for name, value in (("depth", 6), ("topk", 8), ("nodes", 16), ("vocabulary", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    o = parser.parse_args()
    engine = load(Load(o.target, "none", backend="torch", device="cpu", dtype="float32"), notify=print)
    target = engine.target
    spec = spec_of(target.model.config.get_text_config(), o.vocabulary)
    wanted = eagle_layout.tensors_of(spec)
    tensors = {name: torch.randn(want.shape) * 0.02 for name, want in wanted.items() if name != "d2t"}
    tensors["d2t"] = torch.arange(o.vocabulary) // 3  # three ids of four
    target.tap(spec.taps)
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors")
        head = load_head(Path(folder), spec, {name: name for name in wanted}, target)
    drafter = Drafter(Settings(depth=o.depth, topk=o.topk, nodes=o.nodes), head)
    ids = [i % 1000 + 5 for i in range(CONTEXT)]
    sampler = Sampler(target.ops, Sampling(), target.vocab, ids)
    scores = target.prefill(ids[:-1])
    drafter.begin(ids, scores, sampler)
    limit = Limit(o.depth, o.nodes)
    tree = drafter.draft(limit)
    state = target.score(tree).taps[:2]

    def draft() -> DraftTree:
        # As after a round that kept one draft: two new true rows, then the levels.
        head.truncate(CONTEXT - 1)
        drafter._reader._fed, drafter._reader._new = ids, [state]
        drafter._reader.tokens = [*ids, 7, 8]
        return drafter.draft(limit)

    layer = head._body.layers[0]
    few, many = torch.randn(2, 2 * spec.hidden), torch.randn(o.topk, 2 * spec.hidden)

    @torch.inference_mode()
    def products() -> None:
        """The matrix products of a draft and nothing else."""
        head._body.fc(torch.cat([few, few[:, : spec.hidden]], -1))
        for x in (few, *[many] * (o.depth - 1)):
            for project in (layer.q_proj, layer.k_proj, layer.v_proj):
                y = project(x)
            y = layer.o_proj(x[:, : layer.o_proj.in_features])
            y = layer.down_proj(layer.up_proj(y)) + layer.down_proj(layer.gate_proj(y))[:, :1]
            head._unembed(y[-1:] if x is few else y)

    def passes() -> object:
        out = target.score(tree).logits
        return out

    # Interleaved, so that a noisy machine is noisy for all.
    rows = [(milliseconds(products, 20), milliseconds(draft, 20), milliseconds(passes, 10)) for _ in range(5)]
    bare, whole, verify = (statistics.median(column) for column in zip(*rows, strict=True))
    weights = sum(t.numel() for name, t in tensors.items() if name != "d2t")
    folder = Path(target.model.config.get_text_config()._name_or_path or target.model.config._name_or_path)
    stored = stored_tensors(sorted(folder.glob("*.safetensors")))
    target_weights = sum(math.prod(shape) for shape, _ in stored.values())
    runs, levels = o.depth, (o.depth - 1) * o.topk + 2
    print(
        json.dumps(
            {
                "head_parameters": weights,
                "share_of_flops": weights * levels / (target_weights * (o.nodes + 1)),
                "share_of_bytes": weights * runs / target_weights,
                "products_ms": bare,
                "draft_ms": whole,
                "over_products": whole / bare - 1,
                "target_pass_ms": verify,
                "draft_share_of_pass": whole / verify,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
