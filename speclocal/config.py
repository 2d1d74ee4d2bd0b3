"""Defaults from the user file and the environment. Precedence: flag > SPECLOCAL_* > user file > built-in."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from speclocal.errors import UsageError

PREFIX = "SPECLOCAL_"


def user_file() -> Path:
    """Where the user's settings are: SPECLOCAL_CONFIG, else the platform's place for them."""
    if chosen := os.environ.get(f"{PREFIX}CONFIG"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    elif sys.platform == "win32":
        base = Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    else:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return base / "speclocal" / "config.toml"


def defaults(known: Mapping[str, Collection[str]], lists: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """A `default_map` for click: command → option → value.

    `known` names the options of every command, as Python spells them; those in `lists` may be given several times.
    In the file an option at the top serves every command that has it, one in a table `[command]` only that command;
    `SPECLOCAL_<OPTION>` beats both.
    """
    found = _read(user_file())
    shared = {_option(key): value for key, value in found.items() if not isinstance(value, dict) or key not in known}
    _refuse_unknown(shared, set().union(*known.values()), "")
    result: dict[str, dict[str, Any]] = {}
    for command, options in known.items():
        table = {_option(key): value for key, value in found.get(command, {}).items()} if command in found else {}
        _refuse_unknown(table, options, f"[{command}] ")
        chosen = {key: value for key, value in shared.items() if key in options} | table
        for option in options:
            if (value := os.environ.get(PREFIX + option.upper())) not in (None, ""):
                chosen[option] = value
        result[command] = {key: _listed(value) if key in lists else value for key, value in chosen.items()}
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get(f"{PREFIX}CONFIG"):
            raise UsageError("no such settings file", got=str(path), do="check SPECLOCAL_CONFIG") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"settings file {path} cannot be read", got=str(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"settings file {path} is not TOML", got=str(error)) from error


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _option(key: str) -> str:
    return key.replace("-", "_")


def _refuse_unknown(options: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for option in options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"perhaps {near[0]}; known are: " if near else ""
            raise UsageError(
                f"unknown setting in {user_file()}",
                got=f"{where}{option}",
                expected=hint + ", ".join(sorted(known)),
            )
