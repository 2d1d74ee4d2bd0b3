"""Angles of a rotary embedding, for every kind of scaling whose angles do not change with the length of the text.

Computed for the positions asked for: tables made for `max_position_embeddings` of a head are too short for its target.
"""

from __future__ import annotations

import math

from speclocal.core.head_spec import Config


def frequencies(d: int, theta: float, scaling: Config | None) -> tuple[list[float], float]:
    """Radians a position turns each pair of numbers by [d / 2], and a factor for the numbers that are turned.

    d: numbers of an attention head. theta, scaling: as in `EagleSpec`. linear: Chen et al. 2306.15595; yarn: Peng et
    al. 2309.00071; llama3: as Llama 3.1's `config.json` means it. All agree with transformers' `modeling_rope_utils`.
    """
    plain = [theta ** (-i / d) for i in range(0, d, 2)]
    if scaling is None:
        return plain, 1.0
    kind = scaling["rope_type"]
    factor = float(scaling["factor"])
    if kind == "linear":
        return [each / factor for each in plain], 1.0
    if kind == "llama3":
        return [_llama3(each, factor, scaling) for each in plain], 1.0
    low, high = _turns(d, theta, scaling)
    ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(d // 2)]
    mixed = [each * (1 - share + share / factor) for each, share in zip(plain, ramp, strict=True)]
    return mixed, _attention_factor(factor, scaling)


def _llama3(plain: float, factor: float, scaling: Config) -> float:
    """Long waves are stretched, short ones kept, those between mixed."""
    turns = float(scaling["original_max_position_embeddings"]) / (2 * math.pi) * plain
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    if turns <= low:
        return plain / factor
    if turns >= high:
        return plain
    kept = (turns - low) / (high - low)
    return plain * (kept + (1 - kept) / factor)


def _turns(d: int, theta: float, scaling: Config) -> tuple[float, float]:
    """The pairs that turn `beta_fast` and `beta_slow` times within the original length: the ends of the ramp."""
    length = float(scaling["original_max_position_embeddings"])

    def pair(turns: float) -> float:
        return d * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    return low, high + 0.001 if low == high else high


def _attention_factor(factor: float, scaling: Config) -> float:
    given, over, under = (scaling.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return grown(over) / grown(under) if over and under else grown(1.0)
