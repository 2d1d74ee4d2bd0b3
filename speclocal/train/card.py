"""The model card beside a trained drafter: what it is for, what it learned from, and how often it was right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {
    "eagle3": "EAGLE-3 draft head",
    "p-eagle": "P-EAGLE parallel draft head",
    "medusa": "Medusa heads",
    "draft-model": "draft model",
}


@dataclass(frozen=True)
class Card:
    """What a card states. acceptance: by position, on texts held out. parameters: numbers in the file."""

    method: str
    target: str
    revision: str
    data: str
    held_out: int
    precision: str
    settings: Sequence[str]
    command: str
    loss: float
    acceptance: Sequence[float]
    parameters: int
    version: str


def write_card(card: Card) -> str:
    """README.md with front matter as model hubs read it."""
    shares = " | ".join(f"{share:.1%}" for share in card.acceptance)
    places = " | ".join(str(i + 1) for i in range(len(card.acceptance)))
    revision = f" (revision {card.revision})" if card.revision else ""
    name = card.method.replace("-", "_")
    lines = [
        "---",
        f"base_model: {card.target}",
        "library_name: speclocal",
        f"tags: [speculative-decoding, {card.method}]",
        "---",
        f"# {KINDS[card.method]} for {card.target}",
        "",
        f"Drafts for `{card.target}`{revision}; on its own it says nothing. {card.parameters / 1e6:.1f} M numbers.",
        "",
        f"- **Data:** {card.data}; {card.held_out} of them were held out to measure.",
        f"- **Precision:** {card.precision}.",
        *(f"- **Settings:** {line}." for line in card.settings),
        f"- **Made with** speclocal {card.version}:",
        "",
        f"      {card.command}",
        "",
        f"On the texts held out: loss {card.loss:.3f}. Share of drafts that are the target's likeliest token, where",
        "all before them are:",
        "",
        f"| position | {places} |",
        "|---|" + "---|" * len(card.acceptance),
        f"| right | {shares} |",
        "",
        f"    speclocal chat --target {card.target} --drafter {name}:FOLDER",
        "",
        "The weights follow the licence of the target, whose words they were made from.",
    ]
    return "\n".join(lines) + "\n"
