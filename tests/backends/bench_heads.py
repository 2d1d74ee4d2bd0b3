"""Golden heads and their targets on a backend, and how far logits are from what public implementations computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from speclocal.core.growth import Beam
from speclocal.core.heads import Spec
from tests.core.golden_heads import arrays, as_safetensors, head_file, stored_rounds, without_heads

TREES = ("eagle1", "eagle2", "eagle2-llama3", "eagle3", "eagle3-fullvocab", "eagle3-narrow", "eagle3-specforge")
CHAINS = ("eagle3-speculators", "eagle31-speculators", "eagle31-fcnorm")
P_EAGLE = "peagle-speculators"
MEDUSA = ("medusa1", "medusa2", "medusa-shared-head")
EAGLE = (*TREES, *CHAINS, P_EAGLE)

Weights = dict[str, np.ndarray]


class Bench:
    """Loads targets and heads of golden folders, each once."""

    def __init__(self, lab: ModuleType, folder: Path, dtype: str = "float32"):
        self._lab, self._folder, self._dtype = lab, folder, dtype
        self._module = import_module(f"speclocal.backends.{lab.__name__.rpartition('_')[2]}.heads")
        self._targets: dict[str, Any] = {}
        self._heads: dict[str, Any] = {}

    def target(self, name: str) -> Any:
        if name not in self._targets:
            folder = without_heads(name, self._place(name + "-target"))
            self._targets[name] = self._lab.load(folder, dtype=self._dtype, device="cpu")
        return self._targets[name]

    def spec(self, name: str) -> Spec:
        file = head_file(name)
        file.target = self.target(name).facts
        return file.identify()[0]

    def head(self, name: str) -> Any:
        """The head as it should be, with an empty cache."""
        if name not in self._heads:
            self._heads[name] = self.build(name)
        head = self._heads[name]
        if name in EAGLE:
            head.truncate(0)
        return head

    def build(
        self,
        name: str,
        change: Callable[[Spec], Spec] = lambda spec: spec,
        spoil: Callable[[Weights], Weights] | None = None,
    ) -> Any:
        """A head of its own. change: of what was identified. spoil: of the weights by normalised name."""
        file = head_file(name)
        spec, names = file.identify()
        folder = as_safetensors(name, self._place(name))
        if spoil is not None:
            spoilt = self._place(name + "-spoilt")
            weights = {names[old]: t for path in folder.glob("*.safetensors") for old, t in _head_of(path).items()}
            weights = spoil({key: t for key, t in weights.items() if key})
            save_file({key: np.ascontiguousarray(t) for key, t in weights.items()}, spoilt / "model.safetensors")
            folder, names = spoilt, {key: key for key in weights}
        return self._module.load(folder, change(spec), names, self.target(name))

    def _place(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir(exist_ok=True)
        return place


def _head_of(path: Path) -> Weights:
    return {} if path.name in ("cases.safetensors", "train.safetensors") or "chain" in path.name else load_file(path)


def states(head: Any, rows: np.ndarray) -> Any:
    """[n, E H] as taps [n, E, H]."""
    return head.ops.array(rows.reshape(len(rows), len(head.spec.taps), -1).tolist())


def host(array: Any) -> np.ndarray:
    return np.array(array.tolist())


def beams(head: Any, name: str, at: str) -> Iterator[tuple[Beam, np.ndarray]]:
    """The levels of a stored round, as `growth.grow` would run them, and their logits."""
    held, before = arrays(name), 1
    for s in count(1):
        if f"{at}step{s}.input_ids" not in held:
            return
        ids, seen = held[f"{at}step{s}.input_ids"], held[f"{at}step{s}.tree_mask"].astype(int)
        above = seen[:, -len(ids) - before : -len(ids)] if s > 1 else np.ones((len(ids), 1), int)
        assert (above.sum(1) == 1).all()
        array = head.ops.array
        beam = Beam(array(ids.tolist()), array(above.argmax(1).tolist()), s, array(seen.tolist()))
        yield beam, held[f"{at}step{s}.logits"]
        before = len(ids)


def chain_beams(head: Any, wanted: np.ndarray) -> Iterator[tuple[Beam, np.ndarray]]:
    """The steps of a greedy chain whose logits are given, the first of them left out."""
    ids = host(head.ids) if head.ids is not None else np.arange(head.spec.draft_vocab)
    array = head.ops.array
    for s in range(1, len(wanted)):
        token = int(ids[wanted[s - 1].argmax()])
        yield Beam(array([token]), array([0]), s, array([[1] * s])), wanted[s : s + 1]


def off(
    head: Any,
    name: str,
    beam: Callable[[Beam], Beam] = lambda beam: beam,
    between: Callable[[Any], None] = lambda head: None,
    shift: int = 0,
) -> float:
    """The largest difference of logits over all stored rounds of all cases.

    beam: changes what is run. between: what happens to the head after each round. shift: rows get the token so many
    places too early.
    """
    held, worst = arrays(name), 0.0

    def compare(got: Any, expected: np.ndarray) -> None:
        nonlocal worst
        assert tuple(got.shape) == expected.shape
        worst = max(worst, float(np.abs(host(got) - expected).max()))

    for rounds in stored_rounds(name).values():
        head.truncate(0)
        fed = 0
        for at in rounds:
            tree = f"{at}features_in" in held
            fresh = held[f"{at}features_in"] if tree else held[f"{at}aux_in"][fed:]
            tokens = held[f"{at}tokens_with_root"] if tree else held[f"{at}tokens_shifted"]
            fed += len(fresh)
            tokens = np.roll(tokens, shift)[-len(fresh) :].tolist()
            wanted = held[f"{at}step0.logits"] if tree else held[f"{at}step_logits"]
            masks = len(wanted) - 1 if name == P_EAGLE else 0
            compare(head.extend(tokens, states(head, fresh), masks), wanted[: 1 + masks])
            for each, logits in () if masks else beams(head, name, at) if tree else chain_beams(head, wanted):
                compare(head.step(beam(each)), logits)
            between(head)
    return worst


def flip(**changes: Any) -> Callable[[Spec], Spec]:
    """A change of what was identified."""
    return lambda spec: replace(spec, **changes)


def ones(*names: str) -> Callable[[Weights], Weights]:
    """Norms whose weights are forgotten."""
    return lambda held: {key: np.ones_like(t) if key in names else t for key, t in held.items()}
