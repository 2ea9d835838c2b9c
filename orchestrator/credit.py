"""From a complete group (and a grade) to training advantages, in the order of M1.5-M1.8. Pure.

Integrity first, statistics recomputed, eligibility re-tested, then factors, the length penalty, and the advantages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from configs.schema import AdvantageMode, AlgorithmConfig
from grader.verdict import Grade
from learner.advantage import advantages, length_penalty
from rollout.trajectory import Status, Trajectory


class GroupOutcome(StrEnum):
    """How a group ended."""

    TRAINED = "trained"
    SKIPPED_ALL_PASS = "skipped_all_pass"
    SKIPPED_ALL_FAIL = "skipped_all_fail"
    SKIPPED_BROKEN_TASK = "skipped_broken_task"
    """None of its trajectories could be set up and verified."""
    SKIPPED_QUARANTINED = "skipped_quarantined"
    """Its task is in quarantine (orchestrator/quarantine.py)."""
    SKIPPED_TOO_FEW_VALID = "skipped_too_few_valid"
    DROPPED_STALE = "dropped_stale"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one valid trajectory was given."""

    passed: bool
    """After integrity corrections (M1.5)."""
    outcome_reward: float
    reward: float
    """The reward used, after M1.5 and M1.8."""
    hack: bool
    tier: str | None
    scores: Mapping[str, int] | None
    flags: Mapping[str, bool] | None
    tie: int | None
    factor: float | None
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Advantages of a trainable group, or why it is skipped."""

    skip: GroupOutcome | None
    mode: AdvantageMode
    """The mode that made the advantages; `outcome` for ungraded groups and after a fallback (M1.10)."""
    graded: bool
    fallback_reason: str | None
    lam: float | None
    """Exact lambda before the cap."""
    capped: bool
    rows: Mapping[str, Row]
    """Trajectory id -> row, valid trajectories only; empty if skipped before any credit was given."""


def classify(trajectories: Sequence[Trajectory], min_valid: int) -> GroupOutcome | None:
    """Why a complete group cannot be trained on, or None if it is eligible (M1.3, M1.6)."""
    valid = [t for t in trajectories if not t.status.masked]
    if not valid and all(t.status in (Status.INFRA_VERIFIER, Status.INFRA_SETUP) for t in trajectories):
        return GroupOutcome.SKIPPED_BROKEN_TASK
    if len(valid) < min_valid:
        return GroupOutcome.SKIPPED_TOO_FEW_VALID
    return _mixed([bool(t.passed) for t in valid])


def _mixed(passed: Sequence[bool]) -> GroupOutcome | None:
    if all(passed):
        return GroupOutcome.SKIPPED_ALL_PASS
    if not any(passed):
        return GroupOutcome.SKIPPED_ALL_FAIL
    return None


def skipped(reason: GroupOutcome) -> Credit:
    """The credit of a group that is not trained on and got none."""
    return Credit(
        skip=reason,
        mode=AdvantageMode.OUTCOME,
        graded=False,
        fallback_reason=None,
        lam=None,
        capped=False,
        rows={},
    )


def credit(
    trajectories: Sequence[Trajectory],
    algorithm: AlgorithmConfig,
    *,
    grade: Grade | None,
    fallback_reason: str | None,
) -> Credit:
    """Advantages of an eligible group's valid trajectories.

    `grade` is None for groups that are not graded (then outcome advantages, M4.1) and after a fallback (then
    `fallback_reason` says why, M1.10). Grades attach by trajectory id, never by position (M2.6).
    """
    valid = [t for t in trajectories if not t.status.masked]
    hacks = grade.hacks if grade else {}
    marks = [grade.candidates.get(t.trajectory_id) if grade else None for t in valid]
    passed = [bool(t.passed) and t.trajectory_id not in hacks for t in valid]
    rewards: Sequence[float] = [0.0 if t.trajectory_id in hacks else float(t.reward or 0.0) for t in valid]
    skip = _mixed(passed)
    # A hack can empty the passing side: nothing is redistributed then, and equal rewards have no advantage.
    mode = algorithm.mode if grade and skip is None else AdvantageMode.OUTCOME
    if skip is None and algorithm.length_penalty is not None:
        rewards = length_penalty(
            rewards,
            passed,
            turns=[t.turns for t in valid],
            input_tokens=[t.total_tokens - t.response_tokens for t in valid],
            output_tokens=[t.response_tokens for t in valid],
            config=algorithm.length_penalty,
        )
    factors = [mark.factor if mark else None for mark in marks]
    result = advantages(mode, rewards, passed, factors, algorithm.lambda_max)
    rows = {}
    for i, (t, mark) in enumerate(zip(valid, marks, strict=True)):
        rows[t.trajectory_id] = Row(
            passed=passed[i],
            outcome_reward=float(t.reward or 0.0),
            reward=rewards[i],
            hack=t.trajectory_id in hacks,
            tier=mark.tier.value if mark else None,
            scores=mark.scores.as_dict() if mark else None,
            flags=mark.flags.as_dict() if mark else None,
            tie=mark.tie if mark else None,
            factor=mark.factor if mark else None,
            advantage=result.values[i],
        )
    return Credit(
        skip=skip,
        mode=mode,
        graded=grade is not None and skip is None,
        fallback_reason=fallback_reason,
        lam=result.lam,
        capped=result.capped,
        rows=rows,
    )
