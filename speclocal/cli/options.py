"""Options that commands share, and how they become the settings of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from speclocal.cli.command import Option, Session, debug_option
from speclocal.cli.values import Bias, Field, Pair
from speclocal.core.sampling import Sampling
from speclocal.core.verify import RULES
from speclocal.errors import UsageError
from speclocal.ui.terminal import Terminal

if TYPE_CHECKING:
    from speclocal.engine import Load

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

SHORTCUTS = {
    "num_draft_tokens": "depth",
    "tree_nodes": "nodes",
    "tree_topk": "topk",
    "tree_depth": "depth",
    "ngram_min": "min",
    "ngram_max": "max",
}
"""Options that are another word for a setting of the drafter."""

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "seed",
)
"""Fields of Sampling that have an option of the same name."""


def _all(*options: Decorator) -> Decorator:
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def _option(section: str, *names: str, **kwargs: Any) -> Decorator:
    return click.option(*names, cls=Option, section=section, **kwargs)


def _model(*names: str, **kwargs: Any) -> Decorator:
    return _option("Model", *names, **kwargs)


def _drafting(*names: str, **kwargs: Any) -> Decorator:
    return _option("Drafting (what the drafter does not know is refused)", *names, **kwargs)


def _sampling(*names: str, **kwargs: Any) -> Decorator:
    return _option("Sampling (default: what the model recommends)", *names, **kwargs)


def _field(name: str, *aliases: str, help: str) -> Decorator:
    return _sampling("--" + name.replace("_", "-"), *aliases, name, type=Field(name), metavar="N", help=help)


def _output(*names: str, **kwargs: Any) -> Decorator:
    return _option("Output", *names, **kwargs)


def _flag(kind: Callable[..., Decorator], *names: str, help: str) -> Decorator:
    return kind(*names, is_flag=True, help=help)


_whole = click.IntRange(min=0)
_choice = click.Choice


target_options = _all(
    _model(
        "--target",
        default="smollm2-135m",
        show_default=True,
        metavar="MODEL",
        help="The model that answers: alias, hub id (org/name@revision), local folder, or GGUF file.",
    ),
    _model(
        "--backend", type=_choice(["auto", "torch", "mlx"]), default="auto", show_default=True, help="What runs it."
    ),
    _model(
        "--dtype",
        type=_choice(["auto", "float32", "bfloat16", "float16"]),
        default="auto",
        show_default=True,
        help="Number type of the weights.",
    ),
    _model("--device", default="auto", show_default=True, metavar="NAME", help="auto, cpu, cuda, cuda:1."),
    _model(
        "--context", type=click.IntRange(min=1), metavar="N", help="Tokens to make room for.  [default: the model's]"
    ),
    _model(
        "--kv-bits",
        type=_choice([4, 8]),
        help="Keys and values in so many bits: less memory, other text than with full precision; drafts stay exact. "
        "A draft model keeps full precision.",
    ),
    _model(
        "--wired-limit",
        type=click.FloatRange(min=0, min_open=True),
        metavar="GIB",
        help="MLX on macOS only: memory that the system may not swap out; off by default.",
    ),
    _flag(_model, "--offline", help="No network at all; only what is on disk."),
    _flag(_model, "--allow-pickle", help="Accept weights in pickle files (tensors only)."),
    _flag(_model, "--trust-remote-code", help="Run Python code that comes with the model."),
)

drafting_options = _all(
    _drafting(
        "--drafter",
        show_default="eagle3+ngram where a head comes with speclocal, else ngram; draft_model with --draft-model",
        metavar="NAME[:SOURCE]",
        help="none, ngram, draft_model; eagle3, p-eagle, eagle, medusa: heads made for one target; auto: the best of "
        "these; eagle3+ngram: lookup where it is sure, else the head. SOURCE (hub id, folder, alias) is where the "
        "weights are, if not where the catalogue knows.",
    ),
    _drafting("--draft-model", metavar="MODEL", help="Smaller model of the same tokenizer, for draft_model."),
    _drafting("-o", "--option", "options", type=Pair(), multiple=True, help="A setting of the drafter by name."),
    _drafting(
        "--num-draft-tokens",
        "--draft-max",
        type=_whole,
        metavar="N",
        help="Longest draft; 0 is plain decoding.",
    ),
    _drafting("--tree-nodes", type=_whole, metavar="N", help="Most drafted tokens a round."),
    _drafting("--tree-topk", type=_whole, metavar="N", help="Most alternatives a position."),
    _drafting("--tree-depth", type=_whole, metavar="N", help="The same as --num-draft-tokens, for trees."),
    _drafting("--ngram-min", type=_whole, metavar="N", help="Shortest match."),
    _drafting("--ngram-max", type=_whole, metavar="N", help="Longest match."),
    _drafting(
        "--verify",
        type=_choice(list(RULES)),
        default=RULES[0],
        show_default=True,
        help="Rule that checks drafts; all but typical, which is not lossless, keep the model's own law.",
    ),
)

model_options = _all(target_options, drafting_options)

sampling_options = _all(
    _field("temperature", "--temp", help="0 always takes the likeliest token."),
    _flag(_sampling, "--greedy", help="The same as --temperature 0."),
    _field("top_k", help="Only the N likeliest tokens; 0 keeps all."),
    _field("top_p", help="Only the likeliest tokens that make up this share; 1 keeps all."),
    _field("min_p", help="Only tokens at least this share as likely as the likeliest; 0 keeps all."),
    _field("repetition_penalty", help="Weakens tokens seen in prompt or answer; 1 is off."),
    _field("presence_penalty", help="Taken once from tokens of the answer; 0 is off."),
    _field("frequency_penalty", help="Taken for each occurrence in the answer; 0 is off."),
    _sampling("--logit-bias", type=Bias(), multiple=True, help="Added to the logit of a token id."),
    _field("seed", help="Same seed and settings, same text, with any drafter."),
    _field("min_tokens", help="No end of the answer before so many tokens."),
    _sampling(
        "--max-tokens",
        type=click.IntRange(min=-1),
        default=512,
        show_default=True,
        metavar="N",
        help="Most tokens of an answer; -1: until the context is full.",
    ),
    _sampling("--stop", multiple=True, metavar="TEXT", help="End the answer before this text; may be repeated."),
)

output_options = _all(
    _output(
        "--color",
        type=_choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="auto: on a terminal, unless NO_COLOR is set.",
    ),
    _flag(_output, "--plain", help="No colours, no marks."),
    _flag(_output, "--show-rejected", help="Also show, struck through, the drafts the model refused."),
    _flag(_output, "--raw-output", help="Pass control characters of the answer on; default: made visible, pipes too."),
    _flag(_output, "--quiet", help="No notes, no legend, no statistics."),
    _flag(_output, "--verbose", help="Say what is really in use."),
    debug_option,
)


def open_terminal(context: click.Context, params: Mapping[str, Any]) -> Terminal:
    """The console as the output options want it; errors go there too from now on."""
    terminal = Terminal(
        plain=params["plain"],
        color=params["color"],
        raw=params["raw_output"],
        quiet=params["quiet"],
        verbose=params["verbose"],
    )
    context.ensure_object(Session).terminal = terminal
    return terminal


def was_typed(context: click.Context, name: str) -> bool:
    """True if the option was written on the command line, which beats the environment and the user file."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def read_load(context: click.Context, params: Mapping[str, Any]) -> Load:
    """What to load, from the model options."""
    plain = params["num_draft_tokens"] == 0
    return replace(
        read_target(params),
        drafter="none" if plain else _drafter(context, params),
        options={} if plain else _drafter_options(context, params),
        verify=params["verify"],
    )


def read_target(params: Mapping[str, Any]) -> Load:
    """The target to load, from the target options."""
    from speclocal.engine import Load

    return Load(
        **{name: params[name] for name in ("target", "backend", "dtype", "device", "context")},
        **{name: params[name] for name in ("kv_bits", "wired_limit", "offline", "allow_pickle", "trust_remote_code")},
    )


def _drafter(context: click.Context, params: Mapping[str, Any]) -> str | None:
    """`method` or `method:source`; `--draft-model` is a source for the draft_model method."""
    drafter, model = params["drafter"], params["draft_model"]
    names = [name for name in ("drafter", "draft_model") if params[name]]
    if len(names) == 2 and drafter != "draft_model":
        typed = [name for name in names if was_typed(context, name)]
        if len(typed) == 2:
            raise UsageError(
                "--draft-model without effect", got=f"--drafter {drafter}", expected="--drafter draft_model"
            )
        if typed == ["drafter"]:
            return str(drafter)
    return f"draft_model:{model}" if model else drafter


def _drafter_options(context: click.Context, params: Mapping[str, Any]) -> dict[str, str]:
    result: dict[str, str] = {}
    for typed in (False, True):
        layer = dict(params["options"]) if typed is was_typed(context, "options") else {}
        for name, key in SHORTCUTS.items():
            if params[name] is None or typed is not was_typed(context, name):
                continue
            value = str(params[name])
            if layer.setdefault(key, value) != value:
                option = "--" + name.replace("_", "-")
                raise UsageError(
                    f"two values for the drafter's {key}",
                    got=f"{layer[key]} and {value} ({option})",
                    do="give one of them",
                )
        result |= layer
    return result


def read_sampling(context: click.Context, params: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of Sampling the user set; those alone differ from what the model recommends."""
    overrides = {name: params[name] for name in SAMPLING if params[name] is not None}
    if params["logit_bias"]:
        overrides["logit_bias"] = dict(params["logit_bias"])
    if params["greedy"]:
        if overrides.get("temperature") and was_typed(context, "temperature"):
            raise UsageError("--greedy contradicts --temperature", got=overrides["temperature"], do="give one of them")
        overrides["temperature"] = 0
    Sampling(**overrides)
    return overrides


def read_limit(params: Mapping[str, Any]) -> int | None:
    """Most tokens of an answer; None: until the context is full."""
    return None if params["max_tokens"] == -1 else params["max_tokens"]
