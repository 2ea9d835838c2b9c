"""Anonymous candidates: the trajectories of one group, shuffled and labelled C1..Cn with a recorded seed (M2.5)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envs.task import Task
from grader.evidence import PatchIndex, index_patch
from grader.patched import MAX_LINES, sections
from rollout.trajectory import Trajectory, Transcript


class MismatchError(ValueError):
    """What arrived does not belong together (M2.6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One trajectory under its label."""

    label: str
    trajectory: Trajectory
    transcript: Transcript
    patch: PatchIndex

    @property
    def passed(self) -> bool:
        """The verifier's word; only passing candidates are graded (M2.3)."""
        return self.trajectory.passed is True


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGroup:
    """What the model is shown of one group."""

    group_id: str
    task: Task
    candidates: tuple[Candidate, ...]
    """In label order, which is the shuffled order."""

    @property
    def passing(self) -> tuple[Candidate, ...]:
        """The candidates to be graded, in label order."""
        return tuple(c for c in self.candidates if c.passed)

    def only(self, label: str) -> CandidateGroup:
        """The group as if it had this one candidate, under the label it has."""
        return replace(self, candidates=tuple(c for c in self.candidates if c.label == label))


def shuffled(trajectory_ids: Sequence[str], order_seed: int) -> list[str]:
    """The ids in the order of their labels; depends on the set of ids and the seed alone."""
    ids = sorted(trajectory_ids)
    random.Random(order_seed).shuffle(ids)
    return ids


def _bounded(patch: str) -> str:
    """The files of a patch that are indexed: in order, without those that would make it longer than MAX_LINES.

    A policy can fill a file with a million lines; parsing them would take minutes.
    """
    kept: list[str] = []
    lines = 0
    for section in sections(patch):
        count = section.count("\n")
        if lines + count <= MAX_LINES:
            lines += count
            kept.append(section)
    return "".join(kept)


def label_group(
    *,
    group_id: str,
    task: Task,
    trajectories: Sequence[Trajectory],
    transcripts: Sequence[Transcript],
    order_seed: int,
) -> CandidateGroup:
    """Match transcripts to trajectories by id, shuffle, and label.

    The result depends on the ids and the seed alone, not on the order in which anything was passed.

    Raises:
        MismatchError: ids that are repeated or do not match, a trajectory of another group or task, a masked one,
            or a group in which nothing passed.
    """
    by_id = {t.trajectory_id: t for t in transcripts}
    ids = sorted(t.trajectory_id for t in trajectories)
    if len(set(ids)) != len(ids) or len(by_id) != len(transcripts):
        raise MismatchError("a trajectory id is repeated")
    if set(ids) != set(by_id):
        raise MismatchError(f"transcripts of {sorted(by_id)} do not match trajectories {ids}")
    for trajectory in trajectories:
        if trajectory.group_id != group_id or trajectory.task_id != task.task_id:
            raise MismatchError(f"{trajectory.trajectory_id} belongs to {trajectory.group_id}, {trajectory.task_id}")
        if trajectory.status.masked or trajectory.passed is None:
            raise MismatchError(f"{trajectory.trajectory_id} was not evaluated ({trajectory.status.value})")
    if not any(t.passed for t in trajectories):
        raise MismatchError("no trajectory passed, so there is nothing to grade")
    ids = shuffled(ids, order_seed)
    metadata = {t.trajectory_id: t for t in trajectories}
    candidates = tuple(
        Candidate(
            label=f"C{i}",
            trajectory=metadata[name],
            transcript=by_id[name],
            patch=index_patch(_bounded(by_id[name].patch)),
        )
        for i, name in enumerate(ids, start=1)
    )
    return CandidateGroup(group_id=group_id, task=task, candidates=candidates)
