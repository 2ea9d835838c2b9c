"""One simulated run: the production scheduler, ledger, mixer and grading stage over simulated parts."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast

from configs.trace_schema import TraceConfig
from envs.task import TaskKind
from infra.errors import GagarError
from infra.sinks import JsonlFile
from learner.group import StepStats
from orchestrator.alarms import Alarm
from orchestrator.checkpoint import Checkpoints
from orchestrator.grading_stage import GradingStage
from orchestrator.ledger import CompleteGroup, Ledger, Stage
from orchestrator.loop import Parts, Scheduler, StepRecord
from orchestrator.mixer import Mixer
from orchestrator.simulation.clock import run_virtual
from orchestrator.simulation.figures import Sample, SimulatedStep, Simulation, step_figures
from orchestrator.simulation.load import Load, SimulatedSource
from orchestrator.simulation.parts import SimulatedEngines, SimulatedGraders, SimulatedLearner, SimulatedRollouts
from orchestrator.simulation.workclock import WorkClock

Schedule = Literal["overlap", "sequential"]
SAMPLE_EVERY_S = 15
"""Virtual seconds between the points of the plots."""
GATE_S = 5.0
"""Virtual seconds between two looks of the sequential schedule."""


def simulate(
    trace: TraceConfig,
    *,
    schedule: Schedule = "overlap",
    on_step: Callable[[SimulatedStep], None] = lambda _: None,
    sampled: bool = True,
) -> Simulation:
    """Run a trace under the virtual clock. `sampled`: with the samples for the plots, which take a kilobyte each.

    `schedule`: overlap is the scheduler as it is. sequential has the same pools, but grading is a phase of its own: it
    begins when the groups of a step are collected, and no rollout goes on until it has ended. That is not what
    `scheduler.overlap: false` does, which is simulated as any setting is: there the rollouts do not run ahead of the
    learner either, and one would not see what overlapping the grading alone is worth.

    Raises:
        GagarError: the scheduler gave up, or stands still.
    """
    with tempfile.TemporaryDirectory(prefix="gagar-simulate-") as folder:
        try:
            return run_virtual(_simulate(trace, schedule, on_step, sampled, Path(folder)))
        except BaseExceptionGroup as group:  # of the scheduler's loops
            error: BaseException = group.subgroup(GagarError) or group
            while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
                error = error.exceptions[0]
            raise error from None


async def _simulate(
    trace: TraceConfig, schedule: Schedule, on_step: Callable[[SimulatedStep], None], sampled: bool, folder: Path
) -> Simulation:
    config = trace.run_config()
    # The scheduler admits nothing for steps that will not come; the last step to be measured must not feel that.
    later = config.scheduler.staleness + 1
    limits = config.scheduler
    if schedule == "sequential":  # groups that are held before the gate wait for their step: they are not in flight
        room = limits.max_inflight_groups + 2 * later * trace.groups_per_step
        limits = limits.model_copy(update={"max_inflight_groups": room})
    config = config.model_copy(update={"steps": trace.steps + later, "scheduler": limits})
    load = Load(trace)
    engines = SimulatedEngines(WorkClock())
    rollout = SimulatedRollouts(trace, load, engines)
    grader = SimulatedGraders(trace, load, config.algorithm.rubric) if trace.grading else None
    learner = SimulatedLearner(trace)
    observer = _Observer(trace, rollout, grader, learner, on_step, sampled)
    ledger = Ledger()
    scheduler = Scheduler(
        config=config,
        parts=Parts(
            sources={name: SimulatedSource(name, TaskKind(source.kind)) for name, source in trace.sources.items()},
            engines=cast(Any, engines),
            rollout=cast(Any, rollout),
            grader=cast(Any, grader),
            learner=cast(Any, learner),
        ),
        ledger=ledger,
        mixer=Mixer.of(config.sources, config.scheduler, group_size=config.algorithm.group_size),
        audit=JsonlFile(Path("/dev/null"), sync=False),  # lines are made as in a run, and then there would be gigabytes
        checkpoints=Checkpoints(folder, keep=1),
        telemetry=cast(Any, _Silent()),
        observer=observer,
    )
    if schedule == "sequential" and scheduler.grading is not None:
        gate = AfterCollection(scheduler.grading, ledger, trace.quotas(), engines.clock)
        scheduler.grading = cast(GradingStage, gate)
    running = asyncio.create_task(scheduler.run())
    done = asyncio.create_task(observer.done.wait())
    await asyncio.wait((running, done), return_when=asyncio.FIRST_COMPLETED)
    done.cancel()
    if not observer.done.is_set():
        await running
    running.cancel()
    with suppress(asyncio.CancelledError):  # anything else went wrong at the end
        await running
    return Simulation(
        trace=trace,
        schedule=schedule,
        steps=tuple(observer.steps),
        samples=tuple(observer.samples),
        drawn={name: (int(count), total) for name, (count, total) in rollout.time_s.items()},
    )


class AfterCollection:
    """The graders' stage with a gate before it: see `simulate`, sequential."""

    full = False
    """The gate takes any number."""

    def __init__(self, stage: GradingStage, ledger: Ledger, quotas: dict[str, int], clock: WorkClock) -> None:
        self._stage = stage
        self._ledger = ledger
        self._quotas = quotas
        self._clock = clock
        self._held: list[CompleteGroup] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    async def put(self, group: CompleteGroup) -> None:
        """Held until its step is collected."""
        self._held.append(group)

    async def run(self) -> None:
        """Opens the gate once for every step."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._stage.run())
            while True:
                await _until(self._collected)
                self._clock.hold()
                held, self._held = self._held, []
                for complete in held:
                    await self._stage.put(complete)
                await _until(lambda: not any(self._ledger.is_grading(g.group_id) for g in held))  # noqa: B023
                self._clock.release()
                await asyncio.sleep(GATE_S)  # the batch leaves

    def _collected(self) -> bool:
        if not self._held:
            return False
        return all(
            self._ledger.count(Stage.READY, name) + sum(g.task.source == name for g in self._held) >= quota
            for name, quota in self._quotas.items()
        )


async def _until(condition: Callable[[], bool]) -> None:
    """What the whole ledger says has no event to wait for."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(GATE_S)


class _Silent:
    """Telemetry that keeps nothing: spans of 25,000 trajectories a step are a run's, not a simulation's."""

    @contextmanager
    def span(self, name: str, **attrs: Any) -> Iterator[None]:
        yield

    def record_span(self, name: str, start_s: float, end_s: float, **attrs: Any) -> None:
        pass


class _Observer:
    """Takes the figures of each step, and samples for the plots."""

    def __init__(
        self,
        trace: TraceConfig,
        rollout: SimulatedRollouts,
        grader: SimulatedGraders | None,
        learner: SimulatedLearner,
        on_step: Callable[[SimulatedStep], None],
        sampled: bool,
    ) -> None:
        self._trace = trace
        self._rollout = rollout
        self._grader = grader
        self._learner = learner
        self._on_step = on_step
        self._sampled = sampled
        self._loop = asyncio.get_running_loop()
        self._ticks = 0
        self.steps: list[SimulatedStep] = []
        self.samples: list[Sample] = []
        self.done = asyncio.Event()

    def on_step(self, scheduler: Scheduler, record: StepRecord, stats: StepStats) -> None:
        """See Observer."""
        if self.done.is_set():
            return
        step = step_figures(
            number=scheduler.step,
            end_s=self._loop.time(),
            records=record.records,
            retries=sum(record.retries.values()),
            ready=scheduler.ledger.count(Stage.READY),
            rollout_slot_s=self._rollout.area.slot_s(),
            grader_slot_s=self._grader.area.slot_s() if self._grader else {},
            learner_s=self._learner.busy_s,
            dispatched={name: s.dispatched_total for name, s in scheduler.mixer.sources.items()},
        )
        self.steps.append(step)
        self._on_step(step)
        if scheduler.step >= self._trace.steps:
            self.done.set()

    def on_tick(self, scheduler: Scheduler, still_s: float) -> None:
        """See Observer."""
        self._ticks += 1
        if not self._sampled or self._ticks % SAMPLE_EVERY_S or self.done.is_set():
            return
        sources = scheduler.mixer.sources
        self.samples.append(
            Sample(
                time_s=self._loop.time(),
                rolling={name: self._rollout.area.busy[name] for name in sources},
                grading={name: self._grader.area.busy[name] for name in sources} if self._grader else {},
                collected={name: s.accepted / s.quota for name, s in sources.items()},
                learning=scheduler.activity[0] in ("learning", "publishing"),
            )
        )

    def on_checkpoint(self, path: Path) -> None:
        """See Observer."""

    def on_alarm(self, alarm: Alarm) -> None:
        """See Observer."""
