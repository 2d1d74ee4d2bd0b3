"""Values of options: read, and checked by whoever defines what is possible."""

from __future__ import annotations

from typing import Any

import click

from speclocal.core.sampling import Sampling
from speclocal.errors import UsageError


def number(text: str) -> int | float | str:
    """The number a text means; the text itself if none, so that whoever checks can quote it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


class Field(click.ParamType):
    """The value of a field of Sampling, with Sampling's own check."""

    name = "number"

    def __init__(self, field: str):
        self._field = field

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        value = number(value) if isinstance(value, str) else value
        try:
            Sampling(**{self._field: value})
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return value


class Pair(click.ParamType):
    """KEY=VALUE."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        key, equals, rest = value.partition("=")
        if not (key.strip() and equals):
            self.fail(f"got {value!r}, expected {self.name}", param, ctx)
        return key.strip(), rest.strip()


class Bias(Pair):
    """ID=VALUE."""

    name = "id=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        token, bias = map(number, super().convert(value, param, ctx))
        try:
            Sampling(logit_bias={token: bias})  # type: ignore[dict-item]
        except UsageError as error:
            self.fail(str(error), param, ctx)
        return token, bias
