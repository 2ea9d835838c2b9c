"""From outcome rewards and quality factors to training advantages (M4), and the length penalty (M5.4). Pure.

Every function works on one group's *valid* trajectories, in any order: masked ones have left already (M1.3), rewards
are those after the grader's corrections and the length penalty (M1.8). Sums are correctly rounded (`math.fsum`), so a
permutation of the trajectories permutes the results exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import AdvantageMode, LengthPenaltyConfig

_NOISE = 1e-12
"""Relative size below which a difference of rewards, or lambda - lambda_max, is rounding and counts as zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """Training advantages of one group; n is the number of valid trajectories."""

    values: tuple[float, ...]
    """[n] one advantage a trajectory, in the order given."""
    lam: float | None
    """lambda before the cap; None in modes that do not redistribute and where the denominator is zero (M4.4)."""
    capped: bool
    """Whether lambda_max bound (mode `redistribute` only)."""


def advantages(
    mode: AdvantageMode,
    rewards: Sequence[float],
    passed: Sequence[bool],
    factors: Sequence[float | None],
    lambda_max: float,
) -> Advantages:
    """Advantages of one group in one of the modes of M4.6.

    `factors` holds f_i in (0, 1] for passing trajectories and None for failing ones; mode `outcome` ignores it (so a
    group without grades uses that mode, M1.10). Non-binary rewards follow M4.4 in both redistributing modes:
    `redistribute_exact` is then M4.4 without the cap. Where no pass lies below the mean that *is* M4.2 to the letter
    (failing side untouched); where one does, M4.2 would reward a low factor on a negative advantage, so its positive
    part is taken and the group is recentred to keep the sum at zero (M4.7).

    Raises ValueError for an empty group, lengths that differ, or a factor missing, out of range or on a failing
    trajectory.
    """
    _check(mode, rewards, passed, factors)
    a = _centred(rewards)
    f = [1.0 if factor is None else factor for factor in factors]
    match mode:
        case AdvantageMode.OUTCOME:
            return Advantages(values=tuple(a), lam=None, capped=False)
        case AdvantageMode.DOWNWEIGHT:
            return Advantages(values=tuple(x * g for x, g in zip(a, f, strict=True)), lam=None, capped=False)
        case AdvantageMode.DISCOUNT:
            discounted = [r * g for r, g in zip(rewards, f, strict=True)]
            return Advantages(values=tuple(_centred(discounted)), lam=None, capped=False)
        case AdvantageMode.REDISTRIBUTE_EXACT:
            return _redistributed(a, passed, f, math.inf)
        case AdvantageMode.REDISTRIBUTE:
            return _redistributed(a, passed, f, lambda_max)


def _redistributed(a: Sequence[float], passed: Sequence[bool], f: Sequence[float], cap: float) -> Advantages:
    """M4.3 and M4.4; `f` is 1 on failing trajectories."""
    positive = [max(x, 0.0) if p else x for x, p in zip(a, passed, strict=True)]
    total = math.fsum(x for x, p in zip(positive, passed, strict=True) if p)
    weighted = math.fsum(x * g for x, g, p in zip(positive, f, passed, strict=True) if p)
    if weighted == 0.0:  # nothing to scale: B = a (M4.4); a is centred already
        return Advantages(values=tuple(a), lam=None, capped=False)
    lam = total / weighted
    capped = lam > cap * (1.0 + _NOISE)
    scale = cap if capped else lam
    b = [scale * g * x if p else x for x, g, p in zip(positive, f, passed, strict=True)]
    # Uncapped and without a pass below the mean, b sums to zero by construction: recentring would only add rounding
    # to the failing side, which M4.2 leaves untouched.
    if capped or any(x < 0.0 for x, p in zip(a, passed, strict=True) if p):
        b = _centred(b)
    return Advantages(values=tuple(b), lam=lam, capped=capped)


def length_penalty(
    rewards: Sequence[float],
    passed: Sequence[bool],
    turns: Sequence[int],
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
    config: LengthPenaltyConfig,
) -> tuple[float, ...]:
    """Rewards after the length penalty (M5.4); all sequences are [n] over one group's valid trajectories.

    l / l* is the largest of three ratios (turns, input tokens, output tokens), each against its own percentile over
    the passing trajectories (linear interpolation). Groups whose pass rate is not above `min_pass_rate`, and failing
    trajectories, keep their rewards. Raises ValueError if the lengths differ.
    """
    if not len(rewards) == len(passed) == len(turns) == len(input_tokens) == len(output_tokens):
        raise ValueError("length_penalty needs one reward, pass and length of each kind per trajectory")
    if not rewards or sum(passed) / len(passed) <= config.min_pass_rate or not any(passed):
        return tuple(rewards)
    kinds = (turns, input_tokens, output_tokens)
    references = [_percentile([x for x, p in zip(kind, passed, strict=True) if p], config.percentile) for kind in kinds]
    result = []
    for reward, ok, *lengths in zip(rewards, passed, *kinds, strict=True):
        excess = max(_ratio(x, reference) for x, reference in zip(lengths, references, strict=True)) - 1.0
        ramp = (excess - config.free_excess) / (config.full_excess - config.free_excess)
        result.append(reward - config.max_penalty * min(max(ramp, 0.0), 1.0) ** config.exponent if ok else reward)
    return tuple(result)


def _check(
    mode: AdvantageMode, rewards: Sequence[float], passed: Sequence[bool], factors: Sequence[float | None]
) -> None:
    if not rewards or not len(rewards) == len(passed) == len(factors):
        raise ValueError(
            f"a group needs one reward, pass and factor per trajectory, got {len(rewards)}, {len(passed)} and "
            f"{len(factors)}"
        )
    if mode is AdvantageMode.OUTCOME:
        return
    for index, (ok, factor) in enumerate(zip(passed, factors, strict=True)):
        if ok and (factor is None or not 0.0 < factor <= 1.0):
            raise ValueError(f"passing trajectory {index} has factor {factor}; M3 gives one in (0, 1]")
        if not ok and factor is not None:
            raise ValueError(f"failing trajectory {index} has factor {factor}; failing ones are never ranked (M2.3)")


def _centred(values: Sequence[float]) -> list[float]:
    """Values minus their mean; differences that are only rounding become exactly 0."""
    mean = math.fsum(values) / len(values)
    noise = _NOISE * max(abs(value) for value in values)
    return [value - mean if abs(value - mean) > noise else 0.0 for value in values]


def _percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest order statistics."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100.0
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _ratio(value: float, reference: float) -> float:
    if reference > 0.0:
        return value / reference
    return 1.0 if value <= 0.0 else math.inf
