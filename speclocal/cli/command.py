"""How speclocal's commands differ from click's: options in sections, and every failure in one line."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from speclocal import config
from speclocal.errors import SpeclocalError
from speclocal.ui.terminal import Terminal

INTERRUPTED = 130


@dataclass
class Session:
    """What the outermost handler needs to know of the command that failed."""

    debug: bool = False
    terminal: Terminal | None = None


def _set_debug(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Session).debug = True


class Option(click.Option):
    """An option that belongs to a section of the help."""

    def __init__(self, *args: Any, section: str = "Output", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.section = section


debug_option = click.option(
    "--debug",
    cls=Option,
    section="Output",
    is_flag=True,
    expose_value=False,
    envvar="SPECLOCAL_DEBUG",
    callback=_set_debug,
    help="Show the traceback of a failure (also SPECLOCAL_DEBUG=1).",
)
"""Understood before and after the command's name."""


class Command(click.Command):
    """A command whose help shows options by section."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(context):
            record = param.get_help_record(context)
            if record and (record[1] or not isinstance(param, click.Argument)):
                sections.setdefault(getattr(param, "section", "Output"), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records, col_max=34)


class Group(click.Group):
    """The program: commands from a table, imported when needed, and the one place where failures end."""

    def __init__(self, *args: Any, table: Mapping[str, str], **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self._table:
            return None
        module, attribute = self._table[name].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def settings(self, context: click.Context) -> dict[str, dict[str, Any]]:
        """What the environment and the user file set, by command; click ranks it between flags and defaults."""
        commands = {name: self.get_command(context, name) for name in self._table}
        options = {
            name: [p for p in command.params if isinstance(p, Option) and p.section != "Prompt"]
            for name, command in commands.items()
            if isinstance(command, Command)
        }
        names = {command: [str(p.name) for p in params] for command, params in options.items()}
        return config.defaults(names, {str(p.name) for params in options.values() for p in params if p.multiple})

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Any:
        """Run and exit: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C."""
        session = extra["obj"] = extra.get("obj") or Session()
        extra["standalone_mode"] = False
        try:
            code = super().main(args, prog_name or "speclocal", **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except (SpeclocalError, click.ClickException, MemoryError, OSError) as error:
            if session.debug:
                raise
            terminal = session.terminal or Terminal()
            terminal.restore()
            terminal.error(explain(error))
            code = getattr(error, "exit_code", 1)
            _drop_unwritten()
        except click.Abort:
            if session.terminal:
                session.terminal.restore()
            code = INTERRUPTED
        raise SystemExit(code if isinstance(code, int) else 0)


def _drop_unwritten() -> None:
    """Text that stdout cannot take must not fail once more when Python flushes it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explain(error: BaseException) -> str:
    """A failure in one line."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "speclocal"
        return f"{error.format_message().rstrip('.')}; see {path} --help"
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, MemoryError):
        return "out of memory; take a smaller model or --context, or close other programs"
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        hint = "; free some space and start again" if error.errno == errno.ENOSPC else ""
        return f"{(error.strerror or str(error)).lower()}{where}{hint}"
    return str(error)
