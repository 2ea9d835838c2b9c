"""What the scheduler is made of, and whom it tells: see loop.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from envs.task import TaskSource
from infra.pool import ActorPool
from learner.group import LearnerGroup, StepStats
from orchestrator.alarms import Alarm
from orchestrator.canaries import Canaries

if TYPE_CHECKING:
    from orchestrator.loop import Scheduler
    from rollout.engine_pool import EnginePool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What build.py wires together."""

    sources: Mapping[str, TaskSource]
    engines: EnginePool
    rollout: ActorPool
    grader: ActorPool | None
    learner: LearnerGroup
    canaries: Canaries | None = None
    rollouts: Path | None = None
    """Folder of the finished rollouts, if they are kept (rollout/spool.py)."""


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """What happened between the ends of two optimiser steps, for metrics."""

    started_s: float
    records: list[dict[str, Any]] = field(default_factory=list)
    """Audit records of the groups that ended."""
    retries: Counter[str] = field(default_factory=Counter)
    """Trajectories sampled again, by the status of the lost one."""
    unwritten: int = 0
    """Trajectories that ended and whose file the disk did not take."""


class Observer(Protocol):
    """Told what happens; shows and logs it. Must not raise but for storage failures."""

    def on_step(self, scheduler: Scheduler, record: StepRecord, stats: StepStats) -> None:
        """Optimiser step `scheduler.step` is done and its weights are published."""
        ...

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is complete."""
        ...

    def on_alarm(self, alarm: Alarm) -> None:
        """An alarm on the graders began or ended."""
        ...

    def on_tick(self, scheduler: Scheduler, still_s: float) -> None:
        """Called every second; nothing has moved for `still_s`."""
        ...
