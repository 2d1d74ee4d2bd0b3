"""What speculation did, counted from rounds. Figures are defined here once, for every front end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speclocal.core.decode import Round


@dataclass
class Seconds:
    """Wall time of the host by phase. `other` is all of a round that is neither drafting nor a pass of the target.

    A device that works behind the host is waited for in `verify`, drafts of a model included. What the consumer of
    rounds does between two of them is in no phase, nor is what the device gets done meanwhile.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @property
    def decode(self) -> float:
        """Everything after the prompt."""
        return self.draft + self.verify + self.other


@dataclass
class Stats:
    """Counters of one generation.

    tokens:    emitted tokens (after stops).
    rounds:    passes of the target after the prompt.
    undrafted: rounds in which the drafter proposed nothing.
    drafted:   proposed nodes; `accepted`: those kept by the rule, counted before a stop cuts the text.
    proposed_at, accepted_at: rounds in which depth d+1 was proposed / kept.
    """

    tokens: int = 0
    rounds: int = 0
    undrafted: int = 0
    drafted: int = 0
    accepted: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)

    def add(self, round: Round) -> None:
        """Count one round."""
        self.tokens += len(round.tokens)
        self.rounds += 1
        self.undrafted += len(round.tree) == 1
        self.drafted += len(round.tree) - 1
        self.accepted += len(round.path)
        for counts, depth in ((self.proposed_at, max(round.tree.depth)), (self.accepted_at, len(round.path))):
            counts.extend([0] * (depth - len(counts)))
            for d in range(depth):
                counts[d] += 1
        self.seconds.prefill += round.seconds.prefill
        self.seconds.draft += round.seconds.draft
        self.seconds.verify += round.seconds.verify
        self.seconds.other += round.seconds.other

    @property
    def mean_accepted_length(self) -> float:
        """Emitted tokens per pass of the target, the target's own token included; 0 before the first round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted share of the drafted nodes; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding; the prompt's time is apart."""
        return self.tokens / self.seconds.decode if self.seconds.decode > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Counters and derived figures, ready for JSON."""
        out = asdict(self)
        del out["proposed_at"], out["accepted_at"]
        out["mean_accepted_length"] = round(self.mean_accepted_length, 4)
        out["acceptance"] = round(self.acceptance, 4)
        out["tokens_per_second"] = round(self.tokens_per_second, 3)
        padded = self.accepted_at + [0] * (len(self.proposed_at) - len(self.accepted_at))
        out["acceptance_by_position"] = [round(a / p, 4) for a, p in zip(padded, self.proposed_at, strict=True)]
        out["seconds"] = {k: round(v, 4) for k, v in out["seconds"].items()}
        return out
