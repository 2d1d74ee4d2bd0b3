"""`speclocal completion`: tab completion for the user's shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from speclocal.cli.command import Command, debug_option
from speclocal.ui.terminal import Terminal


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@debug_option
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands and options.

    \b
      eval "$(speclocal completion bash)"              in ~/.bashrc
      eval "$(speclocal completion zsh)"               in ~/.zshrc
      speclocal completion fish > ~/.config/fish/completions/speclocal.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows these three shells"
    script = kind(context.find_root().command, {}, "speclocal", "_SPECLOCAL_COMPLETE").source()
    Terminal(color="never", raw=True).line(script)
