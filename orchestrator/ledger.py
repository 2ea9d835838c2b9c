"""The single owner of who is where: every group from admission to its end, and the counts that must add up.

One type a stage: a group is rolling, then complete, then ready, then ended. Payloads and transcripts are held as
references only; they are let go when the group ends in any way.

Conservation: each dispatched trajectory ends exactly once, with its group, as trained, masked, skipped, dropped or
failed. `Ledger.check` raises if the counts do not add up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from envs.task import Task
from grader.exchange import GradeReply
from orchestrator.credit import Credit, GroupOutcome
from rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One finished trajectory with the references to what it left in the object store."""

    trajectory: Trajectory
    payload: Any
    """ObjectRef[Payload], for the learner."""
    transcript: Any
    """ObjectRef[Transcript], for the grader."""


@dataclass(slots=True, kw_only=True)
class RollingGroup:
    """A group some of whose trajectories are still being sampled."""

    group_id: str
    task: Task
    index: int
    """Position of the task in its source's stream."""
    size: int
    version: int
    """Policy version at admission."""
    admitted_s: float
    members: dict[int, Member] = field(default_factory=dict)
    """Slot -> the trajectory that counts (a re-sampled one replaces the lost one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteGroup:
    """All trajectories have ended; none is sampled again."""

    group_id: str
    task: Task
    index: int
    members: tuple[Member, ...]
    admitted_s: float
    completed_s: float

    @property
    def valid(self) -> tuple[Member, ...]:
        """The members that could be evaluated (M1.3)."""
        return tuple(m for m in self.members if not m.trajectory.status.masked)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the tokens that would be trained on."""
        versions = [v for m in self.valid for v in m.trajectory.policy_versions]
        return min(versions) if versions else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A group with advantages, waiting for its batch."""

    group: CompleteGroup
    credit: Credit
    reply: GradeReply | None
    """What the grader answered, for the audit trail; None for ungraded groups."""
    ready_s: float


class Stage(StrEnum):
    """Where a living group is."""

    ROLLING = "rolling"
    GRADING = "grading"
    READY = "ready"


class Ledger:
    """Groups by stage. All methods are synchronous: the driver's event loop is the only caller."""

    def __init__(self) -> None:
        self._rolling: dict[str, RollingGroup] = {}
        self._grading: dict[str, CompleteGroup] = {}
        self._ready: dict[str, deque[ReadyGroup]] = {}
        self._training: dict[str, ReadyGroup] = {}
        self._admitted: set[str] = set()
        self.dispatched = 0
        """Trajectories admitted since the start (or the resumed checkpoint)."""
        self.ended: Counter[str] = Counter()
        """Trajectories by end: trained, masked, or the group's outcome."""

    def admit(self, group: RollingGroup) -> None:
        """Take a group in. A group id is admitted once in a run.

        Raises:
            ValueError: the id was admitted before.
        """
        if group.group_id in self._admitted:
            raise ValueError(f"group {group.group_id} was admitted before")
        self._admitted.add(group.group_id)
        self._rolling[group.group_id] = group
        self.dispatched += group.size

    def record(self, group_id: str, slot: int, member: Member, now_s: float) -> CompleteGroup | None:
        """Put one ended trajectory in its slot; the complete group is returned with the last one, and is grading."""
        rolling = self._rolling[group_id]
        if slot in rolling.members:
            raise ValueError(f"slot {slot} of group {group_id} ended twice")
        rolling.members[slot] = member
        if len(rolling.members) < rolling.size:
            return None
        del self._rolling[group_id]
        complete = CompleteGroup(
            group_id=group_id,
            task=rolling.task,
            index=rolling.index,
            members=tuple(rolling.members[s] for s in range(rolling.size)),
            admitted_s=rolling.admitted_s,
            completed_s=now_s,
        )
        rolling.members.clear()  # loops that still hold the group must not hold its payloads
        self._grading[group_id] = complete
        return complete

    def is_grading(self, group_id: str) -> bool:
        """Whether a group is complete and has neither got its advantages nor ended."""
        return group_id in self._grading

    def make_ready(self, ready: ReadyGroup) -> None:
        """Move a complete group to the ready ones."""
        del self._grading[ready.group.group_id]
        self._ready.setdefault(ready.group.task.source, deque()).append(ready)

    def take_batch(self, quotas: Mapping[str, int]) -> list[ReadyGroup] | None:
        """The oldest ready groups by quota, or None while a quota is not met. Surplus stays for later steps (M6.3)."""
        if any(len(self._ready.get(source, ())) < want for source, want in quotas.items()):
            return None
        batch = [self._ready[source].popleft() for source, want in quotas.items() for _ in range(want)]
        self._training.update((r.group.group_id, r) for r in batch)
        return batch

    def take_stale(self, version: int, max_staleness: int) -> list[ReadyGroup]:
        """Remove ready groups with a token older than `max_staleness` versions (M6.4); the caller ends them."""
        stale: list[ReadyGroup] = []
        for queue in self._ready.values():
            keep = deque[ReadyGroup]()
            for ready in queue:
                oldest = ready.group.oldest_version
                too_old = oldest is not None and version - oldest > max_staleness
                (stale if too_old else keep).append(ready)
            queue.clear()
            queue.extend(keep)
        self._training.update((r.group.group_id, r) for r in stale)
        return stale

    def end(self, group: CompleteGroup, outcome: GroupOutcome) -> None:
        """The group leaves; its references are dropped with it."""
        left = self._grading.pop(group.group_id, None) or self._training.pop(group.group_id, None)
        if left is None:
            raise ValueError(f"group {group.group_id} ended, but it is neither graded nor in training")
        masked = len(group.members) - len(group.valid)
        self.ended["masked"] += masked
        self.ended[outcome.value] += len(group.members) - masked

    def count(self, stage: Stage, source: str | None = None) -> int:
        """Living groups of a stage, of one source or of all."""
        if stage is Stage.READY:
            return sum(len(q) for s, q in self._ready.items() if source in (None, s))
        groups: list[RollingGroup | CompleteGroup] = (
            list(self._rolling.values()) if stage is Stage.ROLLING else list(self._grading.values())
        )
        return sum(1 for g in groups if source in (None, g.task.source))

    def outstanding(self, source: str) -> int:
        """Groups of a source that hold a slot under the bound on staleness: all living ones. A group in the running
        step holds its own until the new weights are published, since what is admitted meanwhile is a version older."""
        training = sum(1 for r in self._training.values() if r.group.task.source == source)
        return training + sum(self.count(stage, source) for stage in Stage)

    def oldest_s(self, stage: Stage) -> float | None:
        """When the oldest group of a stage got there; None if there is none."""
        if stage is Stage.ROLLING:
            times = [g.admitted_s for g in self._rolling.values()]
        elif stage is Stage.GRADING:
            times = [g.completed_s for g in self._grading.values()]
        else:
            times = [r.ready_s for q in self._ready.values() for r in q]
        return min(times, default=None)

    @property
    def living(self) -> int:
        """Groups between admission and their end, those in the running optimiser step included."""
        return len(self._rolling) + len(self._grading) + self.count(Stage.READY) + len(self._training)

    @property
    def inflight(self) -> int:
        """Living groups but those that wait for their batch."""
        return self.living - self.count(Stage.READY)

    def pending(self) -> dict[str, list[int]]:
        """Source -> task indices of all living groups but those in the running step: a resume samples them again."""
        groups: list[RollingGroup | CompleteGroup] = [*self._rolling.values(), *self._grading.values()]
        groups += [r.group for q in self._ready.values() for r in q]
        out: dict[str, list[int]] = {}
        for group in groups:
            out.setdefault(group.task.source, []).append(group.index)
        return {source: sorted(indices) for source, indices in out.items()}

    def check(self) -> None:
        """Conservation.

        Raises:
            ValueError: dispatched trajectories do not equal living plus ended ones.
        """
        living = sum(g.size for g in self._rolling.values())
        living += sum(len(g.members) for g in self._grading.values())
        living += sum(len(r.group.members) for q in self._ready.values() for r in q)
        living += sum(len(r.group.members) for r in self._training.values())
        ended = sum(self.ended.values())
        if living + ended != self.dispatched:
            raise ValueError(f"{self.dispatched} trajectories dispatched, but {living} living and {ended} ended")
