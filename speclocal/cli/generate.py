"""`speclocal generate`: answer one prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from speclocal.cli.answer import open_engine, pick_sampling, respond
from speclocal.cli.command import INTERRUPTED, Command, Option
from speclocal.cli.options import (
    model_options,
    open_terminal,
    output_options,
    read_limit,
    read_load,
    read_sampling,
    sampling_options,
)
from speclocal.errors import UsageError
from speclocal.ui.stream import StreamView

if TYPE_CHECKING:
    from speclocal.engine import Answer, Header, Messages


def _prompt_option(*names: str, **kwargs: Any) -> Any:
    return click.option(*names, cls=Option, section="Prompt", **kwargs)


_FILE = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)


@click.command(cls=Command)
@click.argument("prompt", required=False)
@_prompt_option("-f", "--file", type=_FILE, metavar="PATH", help="Read the prompt from a file.")
@_prompt_option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@_prompt_option("--system", metavar="TEXT", help="System message.")
@_prompt_option("--dump-prompt", is_flag=True, help="Print the token ids of the prompt and stop.")
@model_options
@sampling_options
@click.option("--json", "as_json", cls=Option, section="Output", is_flag=True, help="Print one JSON object at the end.")
@output_options
@click.pass_context
def generate(context: click.Context, /, **params: Any) -> None:
    """Answer one PROMPT: an argument, a file, or stdin (a pipe, or -).

    Only the answer goes to stdout. Ctrl-C stops it and keeps what there is (exit code 130).

    \b
      speclocal generate "Why is the sky blue?"
      speclocal generate --file notes.txt --drafter ngram --show-rejected
      git diff | speclocal generate --system "Write a commit message." --temperature 0.7 --seed 1
      speclocal generate --raw "Once upon a time" --max-tokens -1 --json
    """
    terminal = open_terminal(context, params)
    prompt = read_prompt(params["prompt"], params["file"], params["raw"], params["system"])
    overrides, limit, load = read_sampling(context, params), read_limit(params), read_load(context, params)
    from speclocal.engine import Request

    engine = open_engine(terminal, load)
    request = Request(
        prompt,
        raw=params["raw"],
        sampling=pick_sampling(engine, overrides),
        max_tokens=limit,
        stop=params["stop"],
    )
    if params["dump_prompt"]:
        terminal.json(list(engine.stream(request).prompt_ids), indent=None)
        return
    view = None if params["as_json"] else StreamView(terminal, params["show_rejected"])
    answer = respond(engine, request, terminal, view)
    if params["as_json"]:
        terminal.json(as_dict(answer, engine.header))
    if answer.finish_reason == "interrupted":
        context.exit(INTERRUPTED)


def read_prompt(argument: str | None, file: Path | None, raw: bool, system: str | None) -> str | Messages:
    """The prompt from the one place the user named; UsageError if there is none, or more than one."""
    if argument is not None and file is not None:
        raise UsageError("two prompts", got="an argument and --file", do="give one of them")
    if raw and system is not None:
        raise UsageError("--system needs the chat template, which --raw leaves out", do="give one of them")
    if argument is not None and argument != "-":
        text = argument
    elif file is not None and str(file) != "-":
        text = _decode(file.read_bytes(), str(file), raw)
    elif argument is None and file is None and sys.stdin.isatty():
        raise UsageError("no prompt", do='try: speclocal generate "Why is the sky blue?", or speclocal chat')
    else:
        text = _decode(sys.stdin.buffer.read(), "stdin", raw)
    if not text and not raw:  # raw, it may still start from the model's start token: the engine knows
        raise UsageError("the prompt is empty", expected="some text")
    if system is None:
        return text
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _decode(data: bytes, name: str, raw: bool) -> str:
    """Text of a file or pipe. Its last line end is only how files end, unless the text is to be continued raw."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is no text", got=f"byte {error.start} = {data[error.start]:#04x}", expected="UTF-8"
        ) from error
    return text if raw else text.removesuffix("\n").removesuffix("\r")


def as_dict(answer: Answer, header: Header) -> dict[str, Any]:
    """The answer as one JSON object."""
    active = answer.stats.drafted > 0
    notices = [*header.notices, *answer.notices]
    if not active:
        notices.append("no drafter" if header.drafter == "none" else "the drafter proposed nothing")
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": len(answer.token_ids),
            "cached_tokens": answer.cached_tokens,
        },
        "tokens": [
            {"id": token, "origin": str(origin)} for token, origin in zip(answer.token_ids, answer.origins, strict=True)
        ],
        "speculation": {
            "active": active,
            "drafter": header.drafter,
            "head": header.head,
            "verify": header.verify,
            "lossless": header.lossless,
            "caveat": header.caveat,
            "notices": notices,
            **answer.stats.as_dict(),
        },
        "seed": answer.seed,
        "model": {
            "target": header.target,
            "revision": header.revision,
            "backend": header.backend,
            "device": header.device,
            "dtype": header.dtype,
            "context": header.context,
            "kv_bits": header.kv_bits,
            "vocabulary": header.vocabulary,
            "end_tokens": list(header.end_tokens),
        },
    }
