"""M3: five scores -> W, scores and flags -> tier, tiers and tie indices -> quality factors. Pure.

The model gives scores and flags; the tier and the factor are computed here, never taken from the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from configs.schema import RubricConfig


class Tier(StrEnum):
    """Quality tiers, best first (M3.2)."""

    T1 = "T1"
    T2 = "T2"
    T3 = "T3"


class Flag(StrEnum):
    """Confirmed findings about a passing trajectory that decide its tier (M3.2)."""

    UNREQUESTED_REWRITE = "unrequested_rewrite"
    TEST_WORKAROUND = "test_workaround"
    SEVERE_PROCESS_ISSUE = "severe_process_issue"
    UNRESOLVED_REGRESSION = "unresolved_regression"


class Scores(NamedTuple):
    """The five scores of M3.1, integers 1..5, 5 is best, in the order of their weights."""

    approach: int
    precision: int
    minimality: int
    side_effects: int
    """5 means none."""
    consistency: int

    def as_dict(self) -> dict[str, int]:
        """Score by its name, as groups.jsonl records it."""
        return self._asdict()


@dataclass(frozen=True, slots=True)
class Flags:
    """A set of flags."""

    raised: frozenset[Flag] = frozenset()

    def __contains__(self, flag: Flag) -> bool:
        return flag in self.raised

    def __bool__(self) -> bool:
        return bool(self.raised)

    def as_dict(self) -> dict[str, bool]:
        """Every flag by its name, as groups.jsonl records it."""
        return {flag.value: flag in self.raised for flag in Flag}


_ORDER = {Tier.T1: 0, Tier.T2: 1, Tier.T3: 2}
_EQUAL = 1e-9
"""Two W closer than this are equal: sums of weights are not exact in binary."""


def counted(scores: Scores, rubric: RubricConfig) -> Scores:
    """The scores as tiers and orders see them: a dimension that is left out (`rubric.left_out`) is 5 for everybody."""
    return scores._replace(**dict.fromkeys(rubric.left_out, 5)) if rubric.left_out else scores


def weighted_score(scores: Scores, rubric: RubricConfig) -> float:
    """W of M3.1, in 1..5."""
    scores = counted(scores, rubric)
    return (
        rubric.weight_approach * scores.approach
        + rubric.weight_precision * scores.precision
        + rubric.weight_minimality * scores.minimality
        + rubric.weight_side_effects * scores.side_effects
        + rubric.weight_consistency * scores.consistency
    )


def is_below(w: float, other: float) -> bool:
    """Whether one weighted score is really lower than another."""
    return w < other - _EQUAL


def tier_of(scores: Scores, flags: Flags) -> Tier:
    """M3.2, in its order: the conditions of T3 are looked at first."""
    if Flag.UNREQUESTED_REWRITE in flags or Flag.TEST_WORKAROUND in flags:
        return Tier.T3
    if scores.approach == 1 or (scores.minimality <= 2 and scores.side_effects <= 2):
        return Tier.T3
    troubled = Flag.SEVERE_PROCESS_ISSUE in flags or Flag.UNRESOLVED_REGRESSION in flags
    if min(scores) >= 4 and not troubled:
        return Tier.T1
    return Tier.T2


def is_negative(scores: Scores, flags: Flags) -> bool:
    """Whether a judgement needs evidence (M2.4): any flag, or any score of 2 or less."""
    return bool(flags) or min(scores) <= 2


def is_worse(tier: Tier, other: Tier) -> bool:
    """Whether `tier` stands below `other`."""
    return _ORDER[tier] > _ORDER[other]


def rank_key(scores: Scores, flags: Flags, rubric: RubricConfig) -> tuple[int, float]:
    """Sort key of the rubric's own order: tier first, then W, best first (M3.3). Equal keys are a tie."""
    return _ORDER[tier_of(counted(scores, rubric), flags)], -round(weighted_score(scores, rubric), 9)


def tie_indices(ranking: Sequence[Sequence[str]], tiers: Mapping[str, Tier]) -> dict[str, int]:
    """k of M3.3: the zero-based index of each id's tied group inside its tier.

    `ranking` holds tied groups, best first; a tied group counts once, whatever its size. Empty groups count nothing.

    Raises:
        ValueError: a tied group spans two tiers.
    """
    seen = dict.fromkeys(Tier, 0)
    ties: dict[str, int] = {}
    for group in ranking:
        if not group:
            continue
        (tier, *others) = {tiers[name] for name in group}
        if others:
            raise ValueError(f"the tied group {list(group)} spans tiers {sorted({tier, *others})}")
        ties.update(dict.fromkeys(group, seen[tier]))
        seen[tier] += 1
    return ties


def factors(tiers: Sequence[str], ties: Sequence[int], rubric: RubricConfig) -> list[float]:
    """f of M3.4 for the passing trajectories of one group, position by position.

    Args:
        tiers: the tier of each.
        ties: its k (M3.3); inside each tier they are 0, 1, ... without a gap.

    Raises:
        ValueError: lengths differ, an unknown tier, or tie indices with a gap.
    """
    if len(tiers) != len(ties):
        raise ValueError(f"{len(tiers)} tiers but {len(ties)} tie indices")
    levels: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for tier, tie in zip(tiers, ties, strict=True):
        levels[Tier(tier)].add(tie)
    for tier, found in levels.items():
        if found != set(range(len(found))):
            raise ValueError(f"tie indices of {tier.value} are {sorted(found)}; they must be 0..{len(found) - 1}")
    return [_factor(Tier(tier), tie, len(levels[Tier.T2]), rubric) for tier, tie in zip(tiers, ties, strict=True)]


def _factor(tier: Tier, k: int, k2: int, rubric: RubricConfig) -> float:
    if tier is Tier.T1:
        return rubric.t1_first if k == 0 else rubric.t1_rest
    if tier is Tier.T3:
        return rubric.t3
    if k2 == 1:
        return rubric.t2_high
    return rubric.t2_high - (rubric.t2_high - rubric.t2_low) * k / (k2 - 1)
