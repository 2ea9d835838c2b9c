"""Simulated pools, learner and engines, with the methods that the scheduler calls on the real ones.

Their work is time that passes on the running loop, drawn by load.py. What the scheduler gets back is of the production
types, so that crediting, auditing and accounting run as they do in a real run.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.schema import RubricConfig
from configs.trace_schema import TraceConfig
from envs.task import Task
from grader.exchange import GradeReply, GradeRequest, lost_reply
from grader.rubric import Flags, Scores, factors, tier_of, weighted_score
from grader.verdict import CandidateGrade, FallbackReason, Grade
from infra.pool import ActorLost
from learner.group import BatchItem, StepStats
from orchestrator.simulation.load import Attempt, GroupDraw, Load
from orchestrator.simulation.workclock import WorkClock
from rollout.trajectory import Status, Trajectory
from rollout.worker import lost_trajectory

_SHA256 = "0" * 64
_SCORES = (Scores(5, 5, 4, 5, 5), Scores(4, 4, 3, 4, 4), Scores(2, 2, 2, 2, 3))
"""Scores of a T1, a T2 and a T3 solution (M3.2)."""


class Area:
    """Busy slots over time: their integral, by label."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` counts the seconds in which a slot in use does anything."""
        self._now_s = now_s
        self.busy = Counter[str]()
        """Slots in use now."""
        self._slot_s = Counter[str]()
        self._since_s: dict[str, float] = {}

    def add(self, label: str, change: int) -> None:
        """`change` more slots are in use from now on."""
        now_s = self._now_s()
        self._slot_s[label] += self.busy[label] * (now_s - self._since_s.get(label, now_s))  # type: ignore[assignment]
        self._since_s[label] = now_s
        self.busy[label] += change

    def slot_s(self) -> dict[str, float]:
        """Slot-seconds up to now, by label."""
        for label in list(self.busy):
            self.add(label, 0)
        return dict(self._slot_s)


class SimulatedEngines:
    """Stands for EnginePool: knows the version that samples now, and holds every rollout up while it takes another."""

    def __init__(self, clock: WorkClock) -> None:
        self.clock = clock
        self.version = 0


class SimulatedPool:
    """What ActorPool shows of its slots, with actors of one slot each. They are given out in turn."""

    def __init__(self, name: str, slots: int, now_s: Callable[[], float]) -> None:
        self.name = name
        self.restarts = 0
        self.area = Area(now_s)
        self._busy = 0
        self._slots = slots
        self._waiting = deque[tuple[asyncio.Future[None], float]]()
        self._listeners: list[Callable[[], None]] = []

    def capacity(self) -> int:
        """See ActorPool."""
        return self._slots

    def occupancy(self) -> tuple[int, int]:
        """(busy slots, all slots)."""
        return self._busy, self._slots

    def on_change(self, listener: Callable[[], None]) -> None:
        """See ActorPool."""
        self._listeners.append(listener)

    def resize(self, size: int, *, drain_s: float = 0.0) -> None:
        """More slots at once; fewer as their work ends."""
        self._slots = size
        for listener in self._listeners:
            listener()
        self._hand_out()

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return len(self._waiting)

    def queue_s(self) -> float:
        """Seconds that the oldest of them has waited."""
        return asyncio.get_running_loop().time() - self._waiting[0][1] if self._waiting else 0.0

    async def _acquire(self, source: str) -> None:
        if self._busy < self._slots and not self._waiting:
            self._busy += 1
        else:
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._waiting.append((future, loop.time()))
            await future
        self.area.add(source, 1)

    def _release(self, source: str) -> None:
        self.area.add(source, -1)
        self._busy -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self._busy < self._slots:
            future, _ = self._waiting.popleft()
            if not future.done():
                self._busy += 1
                future.set_result(None)


class SimulatedRollouts(SimulatedPool):
    """Stands for the pool of RolloutWorkers."""

    def __init__(self, trace: TraceConfig, load: Load, engines: SimulatedEngines) -> None:
        super().__init__("rollout", trace.rollout.slots, engines.clock.time)
        self._load = load
        self._engines = engines
        self._group_size = trace.group_size
        self._groups: dict[str, tuple[GroupDraw, int]] = {}
        """Group -> its draw and the first attempts of it that are still to come."""
        self.time_s: dict[str, list[float]] = {name: [0, 0.0] for name in trace.sources}
        """Source -> trajectories drawn and the sum of their times, lost ones left out, whatever became of them."""

    async def call(
        self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """`rollout(task, trajectory_id, group_id)`: (Trajectory, [payload reference, transcript reference])."""
        task, trajectory_id, group_id = args
        attempt = self._draw(task, trajectory_id, group_id)
        await self._acquire(task.source)
        first = self._engines.version
        try:
            await self._engines.clock.work(attempt.time_s)
        finally:
            self._release(task.source)
        if attempt.lost:
            gone = lost_trajectory(
                task, trajectory_id, group_id, Status.INFRA_SANDBOX, "simulated loss", attempt.time_s
            )
            return gone, [None, None]
        return self._trajectory(task, trajectory_id, group_id, attempt, first), [trajectory_id, trajectory_id]

    def _draw(self, task: Task, trajectory_id: str, group_id: str) -> Attempt:
        kept = self._groups.pop(group_id, None)
        draw, left = kept or (self._load.group(task.source, group_id), self._group_size)
        if left > 1 and trajectory_id.endswith(".0"):  # a group's first attempts start one after another
            self._groups[group_id] = (draw, left - 1)
        attempt = self._load.attempt(draw, task.source, trajectory_id)
        if not attempt.lost:
            drawn = self.time_s[task.source]
            drawn[0] += 1
            drawn[1] += attempt.time_s
        return attempt

    def _trajectory(self, task: Task, trajectory_id: str, group_id: str, attempt: Attempt, first: int) -> Trajectory:
        response = max(1, round(attempt.time_s * self._load.source(task.source).tokens_per_s))
        return Trajectory(
            trajectory_id=trajectory_id,
            group_id=group_id,
            task_id=task.task_id,
            source=task.source,
            status=Status.SUBMITTED,
            reward=float(attempt.passed),
            passed=attempt.passed,
            turns=1 + response // 1000,
            prompt_tokens=0,
            response_tokens=response,
            total_tokens=response,
            policy_versions=tuple(range(first, self._engines.version + 1)),
            payload_sha256=_SHA256,
            engine_s=attempt.time_s,
            sandbox_s=0.0,
            verify_s=0.0,
            wall_s=attempt.time_s,
        )


class SimulatedGraders(SimulatedPool):
    """Stands for the pool of GraderWorkers: valid verdicts, invalid ones, time-outs and lost graders."""

    def __init__(self, trace: TraceConfig, load: Load, rubric: RubricConfig) -> None:
        assert trace.grading is not None
        super().__init__("grader", trace.grading.slots, asyncio.get_running_loop().time)
        self._timeout_s = trace.grading.timeout_s
        self._load = load
        self._rubric = rubric

    async def call(
        self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None, **kwargs: Any
    ) -> GradeReply:
        """`grade(request, *transcripts)`."""
        request: GradeRequest = args[0]
        await self._acquire(request.task.source)
        try:
            time_s, lost, invalid = self._load.grading(request.group_id, request.attempt)
            await asyncio.sleep(min(time_s, self._timeout_s))
        finally:
            self._release(request.task.source)
        if lost:
            raise ActorLost(self.name, method, "simulated loss")
        nothing = lost_reply(request, "", run_s=min(time_s, self._timeout_s))
        if time_s > self._timeout_s:
            return replace(nothing, fallback_reason=FallbackReason.TIMEOUT)
        if invalid:
            return replace(nothing, fallback_reason=FallbackReason.SCHEMA)
        return replace(nothing, grade=self._grade(request), fallback_reason=None)

    def _grade(self, request: GradeRequest) -> Grade:
        """The passing candidates' tiers go round; all of a tier are tied."""
        passing = [t.trajectory_id for t in request.trajectories if t.passed]
        scores = [_SCORES[(request.order_seed + i) % len(_SCORES)] for i in range(len(passing))]
        flags = Flags()
        tiers = [tier_of(s, flags) for s in scores]
        ties = [0] * len(passing)
        return Grade(
            candidates={
                name: CandidateGrade(
                    scores=s,
                    flags=flags,
                    reasons=(),
                    weighted=weighted_score(s, self._rubric),
                    tier=tier,
                    tie=tie,
                    factor=factor,
                    evidence=(),
                )
                for name, s, tier, tie, factor in zip(
                    passing, scores, tiers, ties, factors(tiers, ties, self._rubric), strict=True
                )
            },
            hacks={},
        )


class SimulatedLearner:
    """Stands for LearnerGroup: a step takes as long as its tokens, publishing holds every rollout up."""

    def __init__(self, trace: TraceConfig) -> None:
        self._settings = trace.learner
        self.version = 0
        self.busy_s = 0.0
        """Seconds of steps and publishing."""

    async def train_step(self, items: Sequence[BatchItem], *, lr_scale: float = 1.0) -> StepStats:
        """See LearnerGroup."""
        tokens = sum(item.total_tokens for item in items)
        step_s = self._settings.fixed_s + tokens / self._settings.tokens_per_s
        await asyncio.sleep(step_s)
        self.busy_s += step_s
        return StepStats(
            loss=0.0,
            grad_norm=1.0,
            lr=0.0,
            skipped=False,
            entropy=0.0,
            ratio_mean=1.0,
            ratio_masked_share=0.0,
            logprob_gap_mean=None,
            logprob_gap_max=None,
            tokens=tokens,
            response_tokens=sum(item.response_tokens for item in items),
            sequences=len(items),
            microbatches=1,
            row_fill=1.0,
            rank_balance=1.0,
            padded_factor=1.0,
            step_s=step_s,
        )

    async def publish(self, pool: SimulatedEngines, version: int) -> float:
        """See LearnerGroup."""
        pool.clock.hold()
        await asyncio.sleep(self._settings.publish_s)
        pool.version = self.version = version
        pool.clock.release()
        self.busy_s += self._settings.publish_s
        return self._settings.publish_s

    async def save(self, folder: Path) -> None:
        """Nothing is kept."""
        folder.mkdir()

    async def export_hf(self, folder: Path) -> None:
        """Nothing is kept."""
        folder.mkdir()
