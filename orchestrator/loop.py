"""The scheduler: one asyncio process, a few small loops, and no queue without a bound.

    source quota -> [mixer] -> task x n -> [rollout pool] -> trajectory (metadata + payload ref)
        -> [verifier] -> group complete -> masked / skipped / eligible
        -> eligible code group -> [grader pool] -> verdict -> factors      } other groups: outcome advantages
        -> [advantage] -> ready group -> batch of the step -> [learner group] -> new weights -> [engine pool]

    loop                 consumes                  produces                  unblocked by
    _admit               choices of dispatch.py    groups that roll out      a rollout, group or step that ended
    rollout_stage.run    groups that roll out      ended trajectories        a slot that came free
    grading_stage.run    complete code groups      grades                    a slot that came free
    _train               ready groups by quota     weights in the engines    a group that became ready
    _watch               the clock                 progress, the abort       a second that passed
    saving.run           failed writes             a pause, and its end      a write that failed or worked

No stage waits for another one's batch: groups are graded the moment they complete, while others roll out and the
learner steps. What is under way is bounded where it is admitted (dispatch.py). The driver holds metadata and
references, never token payloads. docs/scheduling.md has the rules in words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from configs.schema import AdvantageMode, RunConfig
from envs.task import Split, TaskKind
from grader.exchange import GradeReply
from infra.errors import EngineError, GagarError
from infra.sinks import JsonlFile
from infra.spans import CHECKPOINT, LEARN, PUBLISH
from infra.storage import Storage
from infra.telemetry import Telemetry
from infra.waits import Waits
from infra.watchdog import Stalled
from learner.group import PayloadsLost, StepStats
from orchestrator.admission import Admission
from orchestrator.alarms import SupplyWatch
from orchestrator.archive import GroupArchive
from orchestrator.batch import batch_items, losses
from orchestrator.checkpoint import Checkpoints
from orchestrator.clock import Clock
from orchestrator.credit import Credit, GroupOutcome, classify, credit, skipped
from orchestrator.dispatch import Dispatcher, Moment
from orchestrator.exit import Exit
from orchestrator.failures import Failures
from orchestrator.grading_stage import GradingStage
from orchestrator.ledger import CompleteGroup, Ledger, Member, ReadyGroup, RollingGroup, Stage, is_stale
from orchestrator.ledger_store import KeptGroup, covers
from orchestrator.masking import MASKED
from orchestrator.mixer import Mixer
from orchestrator.parts import Observer, Parts, StepRecord
from orchestrator.pause import Pauses
from orchestrator.progress import Activity
from orchestrator.quarantine import Quarantine
from orchestrator.rollout_stage import RolloutStage
from orchestrator.saving import Saving
from orchestrator.standstill import WAITS_FOR, bounds, missing
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
        quarantine: Quarantine | None = None,
        waits: Waits | None = None,
        storage: Storage | None = None,
    ) -> None:
        """`kept`: groups that an earlier session left behind, brought back before anything new is admitted.
        `quarantine`: with what an earlier session put there. `storage`: where the run's files report that they cannot
        be written."""
        self.config = config
        self.parts = parts
        self.ledger = ledger
        self.mixer = mixer
        self.telemetry = telemetry
        self.admission = admission or Admission.of(config)
        self.clock = clock or Clock()
        self.waits = waits or Waits()
        """Which loop waits for what, for whoever looks while nothing moves."""
        self.pauses = Pauses(self.clock)
        """Why nothing is admitted and no step is begun."""
        self.step = start_step
        """Optimiser steps done; also the version of the weights in the engines."""
        self.moved_s = 0.0
        """When anything last moved: a trajectory that was not lost, a grade, a step."""
        self.activity: tuple[Activity, float] = ("waiting", 0.0)
        """What `_train` does, and since when."""
        self.supply = SupplyWatch(mixer)
        self._observer = observer
        self.saving = Saving(
            storage=storage or Storage(),
            checkpoints=checkpoints,
            pauses=self.pauses,
            ledger=ledger,
            mixer=mixer,
            abort_after_s=config.scheduler.abort_after_s,
            on_alarm=observer.on_alarm,
        )
        self._exit = Exit(config=config, ledger=ledger, mixer=mixer, audit=audit, archive=archive)
        self._kept = kept
        self._grades = {group.group_id: group.reply for group in kept if group.reply is not None and group.whole}
        """Grades of an earlier session, for groups whose rollouts come back."""
        self.failures = Failures(
            config.scheduler,
            sources=mixer.sources,
            quarantine=quarantine,
            pauses=self.pauses,
            clock=self.clock,
            step=lambda: self.step,
            on_alarm=observer.on_alarm,
        )
        self.rollouts = RolloutStage(
            config=config.rollout,
            pool=parts.rollout,
            telemetry=telemetry,
            clock=self.clock,
            failures=self.failures,
            spawn=self._spawn,
            on_end=self._take,
            on_retry=self._on_retry,
            waits=self.waits,
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
                waits=self.waits,
                on_alarm=observer.on_alarm,
            )
        graded = [n for n, source in parts.sources.items() if self.grading and source.kind is TaskKind.CODE]
        self._dispatcher = Dispatcher(
            config=config, ledger=ledger, mixer=mixer, admission=self.admission, graded=graded
        )
        self._held: list[CompleteGroup] = []
        """Without overlap: groups to be graded once all rollouts of their step have ended."""
        self._no_engine = False
        """The last policy engine was given up."""
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
            loops = [self.saving.run(), self._admit(), self.rollouts.run(), self._watch()]
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
        """Consumes the dispatcher's choices; produces groups for the rollouts. Waits for room under every bound;
        unblocked by a rollout or group that ends, by a step, or by a pool that grows."""
        await self._bring_back()
        while True:
            with self.waits.on("admission", "the end of a pause", self.pauses.text):
                await self.pauses.wait(but=MASKED)
            self._room.clear()
            source = self._dispatcher.next_source(
                Moment(
                    step=self.step,
                    training=self.activity[0] in ("learning", "publishing"),
                    slots=self.rollouts.slots.size,
                    graded=self.ledger.count(Stage.GRADING) - len(self._held),
                    graders_full=self.grading is not None and self.grading.full,
                    probed=self.failures.probed,
                )
            )
            if source is None:
                await self._grade_held()
                with self.waits.on("admission", "room under the bounds", lambda: bounds(self)):
                    await self._room.wait()
                continue
            index = self.mixer.take_index(source)
            rolling = self._rolling(f"{source}-{index:06d}", source, index, self.config.algorithm.group_size, self.step)
            if self.failures.quarantined(rolling.task.task_id):
                continue
            self.ledger.admit(rolling)
            self.rollouts.put(rolling, range(rolling.size))
            del rolling
            await asyncio.sleep(0)  # making tasks takes time: others run in between

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
        """Groups of an earlier session, and whole: whatever of them had ended is kept, so what a resume trains on is
        what was admitted, not what happened to be short."""
        kept, self._kept = [k for k in self._kept if k.source in self.mixer.sources], ()
        back = []
        for k in kept:
            rolling = self._rolling(k.group_id, k.source, k.index, k.size, min(k.version, self.step))
            self.ledger.admit(rolling, again=True)
            back.append(self.rollouts.bring_back(rolling, k.rollouts, whole=k.whole))
        await asyncio.gather(*back)

    def _on_retry(self, trajectory: Trajectory) -> None:
        """It was lost, and is sampled again. That is no progress: `abort_after_s` ends a run of nothing else."""
        self._record.retries[trajectory.status.value] += 1
        self._room.set()

    # ---- complete -> graded -> ready --------------------------------------------------------------------------------

    async def _take(self, rolling: RollingGroup, slot: int, member: Member) -> None:
        """A trajectory ended. A complete group is skipped, sent to the graders, or made ready at once."""
        trajectory = member.trajectory
        self._record.unwritten += trajectory.unwritten
        if not trajectory.status.masked:
            self.moved_s = self.clock.now()
            self.admission.observe(trajectory.source, trajectory.total_tokens)
        group = self.ledger.record(rolling.group_id, slot, member, self.clock.now())
        self._room.set()
        if group is None:
            return
        trajectories = [m.trajectory for m in group.members]
        quarantined = self.failures.complete(group.task.task_id)
        skip = (
            GroupOutcome.SKIPPED_QUARANTINED if quarantined else classify(trajectories, self.config.algorithm.min_valid)
        )
        if skip is not None:
            self._end(group, skipped(skip), skip)
        elif is_stale(group, self.step, self.config.scheduler.staleness):
            self._end(group, skipped(GroupOutcome.DROPPED_STALE), GroupOutcome.DROPPED_STALE)
        elif self.grading is None or group.task.kind is not TaskKind.CODE:
            self._ready(group, credit(trajectories, self.config.algorithm, grade=None, fallback_reason=None), None)
        elif (reply := self._grades.pop(group.group_id, None)) is not None and covers(reply, trajectories):
            self._on_grade(group, reply)
        elif self.config.scheduler.overlap:
            await self.grading.put(group)
        else:
            self._held.append(group)

    async def _grade_held(self) -> None:
        """Without overlap: nothing more is to be admitted, so once nothing rolls out the graders get all at once."""
        if self.grading is not None and self.ledger.count(Stage.ROLLING) == 0:
            while self._held:
                await self.grading.put(self._held.pop(0))

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

    def _end(self, group: CompleteGroup, given: Credit, outcome: GroupOutcome, reply: GradeReply | None = None) -> None:
        """A complete group leaves without having been ready."""
        self._moved_on(self._exit.end(group, given, outcome, reply))

    def _end_ready(
        self, ready: ReadyGroup, outcome: GroupOutcome, *, step: int | None = None, error: str | None = None
    ) -> None:
        """A ready group leaves: `step` trained on it, or it grew too old, or it failed with an `error`."""
        r = ready
        self._moved_on(self._exit.end(r.group, r.credit, outcome, r.reply, ready_s=r.ready_s, step=step, error=error))

    def _moved_on(self, record: dict[str, Any] | None = None) -> None:
        """A group became ready, or ended and has left this record."""
        if record is not None:
            self._record.records.append(record)
        for alarm in self.supply.changes():
            self._observer.on_alarm(alarm)
        self._room.set()
        self._supplied.set()

    # ---- ready -> trained -> published ------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Consumes ready groups by quota; produces new weights in the engines. Waits for a full batch; unblocked by a
        group that becomes ready or ends."""
        while self.step < self.config.steps:
            step = self.step + 1
            batch, stats = await self._learn(step)
            self.rollouts.paused.begin()
            with self._doing("publishing", PUBLISH, step):
                await self.parts.learner.publish(self.parts.engines, step)
            self.rollouts.paused.end()
            self.step = step
            for ready in batch:
                self._end_ready(ready, GroupOutcome.TRAINED, step=step)
            for ready in self.ledger.take_stale(step, self.config.scheduler.staleness):  # later ones as they come in
                self._end_ready(ready, GroupOutcome.DROPPED_STALE)
            del batch, ready  # else the next step's wait keeps their payloads in the object store
            self.ledger.check()
            record, self._record = self._record, StepRecord(started_s=self.moved_s)
            self._observer.on_step(self, record, stats)
            if step % self.config.checkpoint.every_steps == 0 or step == self.config.steps:
                with self._doing("checkpointing", CHECKPOINT, step):
                    path = await self.saving.checkpoint(step, self.parts.learner)
                self._observer.on_checkpoint(path)

    async def _learn(self, step: int) -> tuple[list[ReadyGroup], StepStats]:
        """One optimiser step, and the groups that it trained on. Those whose payloads were lost with a node end, and
        others take their place."""
        while True:
            batch = await self._batch()
            self.mixer.consumed()
            try:
                with self._doing("learning", LEARN, step):
                    return batch, await self.parts.learner.train_step(batch_items(batch, self.parts.rollouts))
            except PayloadsLost as e:
                self.mixer.returned()
                for ready, error in losses(batch, e.reasons):
                    if error is None:
                        self.ledger.put_back(ready)
                    else:
                        self._end_ready(ready, GroupOutcome.FAILED, error=error)
                del batch, ready  # else what is left of their payloads stays while the step waits for others

    async def _batch(self) -> list[ReadyGroup]:
        """The step's groups, those admitted first first.

        Raises:
            GagarError: one of them holds a token that is too old, which the bounds above make impossible.
        """
        limits = self.config.scheduler
        wait_staleness = limits.staleness if limits.stale == "wait" else None
        while True:
            with self.waits.on("training", "the end of a pause", self.pauses.text):
                await self.pauses.wait()
            self._supplied.clear()
            batch = None
            if limits.overlap or self.ledger.count(Stage.ROLLING) + self.ledger.count(Stage.GRADING) == 0:
                batch = self.ledger.take_batch(self.mixer.quotas, step=self.step, wait_staleness=wait_staleness)
            if batch is None:
                with self.waits.on("training", "the groups of the batch", lambda: missing(self)):
                    await self._supplied.wait()
                continue
            if any(is_stale(ready.group, self.step, limits.staleness) for ready in batch):
                raise GagarError("a token older than scheduler.max_staleness was about to be trained on; report this")
            return batch

    @contextmanager
    def _doing(self, activity: Activity, span: str, step: int) -> Iterator[None]:
        self.activity = (activity, self.clock.now())
        try:
            with self.telemetry.span(span, step=step), self.waits.on("training", WAITS_FOR[activity]):
                yield
        finally:
            self.moved_s = self.clock.now()
            self.activity = ("waiting", self.moved_s)
            self._room.set()

    # ---- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Every second shows progress. Raises Stalled when nothing has moved for `abort_after_s`, and EngineError when
        no engine is left: every rollout would be lost at once, for ever."""
        while True:
            await asyncio.sleep(1.0)
            if self._no_engine:
                raise EngineError(
                    "no policy engine is left, and the lines above say why; mend that, then run the same command with "
                    "--resume"
                )
            still_s = self.clock.now() - self.failures.still_since_s(self.moved_s)
            self._observer.on_tick(self, still_s)
            if still_s > self.config.scheduler.abort_after_s:
                self.saving.blame()
                raise Stalled(
                    f"nothing moved for {still_s:.0f} s (scheduler.abort_after_s); look at the stall messages above; "
                    "the last checkpoint is intact, the same command with --resume goes on from it"
                )

    def supply_figures(self) -> dict[str, float]:
        """Metrics of the mixer and of the admission, now."""
        rolling = self.ledger.rolling()
        return {**self.mixer.scalars(rolling), **self.admission.scalars(rolling), **self.failures.scalars()}

    def resize(self) -> None:
        """A pool has changed: what all of them can take now bounds what is started. build.py has the pools call it."""
        engines = self.parts.engines.state()
        self._no_engine = engines.live + engines.starting == 0
        self.admission.resize(engines.live)
        self.rollouts.slots.resize(self.parts.rollout.occupancy()[1])
        if self.grading is not None and self.parts.grader is not None:
            self.grading.slots.resize(self.parts.grader.occupancy()[1])
        self._room.set()
