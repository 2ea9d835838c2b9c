"""The scheduler: one asyncio process, six small loops, bounded queues between them.

    source quota -> [mixer] -> task x n -> [rollout pool] -> trajectory (metadata + payload ref)
        -> [verifier] -> group complete -> masked / skipped / eligible
        -> eligible code group -> [grader pool] -> verdict -> factors      } other groups: outcome advantages
        -> [advantage] -> ready group -> batch of the step -> [learner group] -> new weights -> [engine pool]

No stage waits for another one's batch: groups are graded the moment they complete, while others roll out and the
learner steps. A full queue slows the stage before it. The driver holds metadata and references, never token payloads.
The graders' arrow is grading_stage.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from configs.schema import AdvantageMode, RunConfig
from envs.task import Split, TaskKind, TaskSource
from grader.exchange import GradeReply
from infra.errors import GagarError
from infra.pool import ActorLost, ActorPool, ActorTimeout
from infra.sinks import JsonlFile
from infra.spans import CHECKPOINT, LEARN, PUBLISH, ROLLOUT
from infra.telemetry import Telemetry
from learner.group import BatchItem, LearnerGroup, StepStats
from orchestrator.alarms import Alarm
from orchestrator.archive import GroupArchive
from orchestrator.audit import audit_record
from orchestrator.canaries import Canaries
from orchestrator.checkpoint import Checkpoints
from orchestrator.clock import Clock
from orchestrator.credit import Credit, GroupOutcome, classify, credit, skipped
from orchestrator.grading_stage import GradingStage
from orchestrator.ledger import CompleteGroup, Ledger, Member, ReadyGroup, RollingGroup
from orchestrator.mixer import Mixer
from orchestrator.progress import Activity
from rollout.worker import lost_trajectory

if TYPE_CHECKING:
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


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """What happened between the ends of two optimiser steps, for metrics."""

    started_s: float
    records: list[dict[str, Any]] = field(default_factory=list)
    """Audit records of the groups that ended."""
    retries: Counter[str] = field(default_factory=Counter)
    """Trajectories sampled again, by the status of the lost one."""


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


class Scheduler:
    """Runs the training of one run from `start_step` to the configured number of steps."""

    def __init__(
        self,
        *,
        config: RunConfig,
        parts: Parts,
        ledger: Ledger,
        mixer: Mixer,
        audit: JsonlFile,
        checkpoints: Checkpoints,
        telemetry: Telemetry,
        observer: Observer,
        start_step: int = 0,
        archive: GroupArchive | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or Clock()
        self.parts = parts
        self.ledger = ledger
        self.mixer = mixer
        self.audit = audit
        self.archive = archive
        self.checkpoints = checkpoints
        self.telemetry = telemetry
        self.step = start_step
        """Optimiser steps done; also the version of the weights in the engines."""
        self.moved_s = 0.0
        """When anything last moved: a trajectory that was not lost, a grade, a step."""
        self.activity: tuple[Activity, float] = ("waiting", 0.0)
        """What `_train` does, and since when."""
        self._observer = observer
        self.grading: GradingStage | None = None
        """None where nothing is graded."""
        if config.grader and parts.grader and config.algorithm.mode is not AdvantageMode.OUTCOME:
            self.grading = GradingStage(
                config=config.grader,
                seed=config.seed,
                pool=parts.grader,
                telemetry=telemetry,
                clock=self.clock,
                canaries=parts.canaries,
                spawn=self._spawn,
                step=lambda: self.step,
                on_grade=self._on_grade,
                on_alarm=observer.on_alarm,
            )
        rollout_slots = parts.rollout.occupancy()[1]
        self._to_roll: asyncio.Queue[tuple[RollingGroup, int, int]] = asyncio.Queue(maxsize=rollout_slots)
        self._ended: asyncio.Queue[tuple[str, int, Member]] = asyncio.Queue(maxsize=rollout_slots)
        self._roll_slots = asyncio.Semaphore(rollout_slots)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Set when a group became ready or ended: wakes `_admit` and `_train`."""
        self._record = StepRecord(started_s=0.0)

    async def run(self) -> None:
        """Train until the configured number of steps is done.

        Raises:
            ExceptionGroup: a loop failed; holds the GagarError that says what and why.
        """
        self.moved_s = self._record.started_s = self.clock.now()
        self.activity = ("waiting", self.moved_s)
        async with asyncio.TaskGroup() as group:
            self._group = group
            loops = [self._admit(), self._roll(), self._collect(), self._watch()]
            if self.grading is not None:
                loops.append(self.grading.run())
            for loop in loops:
                self._spawn(loop)
            await self._train()
            # What still rolls out or is graded is surplus: it is given up, and counted by nothing.
            for task in list(self._tasks):
                task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- source -> rollout ------------------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """Consumes the mixer's choices; produces (group, slot) into `_to_roll`. Waits for room under the in-flight and
        lookahead limits; unblocked by a group that ends, or by a step."""
        size = self.config.algorithm.group_size
        while True:
            self._changed.clear()
            source = self._next_source()
            if source is None:
                await self._changed.wait()
                continue
            index = self.mixer.take_index(source)
            task = self.parts.sources[source].task(Split.TRAIN, index)
            rolling = RollingGroup(
                group_id=f"{source}-{index:06d}",
                task=task,
                index=index,
                size=size,
                version=self.step,
                admitted_s=self.clock.now(),
            )
            self.ledger.admit(rolling)
            for slot in range(size):
                await self._to_roll.put((rolling, slot, 0))

    def _next_source(self) -> str | None:
        """The bound on staleness is structural: no more groups live than `max_staleness + 1` steps train, the running
        one included."""
        limits = self.config.scheduler
        if self.ledger.inflight >= limits.max_inflight_groups:
            return None
        outstanding = {name: self.ledger.outstanding(name) for name in self.mixer.sources}
        steps = min(limits.max_staleness + 1, self.config.steps - self.step)
        return self.mixer.choose(outstanding, steps)

    async def _roll(self) -> None:
        """Consumes `_to_roll`; starts one trajectory a free slot of the rollout pool. Unblocked by a freed slot."""
        while True:
            await self._roll_slots.acquire()
            rolling, slot, attempt = await self._to_roll.get()
            self._spawn(self._roll_one(rolling, slot, attempt))

    async def _roll_one(self, rolling: RollingGroup, slot: int, attempt: int) -> None:
        """One trajectory. Lost to infrastructure: only it is sampled again; its finished siblings stay."""
        trajectory_id = f"{rolling.group_id}/{slot}.{attempt}"
        start_s = self.clock.now()
        wall_s = self.config.rollout.limits.wall_s
        payload = transcript = None
        with self.telemetry.span(
            ROLLOUT, group_id=rolling.group_id, source=rolling.task.source, trajectory_id=trajectory_id
        ):
            try:
                trajectory, (payload, transcript) = await self.parts.rollout.call(
                    "rollout", rolling.task, trajectory_id, rolling.group_id, num_returns=3, timeout_s=2 * wall_s
                )
            except (ActorLost, ActorTimeout) as e:
                if self.parts.rollout.occupancy()[1] == 0:
                    # Every call would fail at once, for ever: groups would be skipped as fast as the disk takes them.
                    raise GagarError(
                        f"no rollout worker is left ({e}); mend what ends them, then run the same command with --resume"
                    ) from e
                trajectory = lost_trajectory(
                    rolling.task, trajectory_id, rolling.group_id, str(e), self.clock.now() - start_s
                )
            finally:
                self._roll_slots.release()
        if not trajectory.status.masked:  # losses alone are no progress, so `abort_after_s` ends a run of nothing else
            self.moved_s = self.clock.now()
        if trajectory.status.masked and attempt < self.config.rollout.infra_retries:
            self._record.retries[trajectory.status.value] += 1
            await self._to_roll.put((rolling, slot, attempt + 1))
            return
        member = Member(trajectory=trajectory, payload=payload, transcript=transcript)
        await self._ended.put((rolling.group_id, slot, member))

    # ---- complete -> graded -> ready --------------------------------------------------------------------------------

    async def _collect(self) -> None:
        """Consumes ended trajectories; complete groups are skipped, sent to the graders, or made ready at once."""
        while True:
            await self._take(*await self._ended.get())

    async def _take(self, group_id: str, slot: int, member: Member) -> None:
        group = self.ledger.record(group_id, slot, member, self.clock.now())
        if group is None:
            return
        trajectories = [m.trajectory for m in group.members]
        skip = classify(trajectories, self.config.algorithm.min_valid)
        if skip is not None:
            self._end(group, skipped(skip), skip)
        elif self.grading is not None and group.task.kind is TaskKind.CODE:
            await self.grading.put(group)
        else:
            self._ready(group, credit(trajectories, self.config.algorithm, grade=None, fallback_reason=None), None)

    def _on_grade(self, group: CompleteGroup, reply: GradeReply) -> None:
        """A grade, or why there is none (M1.10). For a group that has ended meanwhile it lands nowhere."""
        if not self.ledger.is_grading(group.group_id):
            return
        self.moved_s = self.clock.now()
        given = credit(
            [m.trajectory for m in group.members],
            self.config.algorithm,
            grade=reply.grade,
            fallback_reason=reply.fallback_reason.value if reply.fallback_reason else None,
        )
        if given.skip is not None:
            self._end(group, given, given.skip, reply)
        else:
            self._ready(group, given, reply)

    def _ready(self, group: CompleteGroup, given: Credit, reply: GradeReply | None) -> None:
        now_s = self.clock.now()
        self.ledger.make_ready(ReadyGroup(group=group, credit=given, reply=reply, ready_s=now_s))
        self.mixer.observe(group.task.source, accepted=True, time_s=group.completed_s - group.admitted_s)
        self._changed.set()

    def _end(
        self,
        group: CompleteGroup,
        given: Credit,
        outcome: GroupOutcome,
        reply: GradeReply | None = None,
        *,
        ready_s: float | None = None,
        step: int | None = None,
    ) -> None:
        """The group leaves in some way: it goes to the audit trail, if graded to the archive, and its references go
        free."""
        record = audit_record(
            group,
            given,
            outcome=outcome,
            step=step,
            lambda_max=self.config.algorithm.lambda_max,
            reply=reply,
            ready_s=ready_s,
        )
        self.audit.append(record)
        if reply is not None and self.archive is not None:
            self.archive.add(group)
        self._record.records.append(record)
        self.ledger.end(group, outcome)
        if outcome not in (GroupOutcome.TRAINED, GroupOutcome.DROPPED_STALE):
            self.mixer.observe(group.task.source, accepted=False, time_s=group.completed_s - group.admitted_s)
        self._changed.set()

    # ---- ready -> trained -> published ------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Consumes ready groups by quota; produces new weights in the engines. Waits for a full batch."""
        while self.step < self.config.steps:
            batch = await self._batch()
            self.mixer.consumed()
            step = self.step + 1
            with self._doing("learning", LEARN, step):
                stats = await self.parts.learner.train_step(_items(batch))
            with self._doing("publishing", PUBLISH, step):
                await self.parts.learner.publish(self.parts.engines, step)
            self.step = step
            for ready in batch:
                self._end(
                    ready.group, ready.credit, GroupOutcome.TRAINED, ready.reply, ready_s=ready.ready_s, step=step
                )
            del batch, ready  # else the next step's wait keeps their payloads in the object store
            self.ledger.check()
            record, self._record = self._record, StepRecord(started_s=self.moved_s)
            self._observer.on_step(self, record, stats)
            if step % self.config.checkpoint.every_steps == 0 or step == self.config.steps:
                with self._doing("checkpointing", CHECKPOINT, step):
                    path = await self.checkpoints.save(step, self.parts.learner, self._state())
                self._observer.on_checkpoint(path)
            self._changed.set()

    async def _batch(self) -> list[ReadyGroup]:
        """The step's groups; what has become too old is dropped first and counted (M6.4)."""
        while True:
            self._changed.clear()
            for stale in self.ledger.take_stale(self.step, self.config.scheduler.max_staleness):
                self.mixer.lost(stale.group.task.source)
                self._end(stale.group, stale.credit, GroupOutcome.DROPPED_STALE, stale.reply, ready_s=stale.ready_s)
            batch = self.ledger.take_batch(self.mixer.quotas)
            if batch is not None:
                return batch
            await self._changed.wait()

    @contextmanager
    def _doing(self, activity: Activity, span: str, step: int) -> Iterator[None]:
        self.activity = (activity, self.clock.now())
        with self.telemetry.span(span, step=step):
            yield
        self.moved_s = self.clock.now()
        self.activity = ("waiting", self.moved_s)

    def _state(self) -> dict[str, Any]:
        return {"mixer": self.mixer.state(self.ledger.pending())}

    # ---- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Shows progress every second. Raises GagarError when nothing has moved for `abort_after_s`."""
        while True:
            await asyncio.sleep(1.0)
            still_s = self.clock.now() - self.moved_s
            self._observer.on_tick(self, still_s)
            if still_s > self.config.scheduler.abort_after_s:
                raise GagarError(
                    f"nothing moved for {still_s:.0f} s (scheduler.abort_after_s); the last checkpoint is intact: "
                    "look at the stall messages above, then run the same command with --resume"
                )


def _items(batch: list[ReadyGroup]) -> list[BatchItem]:
    return [
        BatchItem(
            trajectory_id=m.trajectory.trajectory_id,
            group_id=ready.group.group_id,
            advantage=ready.credit.rows[m.trajectory.trajectory_id].advantage,
            response_tokens=m.trajectory.response_tokens,
            total_tokens=m.trajectory.total_tokens,
            payload=m.payload,
        )
        for ready in batch
        for m in ready.group.valid
    ]
