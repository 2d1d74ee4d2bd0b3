#!/usr/bin/env python
"""Drafters side by side on Spec-Bench: tokens per pass (tau) and speed against plain decoding, by subtask.

One target is loaded. Every question is answered by plain decoding and by each contestant before the next one is read,
each time from an empty cache and in another order, so that a noisy machine is noisy for all. Greedy, float32, first
turns only; every answer is compared with plain's, token for token, and a difference makes the exit status 1.

tau is emitted tokens by passes of the target after the prompt, the target's own tokens included. Speed is plain's
summed seconds by the contestant's, decoding alone and prompt included; what a head reads of the prompt counts as
decoding. What a lookup has learnt of its own hits stays from question to question, as it does in a chat.

  python scripts/compare_drafters.py                             # n-gram lookup, on the sample in scripts/data
  python scripts/compare_drafters.py --questions FILE --per-kind 20 --json out.json \\
      --contestant ngram --contestant "eagle3:FOLDER nodes=24 depth=5" --contestant "eagle3:FOLDER+ngram nodes=24"
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from spec_bench import SAMPLE, read_prompts, rounds_of, timed, tokens_of

from speclocal.core.decode import Round
from speclocal.core.interfaces import Drafter
from speclocal.engine import Engine, Load, load

PLAIN = "none"
MEASURES = {
    "tau": "tokens per pass (τ)",
    "decoding": "speed against plain, decoding",
    "whole": "speed against plain, prompt included",
}


@dataclass(frozen=True)
class Contestant:
    """A loaded drafter: how it was typed and is called in tables, and what it reads of the target."""

    typed: str
    label: str
    drafter: Drafter
    taps: tuple[int, ...]

    @classmethod
    def of(cls, engine: Engine, text: str) -> Contestant:
        """From `drafter name=value ...`; SpeclocalError if it does not fit the target."""
        name, *pairs = shlex.split(text)
        options = dict(pair.split("=", 1) for pair in pairs)
        engine.set_drafter(name, options)
        return cls(text, " ".join([engine.drafter.name, *pairs]), engine.drafter, tuple(engine.target.points))

    def answer(self, engine: Engine, ids: Sequence[int], tokens: int) -> tuple[float, list[Round]]:
        """Seconds, prompt included, and rounds."""
        engine.target.tap(self.taps)
        return timed(lambda: rounds_of(engine, self.drafter, ids, tokens))


@dataclass
class Sums:
    """Of one contestant over the questions of a kind."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "verify", "other"), 0.0))

    def add(self, seconds: float, rounds: Sequence[Round]) -> None:
        """Count an answer."""
        self.tokens += sum(len(r.tokens) for r in rounds)
        self.rounds += len(rounds)
        self.drafted += sum(len(r.tree) - 1 for r in rounds)
        self.seconds += seconds
        for phase in self.phases:
            self.phases[phase] += sum(getattr(r.seconds, phase) for r in rounds)

    def against(self, plain: Sums) -> dict[str, Any]:
        """The figures of a table, and what they were made from."""
        decode = sum(self.phases.values())
        return {
            "tau": self.tokens / self.rounds,
            "decoding": sum(plain.phases.values()) / decode,
            "whole": plain.seconds / self.seconds,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "drafted_per_round": self.drafted / self.rounds,
            "seconds": self.seconds,
            "seconds_decoding": decode,
            "phases": self.phases,
        }


def told_apart(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Where two have the same label, both are called as they were typed."""
    labels = [each.label for each in contestants]
    out = [replace(each, label=each.typed) if labels.count(each.label) > 1 else each for each in contestants]
    if len({each.label for each in out}) < len(out):
        raise SystemExit("a contestant is named twice")
    return out


def compare(
    engine: Engine, contestants: Sequence[Contestant], prompts: dict[str, list[str]], tokens: int
) -> tuple[dict[str, dict[str, Sums]], list[tuple[str, int, str]]]:
    """Sums by kind and label; and which answers were not plain's. The first contestant is plain decoding."""
    sums: dict[str, dict[str, Sums]] = {kind: defaultdict(Sums) for kind in prompts}
    unequal = []
    asked = 0
    for kind, texts in prompts.items():
        for number, text in enumerate(texts):
            ids = engine.chat_ids([{"role": "user", "content": text}])
            first = asked % len(contestants)
            answers = {}
            for each in [*contestants[first:], *contestants[:first]]:
                seconds, rounds = each.answer(engine, ids, tokens)
                sums[kind][each.label].add(seconds, rounds)
                answers[each.label] = tokens_of(rounds)
            expected = answers[contestants[0].label]
            unequal += [(kind, number, label) for label, answer in answers.items() if answer != expected]
            asked += 1
            print(f"\r{kind} {number + 1}/{len(texts)}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return sums, unequal


def table(title: str, measure: str, figures: dict[str, dict[str, dict[str, Any]]], labels: Sequence[str]) -> str:
    """A Markdown table: a row a kind, a column a contestant, and the mean over kinds."""
    lines = [f"| {title} | {' | '.join(labels)} |", "|---|" + "---|" * len(labels)]
    for kind, row in figures.items():
        cells = [f"{row[label][measure]:.2f}" for label in labels]
        lines.append(f"| {kind.replace('_', ' ')} | {' | '.join(cells)} |")
    means = [f"{fmean(row[label][measure] for row in figures.values()):.2f}" for label in labels]
    return "\n".join([*lines, f"| **mean** | {' | '.join(means)} |"])


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--contestant",
        action="append",
        metavar="'DRAFTER [NAME=VALUE ...]'",
        help="as after --drafter, and its settings; as often as you like (default: ngram); plain decoding always runs",
    )
    parser.add_argument("--questions", type=Path, default=SAMPLE, help="Spec-Bench questions (JSON lines)")
    parser.add_argument("--per-kind", type=int, default=8, help="questions of each of the six kinds")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens per question")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def main() -> int:
    """Print the tables; write the figures as JSON if asked."""
    args = arguments()
    prompts = read_prompts(args.questions, args.per_kind)
    settings = Load(args.target, PLAIN, backend=args.backend, device=args.device, dtype="float32")
    engine = load(settings, notify=lambda text: print(text, file=sys.stderr))
    texts = [text for text in args.contestant or ["ngram"] if text != PLAIN]
    contestants = told_apart([Contestant.of(engine, text) for text in [PLAIN, *texts]])
    labels = [each.label for each in contestants]
    warm = engine.chat_ids([{"role": "user", "content": "Say hello, hello, hello."}])
    for each in contestants:
        each.answer(engine, warm, 16)
    sums, unequal = compare(engine, contestants, prompts, args.tokens)
    figures = {kind: {label: of[label].against(of[PLAIN]) for label in labels} for kind, of in sums.items()}
    header = engine.header
    questions = sum(map(len, prompts.values()))
    print(
        f"{args.target} on {header.backend} ({header.device}, float32), greedy, {questions} first turns of Spec-Bench, "
        f"up to {args.tokens} new tokens, {platform.machine()}\n"
    )
    for measure, title in MEASURES.items():
        print(table(title, measure, figures, labels if measure == "tau" else labels[1:]), end="\n\n")
    print(f"answers that differ from plain decoding: {unequal or 'none'}")
    if args.json:
        out = {
            "target": args.target,
            "backend": header.backend,
            "tokens": args.tokens,
            "questions": {kind: len(texts) for kind, texts in prompts.items()},
            "kinds": figures,
            "mean": {
                label: {m: fmean(row[label][m] for row in figures.values()) for m in MEASURES} for label in labels
            },
            "unequal": unequal,
        }
        args.json.write_text(json.dumps(out, indent=2) + "\n", encoding="utf-8")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
