"""Canaries: stored groups whose grades are known, graded among the others to see how far the graders can be trusted.

They are never trained on. Where a run names no folder of them, they are built-in held-out tasks with scripted
solutions, which no grader of ours was trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import MinirepoSource, RubricConfig
from envs.minirepo.family import MinirepoTasks
from grader.agreement import agreement
from grader.examples import varied_example
from grader.exchange import GradeReply
from grader.stored import KnownGrade, StoredGroup
from grader.stored_folder import read_groups
from infra.errors import StorageError

SupplyCanary = Callable[[int], StoredGroup]
"""Number >= 0 -> a group with labels; the same number gives the same group. Takes up to a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """One grading of a stored group with labels."""

    number: int
    """Counts the canaries of a run, from 0."""
    group: StoredGroup


def builtin_canaries(seed: int, rubric: RubricConfig) -> SupplyCanary:
    """Groups of scripted solutions to held-out minirepo tasks; they do not repeat.

    Some pass and some fail, and at least three pass that are of different quality: else there is little to get wrong.
    """
    source = MinirepoTasks("canary", MinirepoSource(type="minirepo", groups_per_step=0))

    def supply(number: int) -> StoredGroup:
        example = varied_example(source, number, seed, rubric)
        group = example.group
        known = {c.trajectory.trajectory_id: example.labels[c.label] for c in group.passing}
        return StoredGroup(
            group_id=group.group_id,
            task=group.task,
            trajectories=tuple(c.trajectory for c in group.candidates),
            transcripts=tuple(c.transcript for c in group.candidates),
            labels={
                name: KnownGrade(
                    scores=(
                        label.scores.approach,
                        label.scores.precision,
                        label.scores.minimality,
                        label.scores.side_effects,
                        label.scores.consistency,
                    ),
                    flags=frozenset(flag.value for flag in label.flags.raised),
                )
                for name, label in known.items()
            },
        )

    return supply


def stored_canaries(folder: Path) -> SupplyCanary:
    """The labelled groups of a folder, round and round in the order of their names. They are read once, here.

    Raises:
        StorageError: a group cannot be read, or none has labels.
    """
    groups = [group for group in read_groups(folder) if group.labels]
    if not groups:
        raise StorageError(
            f"{folder}: none of its groups has labels; give them in group.json (docs/grading.md), or set "
            "grader.canaries.path to null for the built-in canaries"
        )
    return lambda number: groups[number % len(groups)]


def canary_record(canary: Canary, reply: GradeReply, *, step: int, rubric: RubricConfig) -> dict[str, Any]:
    """One line of canaries.jsonl. `step`: optimiser steps done when it was graded."""
    labels = canary.group.labels or {}
    grade = reply.grade
    found = agreement(grade, {name: known.judgement for name, known in labels.items()}, rubric) if grade else None
    given = grade.candidates if grade else {}
    return {
        "canary": canary.number,
        "group_id": canary.group.group_id,
        "task_id": canary.group.task.task_id,
        "step": step,
        "expected": {name: known.tier.value for name, known in labels.items()},
        # A candidate that was called a hack has no tier (M1.5).
        "given": {name: given[name].tier.value if name in given else None for name in labels} if grade else None,
        "tier_agreement": found.tiers_right / found.tiers if found else None,
        "kendall_tau_b": found.tau_b if found else None,
        "fallback_reason": reply.fallback_reason.value if reply.fallback_reason else None,
        "grader": reply.audit(),
    }
