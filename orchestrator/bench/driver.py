"""What a trajectory costs the driver: admission, calls, ledger, credit, audit, batches. Pools and learner cost none."""

from __future__ import annotations

import asyncio
import io
import resource
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from configs.schema import WandbConfig
from envs.task import Task
from infra.telemetry import Telemetry
from learner.group import StepStats
from orchestrator.bench.figures import Figure, Options, figure
from orchestrator.bench.parts import InstantLearner, InstantPool, Steps, bench_config, half_pass, no_grade, scheduler_of
from orchestrator.ledger_store import LedgerStore
from orchestrator.loop import Scheduler, StepRecord
from orchestrator.observer import RunObserver
from orchestrator.progress import Progress
from rollout.trajectory import Trajectory

SIZES = ((64, 16), (256, 16))
"""(groups of a step, trajectories of a group)."""
SLOTS = 512


def run(options: Options) -> list[Figure]:
    """CPU time of this process a trajectory, at two sizes of a step, and with all that a run writes down: each step is
    a repetition, the first is not counted."""
    steps = options.times(6)
    figures = [cost(groups, size, steps) for groups, size in SIZES]
    figures.append(cost(*SIZES[-1], steps, recorded=True))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [*figures, figure("peak memory of the process", "MiB", [peak_kib / 1024])]


def cost(groups: int, size: int, steps: int, *, recorded: bool = False) -> Figure:
    """CPU time a trajectory of so many measured steps. `recorded`: with spans, metrics, the status file, and the
    ledger written ahead to its file, which every step's checkpoint cuts; all their threads count."""
    with tempfile.TemporaryDirectory(prefix="gagar-bench-") as folder:
        observer = _train(Path(folder), groups, size, 1 + steps, recorded=recorded)
    used = [after - before for before, after in pairwise(observer.cpu_s)]
    each = (1000 * s / n for s, n in zip(used, observer.trajectories[1:], strict=True))
    also = ", with metrics, spans and the ledger's file" if recorded else ""
    return figure(f"CPU of a trajectory, {groups} groups of {size} a step{also}", "ms", each)


def _train(folder: Path, groups: int, size: int, steps: int, *, recorded: bool) -> Steps:
    learner = InstantLearner()
    config = bench_config(steps=steps, groups=groups, size=size)
    observer, telemetry, log = Steps(), None, None
    if recorded:
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every_steps": 1})})
        telemetry = Telemetry(folder, wandb=WandbConfig(mode="disabled"), config={})
        progress = Progress(steps, config.telemetry.progress_every_s, console=Console(file=io.StringIO()))
        observer = _Recorded(RunObserver(config, folder, telemetry, progress))
        log = LedgerStore(folder / "ledger.sqlite", folder / "rollouts")
    scheduler = scheduler_of(
        config,
        folder,
        observer,
        rollout=InstantPool(SLOTS, _sampler(learner)),
        grader=InstantPool(SLOTS // size, no_grade),
        learner=learner,
        telemetry=telemetry,
        log=log,
    )
    asyncio.run(scheduler.run())
    if telemetry is not None and log is not None:
        log.close()
        telemetry.close()
    return observer


class _Recorded(Steps):
    """A run's own observer, and the times of its steps."""

    def __init__(self, observer: RunObserver) -> None:
        super().__init__()
        self._observer = observer

    def on_step(self, scheduler: Scheduler, record: StepRecord, stats: StepStats) -> None:
        """See Observer."""
        self._observer.on_step(scheduler, record, stats)
        super().on_step(scheduler, record, stats)

    def on_tick(self, scheduler: Scheduler, still_s: float) -> None:
        """See Observer."""
        self._observer.on_tick(scheduler, still_s)


def _sampler(learner: InstantLearner) -> Callable[[Task, str, str], Trajectory]:
    """Trajectories by the weights of the moment: older ones would be dropped as stale."""
    return lambda task, trajectory_id, group_id: half_pass(task, trajectory_id, group_id, learner.version)
