"""Training on every backend: the same losses and gradients, the same steps, and the head that inference runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from speclocal.core.growth import Beam
from speclocal.core.interfaces import Gradients
from speclocal.train.eagle_body import EagleBody, Kept, causal
from speclocal.train.material import Outcome, Params, Rows
from speclocal.train.objectives.eagle3 import Objective, Settings
from speclocal.train.optimizer import AdamW
from speclocal.train.specs import eagle_spec
from speclocal.train.vocabulary import DraftVocabulary
from tests.backends.bench_heads import Bench, host, states
from tests.backends.golden_training import material, states_of, trained
from tests.conftest import INSTALLED
from tests.core.golden_heads import target_folder

BACKENDS = ("torch", "mlx")
if set(BACKENDS) - set(INSTALLED):
    pytest.skip("needs the torch and the mlx backend", allow_module_level=True)

TOLERANCE = 2e-5
SHOWS = 100 * TOLERANCE
NAME, TAPS = "eagle3", (2, 4, 5)
TEXTS, LENGTH, DRAFT = 3, 20, 48


@dataclass
class Side:
    """One backend's share of a comparison."""

    name: str
    objective: Objective
    gradients: Gradients
    params: Params

    def loss(self, rows: Rows) -> tuple[Outcome, dict[str, np.ndarray]]:
        """What the objective gives, and the gradients on the host."""

        def loss(params: Params) -> tuple[Any, Outcome]:
            outcome = self.objective.loss(params, rows, 1.0)
            return outcome.total, outcome

        outcome, grads = self.gradients.of(loss, self.params)
        return outcome, {key: self.gradients.numpy(g) for key, g in grads.items()}

    def train(self, rows: Rows, optimizer: AdamW, steps: int) -> list[float]:
        """The loss before each step."""
        xp, state, losses = self.objective._material.ops.xp, optimizer.start(self.params), []
        for step in range(1, steps + 1):

            def loss(params: Params) -> tuple[Any, Any]:
                total = self.objective.loss(params, rows, 1.0).total
                return total, total

            total, grads = self.gradients.of(loss, self.params)
            rate = optimizer.rate_at(step / steps)
            self.params, state, _ = optimizer.step(xp, self.params, grads, state, step, rate)
            self.gradients.done(*self.params.values(), *state["m"].values(), *state["v"].values())
            losses.append(number(total))
        return losses


@pytest.fixture(scope="module")
def benches(tmp_path_factory) -> dict[str, Bench]:
    labs = {name: import_module(f"tests.backends.tiny_{name}") for name in BACKENDS}
    return {name: Bench(lab, tmp_path_factory.mktemp(name)) for name, lab in labs.items()}


@pytest.fixture(scope="module")
def rows(benches) -> Rows:
    """Three texts, the last of them short, whose second halves the target wrote."""
    target = benches["torch"].target(NAME)
    ids = np.random.default_rng(0).integers(0, target.vocab, (TEXTS, LENGTH + 1))
    found = states_of(target, ids[:, :-1], TAPS)
    target.tap(())
    logits = host(target.unembed(target.ops.array(found[..., -1, :])))
    own = np.broadcast_to(np.arange(LENGTH) >= LENGTH // 2, (TEXTS, LENGTH)).copy()
    tokens, best = ids[:, 1:].astype(np.int32), logits.argmax(-1).astype(np.int32)
    tokens[-1, -4:], best[-1, -4:], own[-1, -4:] = -1, -1, False
    return Rows(tokens, found.astype(np.float16), best, own)


@pytest.fixture
def sides(benches) -> Callable[..., list[Side]]:
    """(settings, **changes of the head) -> the same objective on both backends, with torch's initial tensors."""

    def make(settings: Settings, **changes: Any) -> list[Side]:
        made, initial = [], None
        for name in BACKENDS:
            target = benches[name].target(NAME)
            gradients, _ = import_module(f"speclocal.backends.{name}").load_training(target)
            draw = np.random.default_rng(1)
            scales = draw.uniform(0.5, 2.0, (len(TAPS) + 1, target.facts.hidden)).astype(np.float32)
            given = material(target, NAME, TAPS, array=gradients.array, numpy=gradients.numpy, scales=scales)
            config = json.loads((target_folder(NAME) / "config.json").read_text())
            spec = replace(eagle_spec("eagle3", config, target.facts, TAPS, DRAFT), **changes)
            vocabulary = DraftVocabulary.of(draw.integers(0, 1000, target.facts.vocab), DRAFT)
            objective = Objective(settings, spec, given, vocabulary)
            initial = initial or objective.initial(seed=3)
            made.append(Side(name, objective, gradients, {key: gradients.array(t) for key, t in initial.items()}))
        return made

    return make


def number(array: Any) -> float:
    return float(host(array))


def same(sides: list[Side], rows: Rows) -> None:
    """Loss, losses of the steps, hits and gradients."""
    (one, grads), (other, others) = (side.loss(rows) for side in sides)
    assert len(one.losses) == len(other.losses) == sides[0].objective.settings.steps
    for a, b in zip((one.total, *one.losses), (other.total, *other.losses), strict=True):
        assert abs(number(a) - number(b)) <= TOLERANCE * max(1.0, abs(number(a))), "losses differ"
    for a, b in zip(one.hits, other.hits, strict=True):
        assert host(a).tolist() == host(b).tolist(), "hits differ"
    assert set(grads) == set(others)
    for key, g in grads.items():
        assert np.abs(g).max() > 0, f"{key} is not trained"
        assert g.shape == others[key].shape
        assert np.abs(g - others[key]).max() <= 10 * TOLERANCE * np.abs(g).max(), f"gradients of {key} differ"


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": ({}, {}),
    "divergence": ({"divergence": "kl", "count": "all", "skip_outside": False}, {}),
    "norms": ({}, {"qk_norm": True, "fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    "two layers": ({}, {"layers": 2, "norm_before_fc": True, "attention_bias": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_same_losses_and_gradients(sides, rows, name):
    settings, changes = VARIANTS[name]
    same(sides(Settings(steps=3, **settings), **changes), rows)


def test_initial_tensors_are_the_same(sides):
    one, other = (side.objective.initial(seed=5) for side in sides(Settings()))
    assert set(one) == set(other)
    for key, tensor in one.items():
        assert np.abs(tensor - other[key]).max() <= TOLERANCE, key


@pytest.mark.parametrize("count", [0, 1])
def test_steps_where_nothing_counts(sides, rows, count):
    """A batch with fewer rows of the target's own than steps, or none at all."""
    own = np.zeros_like(rows.own)
    own[0, 1 : 1 + count] = True
    found = [side.loss(replace(rows, own=own)) for side in sides(Settings(steps=3))]
    for outcome, grads in found:
        assert [len(host(hits)) for hits in outcome.hits] == [count, 0, 0]
        assert [len(at) for at in outcome.at] == [count, 0, 0]
        assert all(np.isfinite(g).all() for g in grads.values())
    assert abs(number(found[0][0].total) - number(found[1][0].total)) <= TOLERANCE


def test_arrays_to_the_device_and_back(sides):
    for side in sides(Settings()):
        for kind in (np.float32, np.float16, np.int32, bool):
            values = np.arange(6).reshape(2, 3).T.astype(kind)
            back = side.gradients.numpy(side.gradients.array(values))
            assert back.dtype == kind
            assert (back == values).all()
        xp = side.objective._material.ops.xp
        assert side.gradients.numpy(xp.ones((2,), dtype=xp.bfloat16)).tolist() == [1.0, 1.0]


def no_positions(original: Any) -> Any:
    return lambda self, positions: original(self, positions * 0)


def no_way_back(original: Any) -> Any:
    """The loss is right; the gradient ends where outputs are fed back."""
    stop = import_module("mlx.core").stop_gradient

    def out(self: EagleBody, w: Params, x: Any) -> tuple[Any, Any]:
        y, hidden = original(self, w, x)
        return y, stop(hidden)

    return out


@pytest.mark.parametrize(
    ("attribute", "mistake", "message"),
    [("rope", no_positions, "losses differ"), ("out", no_way_back, "gradients of .* differ")],
)
def test_a_mistake_of_one_backend_is_seen(sides, rows, attribute, mistake, message):
    torch, mlx = sides(Settings(steps=3))

    class Wrong(EagleBody):
        pass

    setattr(Wrong, attribute, mistake(getattr(EagleBody, attribute)))
    mlx.objective._body = Wrong(mlx.objective.spec, mlx.objective._material.ops)
    with pytest.raises(AssertionError, match=message):
        same([torch, mlx], rows)


def together(sides: list[Side], rows: Rows, optimizers: Mapping[str, AdamW]) -> None:
    """Five steps from the same tensors: losses and tensors stay the same."""
    one, other = (side.train(rows, optimizers[side.name], 5) for side in sides)
    assert one[-1] < 0.98 * one[0], "it learns"
    assert np.abs(np.subtract(one, other)).max() <= SHOWS, "losses part"
    torch, mlx = sides
    for key, tensor in torch.params.items():
        a, b = torch.gradients.numpy(tensor), mlx.gradients.numpy(mlx.params[key])
        # Where a gradient is almost 0, the first steps of Adam are as large as elsewhere and their sign is rounding.
        assert np.quantile(np.abs(a - b), 0.99) <= SHOWS, f"{key} parts"


def test_five_steps_stay_together(sides, rows):
    optimizer = AdamW(rate=3e-3, warmup=0.2)
    together(sides(Settings(steps=3)), rows, dict.fromkeys(BACKENDS, optimizer))


@pytest.mark.parametrize("wrong", [{"clip": 1e9}, {"warmup": 0.0}, {"beta1": 0.8}])
def test_other_steps_part(sides, rows, wrong):
    optimizer = AdamW(rate=3e-3, warmup=0.2, clip=0.1)
    with pytest.raises(AssertionError, match="part"):
        together(sides(Settings(steps=3)), rows, {"torch": optimizer, "mlx": replace(optimizer, **wrong)})


ROUNDS = 3
GOLDEN = ("eagle3", "eagle3-narrow", "eagle3-speculators", "eagle31-speculators", "eagle31-fcnorm")


def off_head(bench: Bench, name: str, place: Any, change: Callable[[Any], Any] = lambda spec: spec) -> float:
    """The largest difference of logits between the body over a whole text and the backend's head.

    Of every row with the target's states, and of steps on its own outputs below some of the rows.
    """
    head, target, (w, _) = bench.head(name), bench.target(name), trained(bench, name, place)
    body = EagleBody(change(head.spec), target.ops)
    array, length = target.ops.array, 12
    draw = np.random.default_rng(4)
    tokens = draw.integers(0, 128, length + ROUNDS).tolist()
    rows = draw.standard_normal((length, len(head.spec.taps) * head.spec.target_hidden)).astype(np.float32)
    embed = w["embed_tokens.weight"].__getitem__ if head.spec.own_embedding else target.embed
    hidden, kept = body.fuse(w, array(rows.tolist())[None]), [Kept() for _ in range(head.spec.layers)]
    bias = array(causal(np.tril(np.ones((1, length, length), bool))).tolist())
    got = []
    for s in range(ROUNDS):
        ids = array([tokens[s : s + length]])
        x = body.step(w, embed(ids), hidden, body.rope(np.arange(length)[None] + s), kept, bias)
        y, hidden = body.out(w, x)
        got.append(host(y @ w["lm_head.weight"].T)[0])
    worst = 0.0
    for row in range(length):
        logits = head.extend(tokens[row : row + 1], states(head, rows[row : row + 1]))
        worst = max(worst, float(np.abs(host(logits)[0] - got[0][row]).max()))
        for s in range(1, ROUNDS):
            logits = head.step(Beam(array([tokens[row + s]]), array([0]), s, array([[1] * s])))
            worst = max(worst, float(np.abs(host(logits)[0] - got[s][row]).max()))
    return worst


@pytest.mark.parametrize("name", GOLDEN)
def test_the_body_is_the_head_of_inference(benches, tmp_path, name):
    for backend in BACKENDS:
        assert off_head(benches[backend], name, tmp_path) <= 1e-4, backend


MISREAD = {
    "rope base": ("eagle3", {"rope_theta": 500000.0}),
    "rope scaling": ("eagle3-speculators", {"rope_scaling": None}),
    "residual": ("eagle3", {"norm_before_residual": True}),
    "fed back": ("eagle31-speculators", {"norm_output": False}),
    "norm before fc": ("eagle31-speculators", {"norm_before_fc": False}),
    "norm of each tap": ("eagle31-fcnorm", {"fc_norm": False}),
    "norm of queries": ("eagle31-fcnorm", {"qk_norm": False}),
    "second layer": ("eagle31-fcnorm", {"layers": 1}),
}


@pytest.mark.parametrize("what", MISREAD)
def test_a_body_that_differs_is_seen(benches, tmp_path, what):
    name, change = MISREAD[what]
    for backend in BACKENDS:
        assert off_head(benches[backend], name, tmp_path, lambda spec: replace(spec, **change)) > 1e-2, backend
