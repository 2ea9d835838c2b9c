"""The single owner of who is where: every group from admission to its end, and the counts that must add up.

One type a stage: a group is rolling, then complete, then ready, then ended. Payloads and transcripts are held as
references only; they are let go when the group ends in any way.

Conservation: each dispatched trajectory ends exactly once, with its group, as trained, masked, skipped, dropped or
failed. `Ledger.check` raises if the counts do not add up. What a resume needs is written ahead to a `LedgerLog`
(orchestrator/ledger_store.py).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

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
    effective_s: float | None = None
    """Time in its slot, pauses of generation left out (M6); None if an earlier session sampled it."""


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
    number: int = 0
    """Order of admission; given by the ledger."""
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
    version: int = 0
    """Policy version at admission: no token is older."""
    number: int = 0
    """Order of admission."""

    @property
    def valid(self) -> tuple[Member, ...]:
        """The members that could be evaluated (M1.3)."""
        return tuple(m for m in self.members if not m.trajectory.status.masked)

    @property
    def effective_s(self) -> float | None:
        """Mean effective time of its rollouts; None if none was timed."""
        times = [m.effective_s for m in self.valid if m.effective_s is not None]
        return sum(times) / len(times) if times else None

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


@dataclass(slots=True)
class _Counts:
    """Living groups of one source, so that no question walks through all of them."""

    stages: Counter[str] = field(default_factory=Counter)
    training: int = 0
    trajectories: int = 0
    """Of rolling groups: those that have not ended."""
    unfinished: Counter[int] = field(default_factory=Counter)
    """Groups that roll or are graded, by their version at admission."""
    next_index: int = 0
    """The mixer hands tasks out in the order of the stream: none below this one is admitted any more."""
    back: set[int] = field(default_factory=set)
    """Tasks from `next_index` on that a resume brought back; the stream passes over them."""


class LedgerLog(Protocol):
    """Told of what a resume must know, before anything is done about it. See orchestrator/ledger_store.py."""

    def admitted(self, group: RollingGroup) -> None:
        """A new group is about to be sampled."""
        ...

    def graded(self, group_id: str, reply: GradeReply) -> None:
        """A grader has answered."""
        ...

    def ended(self, group_id: str, outcome: GroupOutcome) -> None:
        """A group has left."""
        ...

    def mark(self) -> int:
        """Number of the last end, for a checkpoint of this moment."""
        ...

    async def flush(self) -> None:
        """Everything so far is on the disk."""
        ...

    def forget(self, mark: int) -> None:
        """A checkpoint with this mark is complete."""
        ...


class Stage(StrEnum):
    """Where a living group is."""

    ROLLING = "rolling"
    GRADING = "grading"
    READY = "ready"


class Ledger:
    """Groups by stage. All methods are synchronous: the driver's event loop is the only caller."""

    def __init__(self, log: LedgerLog | None = None) -> None:
        self.log = log
        """Where it is written ahead; None: a crash loses everything that no checkpoint covers."""
        self._rolling: dict[str, RollingGroup] = {}
        self._grading: dict[str, CompleteGroup] = {}
        self._ready: dict[str, ReadyGroup] = {}
        self._training: dict[str, ReadyGroup] = {}
        self._numbers = itertools.count()
        self._counts: dict[str, _Counts] = {}
        self.dispatched = 0
        """Trajectories admitted since the start (or brought back by a resume)."""
        self.ended: Counter[str] = Counter()
        """Trajectories by end: trained, masked, or the group's outcome."""

    def _of(self, source: str) -> _Counts:
        return self._counts.setdefault(source, _Counts())

    # ---- transitions ------------------------------------------------------------------------------------------------

    def admit(self, group: RollingGroup, *, again: bool = False) -> None:
        """Take a group in, the tasks of a source in the order of its stream. `again`: a resume brings the group back
        from the log, in any order, and before any new one of its source.

        Raises:
            ValueError: its task, or a later one of the source, was admitted before.
        """
        counts = self._of(group.task.source)
        if group.index < counts.next_index or group.index in counts.back:
            raise ValueError(f"group {group.group_id}, or a later one of its source, was admitted before")
        if again:
            counts.back.add(group.index)
        else:
            counts.next_index = group.index + 1
            if counts.back:  # of a resume; empty once the stream has passed them
                counts.back = {index for index in counts.back if index > group.index}
        group.number = next(self._numbers)
        self._rolling[group.group_id] = group
        self.dispatched += group.size
        counts.stages[Stage.ROLLING] += 1
        counts.trajectories += group.size
        counts.unfinished[group.version] += 1
        if self.log is not None and not again:
            self.log.admitted(group)

    def record(self, group_id: str, slot: int, member: Member, now_s: float) -> CompleteGroup | None:
        """Put one ended trajectory in its slot; the complete group is returned with the last one, and is grading."""
        rolling = self._rolling[group_id]
        if slot in rolling.members:
            raise ValueError(f"slot {slot} of group {group_id} ended twice")
        rolling.members[slot] = member
        counts = self._of(rolling.task.source)
        counts.trajectories -= 1
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
            version=rolling.version,
            number=rolling.number,
        )
        rolling.members.clear()  # loops that still hold the group must not hold its payloads
        self._grading[group_id] = complete
        counts.stages[Stage.ROLLING] -= 1
        counts.stages[Stage.GRADING] += 1
        return complete

    def is_grading(self, group_id: str) -> bool:
        """Whether a group is complete and has neither got its advantages nor ended."""
        return group_id in self._grading

    def graded(self, group_id: str, reply: GradeReply) -> None:
        """A grader's answer for a complete group: it is kept, so that no resume asks for it again."""
        if self.log is not None:
            self.log.graded(group_id, reply)

    def make_ready(self, ready: ReadyGroup) -> None:
        """Move a complete group to the ready ones."""
        self._leave_grading(ready.group)
        self._ready[ready.group.group_id] = ready
        self._of(ready.group.task.source).stages[Stage.READY] += 1

    def take_batch(
        self, quotas: Mapping[str, int], *, step: int = 0, wait_staleness: int | None = None
    ) -> list[ReadyGroup] | None:
        """Ready groups by quota, those admitted first first, or None while a quota is not met. Surplus stays (M6.3).

        With `wait_staleness` also None while a batch, `step` steps being done, would leave more old groups behind than
        the steps left to them train: then it waits for those that are not ready (M6.4).
        """
        if any(self.count(Stage.READY, source) < want for source, want in quotas.items()):
            return None
        by_source: dict[str, list[ReadyGroup]] = {source: [] for source in quotas}
        for ready in self._ready.values():
            by_source.get(ready.group.task.source, []).append(ready)
        for source, groups in by_source.items():
            groups.sort(key=lambda r: r.group.number)
            if wait_staleness is not None:
                left = groups[quotas[source] :]
                if self._must_wait(source, quotas[source], left, step, wait_staleness):
                    return None
        batch = [r for source, want in quotas.items() for r in by_source[source][:want]]
        for ready in batch:
            self._leave_ready(ready)
        return batch

    def _must_wait(self, source: str, quota: int, left: list[ReadyGroup], step: int, staleness: int) -> bool:
        """After this batch, j more steps can train j quotas of groups no newer than step - staleness + j: earliest
        deadline first. More than that means waiting, if any of them is not ready yet."""
        unfinished = self._of(source).unfinished
        for j in range(staleness + 1):
            newest = step - staleness + j
            rolling = sum(n for version, n in unfinished.items() if version <= newest)
            if rolling and rolling + sum(r.group.version <= newest for r in left) > j * quota:
                return True
        return False

    def put_back(self, ready: ReadyGroup) -> None:
        """The step that took the group did not happen: it is ready again."""
        del self._training[ready.group.group_id]
        self._ready[ready.group.group_id] = ready
        counts = self._of(ready.group.task.source)
        counts.training -= 1
        counts.stages[Stage.READY] += 1

    def take_stale(self, version: int, max_staleness: int) -> list[ReadyGroup]:
        """Remove ready groups with a token older than `max_staleness` versions (M6.4); the caller ends them."""
        stale = [r for r in self._ready.values() if is_stale(r.group, version, max_staleness)]
        for ready in stale:
            self._leave_ready(ready)
        return stale

    def end(self, group: CompleteGroup, outcome: GroupOutcome) -> None:
        """The group leaves; its references are dropped with it."""
        if group.group_id in self._grading:
            self._leave_grading(group)
        elif self._training.pop(group.group_id, None) is not None:
            self._of(group.task.source).training -= 1
        else:
            raise ValueError(f"group {group.group_id} ended, but it is neither graded nor in training")
        masked = len(group.members) - len(group.valid)
        self.ended["masked"] += masked
        self.ended[outcome.value] += len(group.members) - masked
        if self.log is not None:
            self.log.ended(group.group_id, outcome)

    def _leave_grading(self, group: CompleteGroup) -> None:
        del self._grading[group.group_id]
        counts = self._of(group.task.source)
        counts.stages[Stage.GRADING] -= 1
        counts.unfinished[group.version] -= 1
        if not counts.unfinished[group.version]:
            del counts.unfinished[group.version]

    def _leave_ready(self, ready: ReadyGroup) -> None:
        del self._ready[ready.group.group_id]
        self._training[ready.group.group_id] = ready
        counts = self._of(ready.group.task.source)
        counts.stages[Stage.READY] -= 1
        counts.training += 1

    # ---- questions --------------------------------------------------------------------------------------------------

    def count(self, stage: Stage, source: str | None = None) -> int:
        """Living groups of a stage, of one source or of all."""
        if source is not None:
            return self._of(source).stages[stage]
        return sum(counts.stages[stage] for counts in self._counts.values())

    def rolling(self) -> dict[str, int]:
        """Source -> trajectories that run or wait for a slot."""
        return {source: counts.trajectories for source, counts in self._counts.items()}

    def outstanding(self, source: str, *, oldest: int | None = None) -> int:
        """Groups of a source that hold a slot under the bound on staleness: all living ones. A group in the running
        step holds its own until the new weights are published, since what is admitted meanwhile is a version older.
        Groups admitted before version `oldest` will be dropped, and hold none."""
        counts = self._of(source)
        living = counts.training + counts.stages.total()
        if oldest is not None:
            living -= sum(n for version, n in counts.unfinished.items() if version < oldest)
        return living

    def oldest_s(self, stage: Stage) -> float | None:
        """When the oldest group of a stage got there; None if there is none."""
        if stage is Stage.ROLLING:
            return next((g.admitted_s for g in self._rolling.values()), None)
        if stage is Stage.GRADING:
            return next((g.completed_s for g in self._grading.values()), None)
        return next((r.ready_s for r in self._ready.values()), None)

    @property
    def living(self) -> int:
        """Groups between admission and their end, those in the running optimiser step included."""
        return len(self._rolling) + len(self._grading) + len(self._ready) + len(self._training)

    @property
    def inflight(self) -> int:
        """Living groups but those that wait for their batch."""
        return self.living - len(self._ready)

    def pending(self) -> dict[str, list[int]]:
        """Source -> task indices of all living groups but those in the running step: a resume samples them again."""
        groups: list[RollingGroup | CompleteGroup] = [*self._rolling.values(), *self._grading.values()]
        groups += [r.group for r in self._ready.values()]
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
        living += sum(len(r.group.members) for r in self._ready.values())
        living += sum(len(r.group.members) for r in self._training.values())
        ended = sum(self.ended.values())
        if living + ended != self.dispatched:
            raise ValueError(f"{self.dispatched} trajectories dispatched, but {living} living and {ended} ended")


def is_stale(group: CompleteGroup, version: int, max_staleness: int) -> bool:
    """Whether a token of the group would be older than `max_staleness` steps in the next one (M6.4)."""
    oldest = group.oldest_version
    return oldest is not None and version - oldest > max_staleness
