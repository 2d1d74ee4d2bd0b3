"""The command line: one file per command, loaded from this table."""

from __future__ import annotations

import click

from speclocal import __version__
from speclocal.cli.command import Group, debug_option

COMMANDS = {
    "generate": "speclocal.cli.generate:generate",
    "chat": "speclocal.cli.chat:chat",
    "train": "speclocal.cli.train:train",
    "models": "speclocal.cli.models:models",
    "doctor": "speclocal.cli.doctor:doctor",
    "completion": "speclocal.cli.completion:completion",
}


@click.group("speclocal", cls=Group, table=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="speclocal", message="%(prog)s %(version)s")
@debug_option
@click.pass_context
def main(context: click.Context) -> None:
    """Exact speculative decoding for language models on your own machine.

    A small guesser drafts tokens, the model checks them all in one pass: the same answer, sooner.

    \b
      speclocal generate "Why is the sky blue?"
      speclocal chat --target smollm2-135m --drafter ngram
      speclocal models
    """
    if isinstance(context.command, Group):
        context.default_map = context.command.settings(context)
