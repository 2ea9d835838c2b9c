"""The scheduler: one asyncio process, a few small loops, and no queue without a bound.

    source quota -> [mixer] -> task x n -> [rollout pool] -> trajectory (metadata + payload ref)
        -> [verifier] -> group complete -> masked / skipped / eligible
        -> eligible code group -> [grader pool] -> verdict -> factors      } other groups: outcome advantages
        -> [advantage] -> ready group -> batch of the step -> [learner group] -> new weights -> [engine pool]

No stage waits for another one's batch: groups are graded the moment they complete, while others roll out and the
learner steps. What is under way is bounded where it is admitted: by slots and KV cache (admission.py), by need and
staleness (mixer.py), and by what waits for a grader. The driver holds metadata and references, never token payloads.
The rollouts' arrows are rollout_stage.py, the graders' grading_stage.py; docs/scheduling.md has the rules in words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from configs.schema import AdvantageMode, RunConfig
from envs.task import Split, TaskKind
from grader.exchange import GradeReply
from infra.errors import GagarError
from infra.sinks import JsonlFile
from infra.spans import CHECKPOINT, LEARN, PUBLISH
from infra.telemetry import Telemetry
from learner.group import BatchItem
from orchestrator.admission import Admission
from orchestrator.alarms import SupplyWatch
from orchestrator.archive import GroupArchive
from orchestrator.audit import audit_record
from orchestrator.checkpoint import Checkpoints
from orchestrator.clock import Clock
from orchestrator.credit import Credit, GroupOutcome, classify, credit, skipped
from orchestrator.grading_stage import GradingStage
from orchestrator.ledger import CompleteGroup, Ledger, Member, ReadyGroup, RollingGroup, is_stale
from orchestrator.ledger_store import KeptGroup, covers
from orchestrator.mixer import Mixer
from orchestrator.parts import Observer, Parts, StepRecord
from orchestrator.progress import Activity
from orchestrator.rollout_stage import RolloutStage
from rollout.trajectory import Trajectory

__all__ = ["Observer", "Parts", "Scheduler", "StepRecord"]


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
        admission: Admission | None = None,
        kept: Sequence[KeptGroup] = (),
        clock: Clock | None = None,
    ) -> None:
        """`kept`: groups that an earlier session left behind, brought back before anything new is admitted."""
        self.config = config
        self.parts = parts
        self.ledger = ledger
        self.mixer = mixer
        self.audit = audit
        self.archive = archive
        self.checkpoints = checkpoints
        self.telemetry = telemetry
        self.admission = admission or Admission.of(config)
        self.clock = clock or Clock()
        self.step = start_step
        """Optimiser steps done; also the version of the weights in the engines."""
        self.moved_s = 0.0
        """When anything last moved: a trajectory that was not lost, a grade, a step."""
        self.activity: tuple[Activity, float] = ("waiting", 0.0)
        """What `_train` does, and since when."""
        self.supply = SupplyWatch(mixer)
        self._observer = observer
        self._kept = kept
        self._grades = {group.group_id: group.reply for group in kept if group.reply is not None and group.whole}
        """Grades of an earlier session, for groups whose rollouts come back."""
        self.rollouts = RolloutStage(
            config=config.rollout,
            pool=parts.rollout,
            telemetry=telemetry,
            clock=self.clock,
            spawn=self._spawn,
            on_end=self._take,
            on_retry=self._on_retry,
        )
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        """Set when a rollout or a group ended, or a step: wakes `_admit`."""
        self._supplied = asyncio.Event()
        """Set when a group became ready or ended: wakes `_train`."""
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
            loops = [self._admit(), self.rollouts.run(), self._watch()]
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
        """Consumes the mixer's choices; produces groups for the rollouts. Waits for room under every bound; unblocked
        by a rollout or group that ends, or by a step."""
        await self._bring_back()
        while True:
            self._room.clear()
            source = self._next_source()
            if source is None:
                await self._room.wait()
                continue
            index = self.mixer.take_index(source)
            rolling = self._rolling(f"{source}-{index:06d}", source, index, self.config.algorithm.group_size, self.step)
            self.ledger.admit(rolling)
            self.rollouts.put(rolling, range(rolling.size))
            del rolling
            await asyncio.sleep(0)  # making tasks takes time: others run in between

    def _next_source(self) -> str | None:
        """The bound on staleness is structural: no more groups live than the steps train that may train on them, the
        running one included. Without asynchronous training that is the step being collected, and no other."""
        limits = self.config.scheduler
        if self.ledger.inflight >= limits.max_inflight_groups:
            return None
        if not limits.asynchronous and self.activity[0] in ("learning", "publishing"):
            return None
        rolling, slots = self.ledger.rolling(), self.rollouts.slots.size
        if self.admission.full(rolling, slots) is not None:
            return None
        closed = self.admission.closed(rolling)
        if self.grading is not None and self.grading.full:
            closed |= {name for name in self.mixer.sources if self.parts.sources[name].kind is TaskKind.CODE}
        oldest = self.step - limits.staleness
        outstanding = {name: self.ledger.outstanding(name, oldest=oldest) for name in self.mixer.sources}
        steps = min(limits.staleness + 1, self.config.steps - self.step)
        return self.mixer.choose(outstanding, steps, rolling=rolling, slots=slots, closed=closed)

    def _rolling(self, group_id: str, source: str, index: int, size: int, version: int) -> RollingGroup:
        return RollingGroup(
            group_id=group_id,
            task=self.parts.sources[source].task(Split.TRAIN, index),
            index=index,
            size=size,
            version=version,
            admitted_s=self.clock.now(),
        )

    async def _bring_back(self) -> None:
        """Groups of an earlier session first, and whole: whatever of them had ended is kept, so what a resume trains on
        is what was admitted, not what happened to be short."""
        kept = [k for k in self._kept if k.source in self.mixer.sources]
        self._kept = ()
        back = []
        for k in kept:
            rolling = self._rolling(k.group_id, k.source, k.index, k.size, min(k.version, self.step))
            self.ledger.admit(rolling, again=True)
            back.append(self.rollouts.bring_back(rolling, k.rollouts, whole=k.whole))
        await asyncio.gather(*back)

    def _on_retry(self, trajectory: Trajectory) -> None:
        """It was lost, and only it is sampled again. Losses alone are no progress, so `abort_after_s` ends a run of
        nothing else."""
        self._record.retries[trajectory.status.value] += 1

    # ---- complete -> graded -> ready --------------------------------------------------------------------------------

    async def _take(self, rolling: RollingGroup, slot: int, member: Member) -> None:
        """A trajectory ended. A complete group is skipped, sent to the graders, or made ready at once."""
        trajectory = member.trajectory
        if not trajectory.status.masked:
            self.moved_s = self.clock.now()
            self.admission.observe(trajectory.source, trajectory.total_tokens)
        group = self.ledger.record(rolling.group_id, slot, member, self.clock.now())
        self._room.set()
        if group is None:
            return
        trajectories = [m.trajectory for m in group.members]
        skip = classify(trajectories, self.config.algorithm.min_valid)
        if skip is not None:
            self._end(group, skipped(skip), skip)
        elif is_stale(group, self.step, self.config.scheduler.staleness):
            self._end(group, skipped(GroupOutcome.DROPPED_STALE), GroupOutcome.DROPPED_STALE)
        elif self.grading is None or group.task.kind is not TaskKind.CODE:
            self._ready(group, credit(trajectories, self.config.algorithm, grade=None, fallback_reason=None), None)
        elif (reply := self._grades.pop(group.group_id, None)) is not None and covers(reply, trajectories):
            self._on_grade(group, reply)
        else:
            await self.grading.put(group)

    def _on_grade(self, group: CompleteGroup, reply: GradeReply) -> None:
        """A grade, or why there is none (M1.10). For a group that has ended meanwhile it lands nowhere."""
        if not self.ledger.is_grading(group.group_id):
            return
        self.ledger.graded(group.group_id, reply)
        self.moved_s = self.clock.now()
        given = credit(
            [m.trajectory for m in group.members],
            self.config.algorithm,
            grade=reply.grade,
            fallback_reason=reply.fallback_reason.value if reply.fallback_reason else None,
        )
        if given.skip is not None:
            self._end(group, given, given.skip, reply)
        elif is_stale(group, self.step, self.config.scheduler.staleness):
            self._end(group, given, GroupOutcome.DROPPED_STALE, reply)
        else:
            self._ready(group, given, reply)

    def _ready(self, group: CompleteGroup, given: Credit, reply: GradeReply | None) -> None:
        now_s = self.clock.now()
        self.ledger.make_ready(ReadyGroup(group=group, credit=given, reply=reply, ready_s=now_s))
        self.mixer.observe(group.task.source, accepted=True, time_s=group.effective_s)
        self._moved_on()

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
        source = group.task.source
        if outcome is GroupOutcome.TRAINED:
            self.mixer.trained(source)
        elif outcome is GroupOutcome.DROPPED_STALE:
            self.mixer.stale(source, ready=ready_s is not None)
        else:
            self.mixer.observe(source, accepted=False, time_s=group.effective_s)
        self._moved_on()

    def _moved_on(self) -> None:
        """A group became ready or ended."""
        for alarm in self.supply.changes():
            self._observer.on_alarm(alarm)
        self._room.set()
        self._supplied.set()

    # ---- ready -> trained -> published ------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Consumes ready groups by quota; produces new weights in the engines. Waits for a full batch."""
        while self.step < self.config.steps:
            batch = await self._batch()
            self.mixer.consumed()
            step = self.step + 1
            with self._doing("learning", LEARN, step):
                stats = await self.parts.learner.train_step(_items(batch))
            self.rollouts.paused.begin()
            with self._doing("publishing", PUBLISH, step):
                await self.parts.learner.publish(self.parts.engines, step)
            self.rollouts.paused.end()
            self.step = step
            for ready in batch:
                self._end(
                    ready.group, ready.credit, GroupOutcome.TRAINED, ready.reply, ready_s=ready.ready_s, step=step
                )
            del batch, ready  # else the next step's wait keeps their payloads in the object store
            self._drop_stale()
            self.ledger.check()
            record, self._record = self._record, StepRecord(started_s=self.moved_s)
            self._observer.on_step(self, record, stats)
            if step % self.config.checkpoint.every_steps == 0 or step == self.config.steps:
                await self._checkpoint(step)

    def _drop_stale(self) -> None:
        """Ready groups that have become too old are dropped and counted (M6.4); all others are looked at as they become
        ready."""
        for stale in self.ledger.take_stale(self.step, self.config.scheduler.staleness):
            self._end(stale.group, stale.credit, GroupOutcome.DROPPED_STALE, stale.reply, ready_s=stale.ready_s)

    async def _batch(self) -> list[ReadyGroup]:
        """The step's groups, those admitted first first.

        Raises:
            GagarError: one of them holds a token that is too old, which the bounds above make impossible.
        """
        limits = self.config.scheduler
        wait_staleness = limits.staleness if limits.stale == "wait" else None
        while True:
            self._supplied.clear()
            batch = self.ledger.take_batch(self.mixer.quotas, step=self.step, wait_staleness=wait_staleness)
            if batch is None:
                await self._supplied.wait()
                continue
            if any(is_stale(ready.group, self.step, limits.staleness) for ready in batch):
                raise GagarError("a token older than scheduler.max_staleness was about to be trained on; report this")
            return batch

    async def _checkpoint(self, step: int) -> None:
        """State, logs and the ledger's mark are of one moment; what the ledger holds of it is on the disk first."""
        log = self.ledger.log
        mark = log.mark() if log is not None else None
        with self._doing("checkpointing", CHECKPOINT, step):
            state = {"mixer": self.mixer.state(self.ledger.pending()), "ledger": mark}
            before = log.flush if log is not None else None
            path = await self.checkpoints.save(step, self.parts.learner, state, before=before)
        if log is not None and mark is not None:
            log.forget(mark)
        self._observer.on_checkpoint(path)

    @contextmanager
    def _doing(self, activity: Activity, span: str, step: int) -> Iterator[None]:
        self.activity = (activity, self.clock.now())
        with self.telemetry.span(span, step=step):
            yield
        self.moved_s = self.clock.now()
        self.activity = ("waiting", self.moved_s)
        self._room.set()

    # ---- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Every second: follows the sizes of the pools, shows progress. Raises GagarError when nothing has moved for
        `abort_after_s`."""
        while True:
            await asyncio.sleep(1.0)
            self._resize()
            still_s = self.clock.now() - self.moved_s
            self._observer.on_tick(self, still_s)
            if still_s > self.config.scheduler.abort_after_s:
                raise GagarError(
                    f"nothing moved for {still_s:.0f} s (scheduler.abort_after_s); the last checkpoint is intact: "
                    "look at the stall messages above, then run the same command with --resume"
                )

    def supply_figures(self) -> dict[str, float]:
        """Metrics of the mixer and of the admission, now."""
        rolling = self.ledger.rolling()
        return {**self.mixer.scalars(rolling), **self.admission.scalars(rolling)}

    def _resize(self) -> None:
        """Pools grow and shrink (`gagar scale`); what they can take now bounds what is started."""
        self.rollouts.slots.resize(self.parts.rollout.occupancy()[1])
        if self.grading is not None and self.parts.grader is not None:
            self.grading.slots.resize(self.parts.grader.occupancy()[1])
        self._room.set()


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
