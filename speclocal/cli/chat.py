"""`speclocal chat`: a conversation that Ctrl-C, typing errors and failures do not end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speclocal.cli.answer import describe, open_engine, pick_sampling, respond
from speclocal.cli.command import Command, Option, explain
from speclocal.cli.options import (
    SAMPLING,
    model_options,
    open_terminal,
    output_options,
    read_limit,
    read_load,
    read_sampling,
    sampling_options,
)
from speclocal.cli.values import number
from speclocal.core.sampling import Sampling
from speclocal.errors import SpeclocalError, UsageError
from speclocal.ui.interrupt import Interrupt
from speclocal.ui.stream import StreamView, summary
from speclocal.ui.terminal import Terminal

if TYPE_CHECKING:
    from speclocal.cli import slash
    from speclocal.cli.slash import Mistyped
    from speclocal.engine import Answer, Engine
    from speclocal.ui.prompt import Message, Prompt

PATIENCE = 2
"""Impatient people press Ctrl-C twice; only the third press gives up the conversation with the answer."""


@click.command(cls=Command)
@click.option("--system", metavar="TEXT", cls=Option, section="Prompt", help="System message.")
@model_options
@sampling_options
@output_options
@click.pass_context
def chat(context: click.Context, /, **params: Any) -> None:
    """Talk with a model. /help lists the commands inside.

    With stdin from a pipe each line is a message, and stdout holds the answers only.

    \b
      speclocal chat
      speclocal chat --target ./my-model --drafter draft_model --draft-model smollm2-135m
      speclocal chat --system "Answer in one sentence." --temperature 0.7
    """
    from speclocal.cli.slash import NAMES
    from speclocal.ui.prompt import open_prompt

    terminal = open_terminal(context, params)
    overrides, limit, load = read_sampling(context, params), read_limit(params), read_load(context, params)
    engine = open_engine(terminal, load)
    terminal.remark((describe(engine.header), None))
    terminal.remark(("Enter sends, /help explains, /exit leaves", None))
    view = StreamView(terminal, params["show_rejected"])
    session = Chat(engine, terminal, view, open_prompt(NAMES), overrides, limit, params["stop"], params["system"])
    session.run()


class Chat:
    """A conversation: its messages, and what the user changed on the way."""

    def __init__(
        self,
        engine: Engine,
        terminal: Terminal,
        view: StreamView,
        prompt: Prompt,
        overrides: Mapping[str, Any],
        limit: int | None = 512,
        stop: tuple[str, ...] = (),
        system: str | None = None,
    ):
        self._engine, self._terminal, self._view, self._prompt = engine, terminal, view, prompt
        self._overrides = dict(overrides)
        self._limit, self._stop, self._system = limit, stop, system
        self._messages: list[dict[str, str]] = []
        self._last: Answer | None = None
        self._open = True

    def run(self) -> None:
        """Until the user leaves."""
        if not self._prompt.editable:
            return self._converse(lambda: False)
        # Answer and editor take Ctrl-C for themselves; one that falls between them counts as pressed in the editor.
        with Interrupt(patience=sys.maxsize) as between:
            self._converse(between.take)

    def _converse(self, pressed: Callable[[], bool]) -> None:
        draft, warned = "", False
        while self._open:
            try:
                if pressed():
                    raise KeyboardInterrupt
                message = self._prompt.read(draft)
            except EOFError:
                return
            except KeyboardInterrupt:
                if warned:
                    raise
                draft, warned = "", True
                self._terminal.note("Ctrl-C again, Ctrl-D or /exit leaves")
                continue
            draft, warned = self._handle(message), False

    def _handle(self, message: Message) -> str:
        """Do what a line asks for; returns the text to offer for editing next."""
        from speclocal.cli import slash

        try:
            meaning = slash.understand(message)
            if isinstance(meaning, slash.Command):
                return self._command(meaning, message)
            if isinstance(meaning, slash.Mistyped):
                return self._hint(meaning, message)
            return self._say(meaning, self._messages) if meaning.strip() else ""
        except (SpeclocalError, OSError) as error:
            if not self._prompt.editable:
                raise
            self._terminal.error(explain(error))
            return message.text

    def _command(self, meaning: slash.Command, message: Message) -> str:
        command: Callable[[str], str | None] = getattr(self, f"_do_{meaning.name}")
        if not self._prompt.editable:
            return command(meaning.rest) or ""
        try:
            with Interrupt(patience=0):
                return command(meaning.rest) or ""
        except KeyboardInterrupt:  # ends what the command does, a download say, and not the conversation
            self._terminal.note(f"/{meaning.name} was interrupted")
            return message.text

    def _hint(self, meaning: Mistyped, message: Message) -> str:
        if not self._prompt.editable:
            raise UsageError(meaning.hint)
        self._terminal.note(meaning.hint)
        return message.text

    def _say(self, text: str, before: list[dict[str, str]], seed: int | None = None) -> str:
        """Answer `text` after the conversation `before`; both become the conversation once there is an answer."""
        from speclocal.engine import Request

        messages = [*before, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        overrides = self._overrides if seed is None else {**self._overrides, "seed": seed}
        request = Request(
            [*system, *messages],
            sampling=pick_sampling(self._engine, overrides),
            max_tokens=self._limit,
            stop=self._stop,
        )
        answer = respond(self._engine, request, self._terminal, self._view, PATIENCE)
        if answer.finish_reason == "interrupted" and not answer.text:
            return text
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._last = answer
        return ""

    def _do_help(self, _: str) -> None:
        from speclocal.cli.slash import HELP

        self._terminal.reply(HELP)

    def _do_exit(self, _: str) -> None:
        self._open = False

    def _do_reset(self, _: str) -> None:
        self._messages, self._last = [], None
        self._terminal.note("the conversation is empty")

    def _do_undo(self, _: str) -> str:
        text = self._last_message()
        self._messages = self._messages[:-2]
        self._terminal.note("took back the last message and its answer")
        return text

    def _do_retry(self, _: str) -> str:
        text = self._last_message()
        seed = None if self._last is None else (self._last.seed + 1) % 2**64
        return self._say(text, self._messages[:-2], seed)

    def _last_message(self) -> str:
        if not self._messages:
            raise UsageError("nothing was said yet")
        return self._messages[-2]["content"]

    def _do_system(self, text: str) -> None:
        self._system = text or None
        self._terminal.note("the system message is set" if text else "no system message")

    def _do_stats(self, _: str) -> None:
        if self._last is None:
            raise UsageError("no answer yet")
        self._terminal.reply(summary(self._last, self._terminal.err.pick(" · ", " | ")))
        by_position = self._last.stats.as_dict()["acceptance_by_position"]
        if by_position:
            self._terminal.reply("acceptance by position: " + ", ".join(f"{share:.0%}" for share in by_position))

    def _do_drafter(self, text: str) -> None:
        if text:
            name, *pairs = text.split()
            self._engine.set_drafter(name, _pairs(pairs))
        self._terminal.reply(describe(self._engine.header))

    def _do_set(self, text: str) -> None:
        changed, limit = dict(self._overrides), self._limit
        for name, value in _pairs(text.split()).items():
            field = {"temp": "temperature"}.get(name, name).replace("-", "_")
            if field == "max_tokens":
                limit = _limit(value)
            elif field not in SAMPLING:
                raise UsageError(f"no setting {name}", expected=f"one of {', '.join(SAMPLING)}, max_tokens")
            elif value == "default":
                changed.pop(field, None)
            else:
                changed[field] = number(value)
        Sampling(**changed)
        self._overrides, self._limit = changed, limit
        rest = "the rest as the model recommends"
        shown = [f"{name}={value}" for name, value in changed.items()]
        shown.append(f"max_tokens={-1 if limit is None else limit}")
        self._terminal.reply(f"{', '.join(shown)}; {rest}")

    def _do_save(self, text: str) -> None:
        path = _path(text)
        saved = {"system": self._system, "messages": self._messages}
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(part, path)
        self._terminal.note(f"saved {len(self._messages)} messages to {path}")

    def _do_load(self, text: str) -> None:
        path = _path(text)
        self._system, self._messages = _conversation(path)
        self._last = None
        self._terminal.note(f"{len(self._messages)} messages from {path}")

    def _do_multi(self, _: str) -> str:
        try:
            text = self._prompt.read(multi=True).text
        except (KeyboardInterrupt, EOFError):
            return ""
        return self._say(text, self._messages) if text.strip() else ""


def _pairs(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise UsageError("a setting is missing", got=repr(name), expected="name=value")
    return {name: value for name, _, value in pairs}


def _limit(text: str) -> int | None:
    value = 512 if text == "default" else number(text)
    if not isinstance(value, int) or value < -1:
        raise UsageError("impossible max_tokens", got=text, expected="a whole number from 0 up, or -1 for no limit")
    return None if value == -1 else value


def _path(text: str) -> Path:
    if not text:
        raise UsageError("no file named", do="for example: /save talk.json")
    return Path(text).expanduser()


def _conversation(path: Path) -> tuple[str | None, list[dict[str, str]]]:
    """System message and messages of a saved conversation."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        system, messages = saved["system"], [(m["role"], m["content"]) for m in saved["messages"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no saved conversation", got=str(error), expected="what /save writes") from error
    expected = ["user", "assistant"] * (len(messages) // 2)
    texts = [system or "", *(content for _, content in messages)]
    if [role for role, _ in messages] != expected or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{path} is no conversation", expected="user and assistant in turn, each with a text")
    return system, [{"role": role, "content": content} for role, content in messages]
