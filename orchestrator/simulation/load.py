"""What the simulated work is: times, outcomes and losses, drawn so that seed and identifier alone decide them.

The order in which things happen therefore never changes what happens to a trajectory or group, and two schedules are
compared on the same work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from configs.trace_schema import TraceConfig, TraceSource
from envs.task import ExactAnswer, Split, Task, TaskKind

_ANSWER = ExactAnswer(answer="")
_NO_FILES: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDraw:
    """Everything of a group that does not depend on when it runs."""

    times_s: tuple[float, ...]
    """[n] time of each slot's first attempt, were it not lost."""
    passed: tuple[bool, ...]
    """[n]"""
    lost_at: tuple[float | None, ...]
    """[n] the part of its time after which a first attempt is lost; None: it is not."""
    common: float
    """Factor of the task on all its times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One trajectory."""

    time_s: float
    lost: bool
    passed: bool


class SimulatedSource:
    """A stream of tasks that hold nothing but their names."""

    def __init__(self, name: str, kind: TaskKind) -> None:
        self.name = name
        self.kind = kind

    def task(self, split: Split, index: int) -> Task:
        """See TaskSource."""
        return Task(
            task_id=f"{self.name}/{split.value}/0/{index}",
            source=self.name,
            kind=self.kind,
            split=split,
            statement="",
            files=_NO_FILES,
            verifier=_ANSWER,
        )


class Load:
    """The draws of one trace."""

    def __init__(self, trace: TraceConfig) -> None:
        self._trace = trace
        spread, share = trace.rollout.spread, trace.rollout.task_share
        self._task_sigma = spread * math.sqrt(share)
        self._own_sigma = spread * math.sqrt(1.0 - share)
        self._median = {
            name: 60.0 * source.time_min * math.exp(-(spread**2) / 2.0) for name, source in trace.sources.items()
        }

    def source(self, name: str) -> TraceSource:
        return self._trace.sources[name]

    def group(self, source: str, group_id: str) -> GroupDraw:
        """The same at every call."""
        random = Random(f"{self._trace.seed}/{group_id}")
        size = self._trace.group_size
        common = math.exp(random.gauss(0.0, self._task_sigma))
        middle = self._median[source] * common
        times_s = tuple(middle * math.exp(random.gauss(0.0, self._own_sigma)) for _ in range(size))
        if random.random() < self._trace.sources[source].acceptance:
            passing = set(random.sample(range(size), random.randint(1, size - 1)))
            passed = tuple(i in passing for i in range(size))
        else:
            passed = (random.random() < 0.5,) * size
        lost_at = tuple(self._lost_at(random) for _ in range(size))
        return GroupDraw(times_s=times_s, passed=passed, lost_at=lost_at, common=common)

    def attempt(self, group: GroupDraw, source: str, trajectory_id: str) -> Attempt:
        """A trajectory, by its id "<group>/<slot>.<attempt>"."""
        slot, _, number = trajectory_id.rpartition("/")[2].partition(".")
        time_s, lost_at = group.times_s[int(slot)], group.lost_at[int(slot)]
        if number != "0":
            random = Random(f"{self._trace.seed}/{trajectory_id}")
            time_s = self._median[source] * group.common * math.exp(random.gauss(0.0, self._own_sigma))
            lost_at = self._lost_at(random)
        if lost_at is not None:
            return Attempt(time_s=time_s * lost_at, lost=True, passed=False)
        return Attempt(time_s=time_s, lost=False, passed=group.passed[int(slot)])

    def _lost_at(self, random: Random) -> float | None:
        return random.random() if random.random() < self._trace.rollout.lost_share else None

    def grading(self, group_id: str, attempt: int) -> tuple[float, bool, bool]:
        """Time in seconds were nothing to end it, whether the grader is lost, whether the verdict is invalid."""
        settings = self._trace.grading
        assert settings is not None
        random = Random(f"{self._trace.seed}/{group_id}#{attempt}")
        median_s = settings.time_s * math.exp(-(settings.spread**2) / 2.0)
        time_s = median_s * math.exp(random.gauss(0.0, settings.spread))
        lost = random.random() < settings.lost_share
        return time_s * random.random() if lost else time_s, lost, random.random() < settings.invalid_share
