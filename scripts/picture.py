#!/usr/bin/env python
"""Makes docs/answer.svg, the picture in the README: a real run of `speclocal generate` in colour."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PROMPT = "Why is the sky blue?"
COMMAND = ["generate", PROMPT, "--color", "always", "--show-rejected", "--max-tokens", "100"]
WIDTH = 100


def main() -> None:
    """Run, colour, save."""
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    run = subprocess.run(
        [sys.executable, "-m", "speclocal", *COMMAND], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
    console.print(Text(f'$ speclocal generate "{PROMPT}" --show-rejected', style="bold"))
    console.print(Text.from_ansi(run.stdout.decode()))
    out = Path(__file__).parents[1] / "docs" / "answer.svg"
    out.parent.mkdir(exist_ok=True)
    console.save_svg(str(out), title="speclocal")


if __name__ == "__main__":
    main()
