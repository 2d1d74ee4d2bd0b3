"""SMP-03, SMP-09, LGT-02: settings, their limits, and how they fall together at the edges."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import speclocal.core
from speclocal.core.interfaces import Ops
from speclocal.core.sampling import Sampler, Sampling
from speclocal.core.tree import DraftTree
from speclocal.errors import UsageError
from tests.toys import HashTarget, LawDrafter, full, generate, hashed, text

ROOT = DraftTree.chain(0)
XP = {"argmax", "argsort", "exp", "log", "log1p", "where", "clip", "sum", "cumsum", "stack", "concat", "arange"}
XP |= {"softmax", "logsumexp"}


def xp_names() -> set[str]:
    """Every `xp.<name>` and `<...>.xp.<name>` of the core."""
    names = set()
    for path in Path(speclocal.core.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                base = node.value
                if getattr(base, "id", None) == "xp" or getattr(base, "attr", None) == "xp":
                    names.add(node.attr)
    return names


def test_array_functions_are_those_every_framework_spells_alike(ops: Ops) -> None:
    used = xp_names()
    assert {"argmax", "softmax", "where"} <= used, "the parser finds them"
    assert used <= XP, "torch and mlx.core do not both know these by this name"
    assert all(callable(getattr(ops.xp, name)) for name in XP)


def probabilities(ops: Ops, logits: list[float], settings: Sampling, **more: Any) -> list[float]:
    sampler = Sampler(ops, settings, len(logits), [], **more)
    (p,) = ops.to_host(sampler.probabilities(sampler.law(ops.array([logits]), ROOT)))
    return p[0]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "1", None, True]),
        ("top_k", [-1, 1.9, math.nan, "4 ", True]),
        ("top_p", [0, 0.0, -0.5, 1.01, 7, math.nan]),
        ("min_p", [-0.01, 1.5, math.nan, math.inf]),
        ("repetition_penalty", [0, -1, math.nan, math.inf]),
        ("presence_penalty", [math.nan, math.inf, "a"]),
        ("frequency_penalty", [math.nan, -math.inf, None]),
        ("min_tokens", [-1, 0.5, None]),
        ("seed", [-1, 2**64, 1.0, None]),
        ("logit_bias", [{-1: 1.0}, {1.5: 1.0}, {1: math.inf}, {1: math.nan}, {1: "x"}]),
    ],
)
def test_impossible_values_are_refused(field: str, values: list[Any]) -> None:
    """SMP-09: one line with the field, what was got and what is possible."""
    for value in values:
        with pytest.raises(UsageError, match=f"impossible {field}.*, got .*, expected ") as refusal:
            Sampling(**{field: value})
        assert "\n" not in str(refusal.value)


def test_edges_of_the_ranges_are_accepted() -> None:
    Sampling(temperature=1e-3, top_k=10**9, top_p=1e-9, min_p=1.0, repetition_penalty=1e-3, seed=2**64 - 1)
    Sampling(temperature=10, top_p=1, min_p=0, presence_penalty=-2.0, frequency_penalty=-2, logit_bias={0: -100})


@pytest.mark.parametrize("zero", [0, 0.0, -0.0])
def test_every_zero_is_greedy(ops: Ops, zero: float) -> None:
    """SMP-03: no division."""
    settings = Sampling(temperature=zero, top_k=2, top_p=0.5, min_p=0.5)
    assert settings.greedy
    assert probabilities(ops, [1.0, 3.0, 2.9, -2.0], settings) == [0.0, 1.0, 0.0, 0.0]


def check_greedy_ties(ops: Ops) -> None:
    """Ties go to the lowest id, in plain decoding and in verification."""
    assert probabilities(ops, [1.0, 3.0, 3.0, -2.0, 3.0], Sampling()) == [0.0, 1.0, 0.0, 0.0, 0.0]
    tied = HashTarget(ops, 4, scale=0.0)
    for shape in ((), full(2, 1)):
        rounds = generate(tied, LawDrafter(hashed(4, "x", 0.0), shape), [2], Sampling(), 6)
        assert text(rounds) == [0] * 6


def test_greedy_ties(ops: Ops) -> None:
    check_greedy_ties(ops)


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(temperature=1e-3),
        Sampling(temperature=50.0),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=1.0, top_k=10**6, top_p=0.999999, min_p=1e-6),
    ],
)
def test_extreme_settings_give_a_law(ops: Ops, settings: Sampling) -> None:
    for logits in ([80.0, -80.0, 0.0, 79.9], [0.0] * 4, [-1e4, 1e4, 3.0, 3.0], [-math.inf, 1.0, -math.inf, 0.5]):
        p = probabilities(ops, logits, settings)
        assert all(math.isfinite(x) for x in p)
        assert sum(p) == pytest.approx(1.0, abs=1e-5)
        assert p[logits.index(max(logits))] == max(p) > 0
        assert all(x == 0 for x, logit in zip(p, logits, strict=True) if logit == -math.inf)


def test_ties_with_the_last_kept_token_are_kept(ops: Ops) -> None:
    third = pytest.approx([1 / 3] * 3 + [0.0], abs=1e-6)
    logits = [2.0, 2.0, 2.0, 0.0]
    assert probabilities(ops, logits, Sampling(temperature=1.0, top_k=2)) == third
    assert probabilities(ops, logits, Sampling(temperature=1.0, top_p=0.4)) == third
    assert probabilities(ops, logits, Sampling(temperature=1.0, min_p=1.0)) == third


def test_top_p_over_a_large_vocabulary(ops: Ops) -> None:
    """Where the few best tokens already hold the mass, where they do not, and in between, the nucleus is the same."""
    width = 6000
    for sharpness in (0.0, 1e-3, 0.01, 1.0):
        logits = [-sharpness * ((i * 2477) % width) for i in range(width)]
        p = probabilities(ops, logits, Sampling(temperature=1.0, top_p=0.8))
        total = sum(math.exp(x) for x in logits)
        ranked = sorted((math.exp(x) / total for x in logits), reverse=True)
        reached, least = 0.0, 0.0
        for share in ranked:
            if reached >= 0.8:
                break
            reached, least = reached + share, share
        kept = sum(share >= least for share in ranked)
        assert abs(sum(x > 0 for x in p) - kept) <= 1, "rounding may move the border by a token"
        assert min(logits[i] for i, x in enumerate(p) if x) >= max(
            (logits[i] for i, x in enumerate(p) if not x), default=-math.inf
        )


def test_unknown_ids_and_end_tokens_are_masked(ops: Ops) -> None:
    """Ids without a tokenizer entry never appear; end tokens not before `min_tokens`."""
    logits = [1.0, 9.0, 5.0, 0.0]
    p = probabilities(ops, logits, Sampling(temperature=1.0, min_tokens=1), unknown=[1], end_ids=[2, 77])
    assert (p[1], p[2]) == (0.0, 0.0)
    assert sum(p) == pytest.approx(1.0)
    assert probabilities(ops, logits, Sampling(), unknown=[1]) == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("token", [4, 1])
def test_bias_for_a_token_that_is_not_there(ops: Ops, token: int) -> None:
    """LGT-02: outside the vocabulary or without a tokenizer entry: refused, named."""
    with pytest.raises(UsageError, match=f"logit bias.*got {token}"):
        Sampler(ops, Sampling(logit_bias={token: 1.0}), 4, [], unknown=[1])


def test_raw_logits_stay_as_the_model_gave_them(ops: Ops) -> None:
    """The same scores are read by drafters afterwards."""
    settings = Sampling(
        temperature=0.7, repetition_penalty=1.3, presence_penalty=1.0, logit_bias={1: 2.0}, min_tokens=9
    )
    sampler = Sampler(ops, settings, 4, [0, 1], end_ids=[3])
    raw = ops.array([[1.0, 2.0, 3.0, 4.0]] * 3)
    sampler.law(raw, DraftTree.chain(0, [2, 2]))
    assert ops.to_host(raw)[0] == [[1.0, 2.0, 3.0, 4.0]] * 3


def check_nucleus_of_wide_rows(ops: Ops) -> None:
    """Rows that need few, some hundred and nearly all tokens, side by side: the support is the naive one."""
    width, top_p = 5000, 0.9
    spread = {"peaked": 0.5, "middling": 3.0, "flat": 0.01}
    rows = [[s * math.sin(1.7 * i * i + 0.3) * 4 for i in range(width)] for s in spread.values()]
    rows[0][17:20] = [14.0, 15.0, 16.0]
    sampler = Sampler(ops, Sampling(temperature=1.0, top_p=top_p), width, [0])
    (p,) = ops.to_host(sampler.probabilities(sampler.law(ops.array(rows), DraftTree.chain(0, [1, 2]))))
    sizes = []
    for row, law in zip(rows, p, strict=True):
        weights = sorted((math.exp(x) for x in row), reverse=True)
        total, mass, size = sum(weights), 0.0, 0
        while mass < top_p * total:
            mass += weights[size]
            size += 1
        sizes.append(size)
        assert abs(sum(q > 0 for q in law) - size) <= 1, "rounding may move the last token, no more"
    assert sizes[0] <= 64 < sizes[1] <= 1024 < sizes[2]


def test_nucleus_of_wide_rows(ops: Ops) -> None:
    check_nucleus_of_wide_rows(ops)
    check_nucleus_of_wide_rows(replace(ops, support=None))


@pytest.mark.parametrize("wrong", [{"temperature": 1e-40}, {"logit_bias": {1: 1e39}}, {"repetition_penalty": 1e-30}])
def test_values_that_leave_float32_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="impossible"):
        Sampling(**wrong)


def test_the_coldest_temperature_is_nearly_greedy(ops: Ops) -> None:
    logits = ops.array([[30.0, 29.9, -50.0, 30.0 - 1e-3]])
    sampler = Sampler(ops, Sampling(temperature=1e-5), 4, [0])
    (p,) = ops.to_host(sampler.probabilities(sampler.law(logits, ROOT)))
    assert p[0] == pytest.approx([1.0, 0.0, 0.0, 0.0], abs=1e-30)
