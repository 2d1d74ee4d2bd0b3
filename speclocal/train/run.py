"""One training from nothing: the target writes texts, a drafter learns from them, the result is measured and kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from speclocal.assemble import Shop
from speclocal.core.head_spec import FEATURE
from speclocal.core.interfaces import Batch, Gradients, Target
from speclocal.drafters import read_settings
from speclocal.engine import Load
from speclocal.errors import ModelError, UsageError
from speclocal.loading import check_memory, load_model
from speclocal.sources import Local
from speclocal.sources import Progress as Downloads
from speclocal.text import Text
from speclocal.train import lock
from speclocal.train.estimate import check_disk, check_training
from speclocal.train.jobs import Job, Turns, given_prompts, own_questions, read_openers, read_prompts
from speclocal.train.loop import CURVE, Plan, Progress, Training
from speclocal.train.material import Objective, gather
from speclocal.train.reading import read_conversations, take_in
from speclocal.train.result import Origin, Result, write_result
from speclocal.train.specs import usual_taps
from speclocal.train.states import Recomputed, Stored
from speclocal.train.store import Store
from speclocal.train.writing import Limits, Writer, describe

METHODS = {
    "eagle3": "speclocal.train.objectives.eagle3",
    "p-eagle": "speclocal.train.objectives.p_eagle",
    "medusa": "speclocal.train.objectives.medusa",
    "draft-model": "speclocal.train.objectives.draft_model",
}
TEXT_FILES = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "chat_template*", "*.tiktoken")
"""Of the target's folder: what a draft model needs to be a model by itself."""
MIXED = 4096
"""Rows from which the usual size of every state is taken."""


@dataclass(frozen=True)
class Task:
    """What to train, on what, and where to.

    out: folder of this training. data: of the texts; None: `data` in `out`. texts: so many are written, fewer if some
    are there. features: `store` keeps the target's states on disk, `recompute` computes them in every pass. prompts,
    openers, conversations: files; without prompts the target writes its own questions. options: settings of the
    objective by name. resume: go on with what is in `out` and `data`; without it a folder that holds something is
    refused.
    """

    method: str
    out: Path
    data: Path | None = None
    texts: int = 2000
    features: str = "store"
    prompts: Path | None = None
    conversations: Path | None = None
    openers: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    resume: bool = False
    limits: Limits = field(default_factory=Limits)
    plan: Plan = field(default_factory=Plan)
    command: str = ""


class Show(Protocol):
    """Who watches. Any of these may raise KeyboardInterrupt: nothing that is complete is lost."""

    def note(self, text: str) -> None:
        """Something to know."""

    def written(self, texts: int, wanted: int, tokens: int) -> None:
        """Texts there are, and tokens written since the start."""

    def trained(self, progress: Progress) -> None:
        """After every step."""


def train(load: Load, task: Task, show: Show, downloads: Downloads | None, stop: Callable[[], bool]) -> Result | None:
    """Run a task to its end; None if `stop` said so before: it can be resumed."""
    if task.method not in METHODS:
        raise UsageError("unknown kind of drafter to train", got=task.method, expected=", ".join(METHODS))
    settings = read_settings(import_module(METHODS[task.method]).Settings, task.method, task.options)
    data = task.data or task.out / "data"
    _refuse_occupied(task, data)
    with lock.hold(task.out):
        return _train(load, task, settings, data, show, downloads, stop)


def _train(
    load: Load,
    task: Task,
    settings: Any,
    data: Path,
    show: Show,
    downloads: Downloads | None,
    stop: Callable[[], bool],
) -> Result | None:
    shop = Shop(load, show.note, downloads)
    local = shop.target()
    folder = shop.model(local)
    check_memory({"target": folder}, load, shop.backend, show.note)
    text, target = load_model(folder, shop.backend, load, show.note)
    gradients, batch = shop.backend.load_training(target)
    store = _open_store(task, data, load, local, text, target, shop.backend, show)
    _write_texts(task, store, text, target, gradients, batch, show)
    if not store.texts:
        raise ModelError("no text is left to learn from", got=store.dropped, do="take other --prompts or --openers")
    states = Stored(store) if task.features == "store" else Recomputed(store, batch, gradients)
    material = gather(store, states, target, gradients, folder, min(MIXED, store.rows), task.plan.seed)
    objective: Objective = import_module(METHODS[task.method]).make(settings, material)
    check_training(objective.initial(task.plan.seed), shop.backend.free_memory(load.device), show.note)
    about = {"method": task.method, "target": load.target, "objective": vars(settings)}
    training = Training(target.ops, gradients, objective, store, states, task.plan, task.out, about)
    training.run(show.trained, stop)
    if training.step < training.steps:
        return None
    result = write_result(task.out, _origin(task, load, local, shop, target, settings), training, objective, store)
    if task.method == "draft-model":
        for path in (path for pattern in TEXT_FILES for path in folder.glob(pattern)):
            shutil.copy(path, result.folder)
    return result


def _origin(task: Task, load: Load, local: Local, shop: Shop, target: Target, settings: Any) -> Origin:
    prompts = f"answers to the prompts of {task.prompts.name}" if task.prompts else "questions and answers"
    plan = task.plan
    return Origin(
        method=task.method,
        target=shop.known.base(load.target),
        revision=local.revision,
        precision=str(getattr(target, "dtype", "float32")).removeprefix("torch."),
        backend=shop.backend_name,
        command=task.command,
        prompts=prompts,
        settings=(
            ", ".join(f"{name} {value}" for name, value in vars(settings).items()),
            f"{plan.passes:g} passes, {plan.rows} rows a step, AdamW {plan.optimizer.rate:g}, seed {plan.seed}",
        ),
    )


def _refuse_occupied(task: Task, data: Path) -> None:
    if task.resume or (task.data is not None and not (task.out / CURVE).exists()):
        return
    for folder in (task.out, data):
        if folder.is_dir() and any(path.name != lock.NAME for path in folder.iterdir()):
            raise UsageError(f"{folder} holds something already", do="go on with --resume, or name another --out")


def _open_store(
    task: Task, data: Path, load: Load, local: Local, text: Text, target: Target, backend: ModuleType, show: Show
) -> Store:
    """The texts that are there; refused if they were written otherwise, or if the disk has no room for the rest."""
    taps = (*usual_taps(target.facts.layers), FEATURE)
    target.tap(taps)
    about = {
        "target": load.target,
        "revision": local.revision,
        "prompts": task.prompts.name if task.prompts else None,
        **{name: list(v) if isinstance(v, tuple) else v for name, v in describe(task.limits).items()},
    }
    keep = task.features == "store"
    store = Store(data, about, taps, target.facts.hidden, keep)
    row = len(taps) * target.facts.hidden * 2 if keep else 0
    check_disk(data, max(task.texts - len(store.texts), 0), task.limits, row, show.note)
    return store


def _write_texts(
    task: Task,
    store: Store,
    text: Text,
    target: Target,
    gradients: Gradients,
    batch: Callable[[int], Batch],
    show: Show,
) -> None:
    """Until there are as many texts as the task wants; conversations that exist come first."""

    def tell(tokens: int) -> None:
        show.written(len(store.texts), task.texts, tokens)

    if task.conversations:
        take_in(read_conversations(task.conversations, text), store, target.ops, gradients, batch, tell)
    if len(store.texts) >= task.texts:
        return
    turns = Turns.of(text)
    if task.prompts:
        prompts = read_prompts(task.prompts)
        given = given_prompts(text, prompts, -(-task.texts // len(prompts)))
        every: Iterator[Job] = iter([_fitting(job, turns, task.limits, target.context) for job in given])
    else:
        own = own_questions(text, turns, read_openers(task.openers), task.limits.seed)
        every = (_fitting(job, turns, task.limits, target.context) for job in own)
    jobs = (job for job in every if job.number not in store.jobs)
    slots = min(task.limits.slots, task.texts - len(store.texts))
    writer = Writer(target.ops, batch(slots), gradients.numpy, turns, task.limits, store, tell, slots)
    writer.run(jobs, lambda: len(store.texts) + writer.active >= task.texts)
    if dropped := ", ".join(f"{count} for {why}" for why, count in store.dropped.items()):
        show.note(f"texts left out: {dropped}")


def _fitting(job: Job, turns: Turns, limits: Limits, context: int) -> Job:
    """The job, if its longest text fits the context."""
    question = limits.question - job.given + len(turns.after) if job.asks else 0
    wanted = len(job.ids) + max(question, 0) + limits.answer
    if wanted > context:
        do = "shorten the prompts or openers, or take fewer --answer-tokens"
        raise UsageError("texts may outgrow the target's context", got=f"{wanted} tokens", expected=f"{context}", do=do)
    return job
