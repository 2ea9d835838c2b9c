"""What a trajectory costs the driver: admission, calls, ledger, credit, audit, batches. Pools and learner cost none."""

from __future__ import annotations

import asyncio
import resource
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from envs.task import Task
from orchestrator.bench.figures import Figure, Options, figure
from orchestrator.bench.parts import InstantLearner, InstantPool, Steps, bench_config, half_pass, no_grade, scheduler_of
from rollout.trajectory import Trajectory

SIZES = ((64, 16), (256, 16))
"""(groups of a step, trajectories of a group)."""
SLOTS = 512


def run(options: Options) -> list[Figure]:
    """CPU time of this process a trajectory, at two sizes of a step: each step is a repetition, the first is not
    counted."""
    figures = []
    for groups, size in SIZES:
        observer, learner = Steps(), InstantLearner()
        config = bench_config(steps=1 + options.times(6), groups=groups, size=size)
        with tempfile.TemporaryDirectory(prefix="gagar-bench-") as folder:
            scheduler = scheduler_of(
                config,
                Path(folder),
                observer,
                rollout=InstantPool(SLOTS, _sampler(learner)),
                grader=InstantPool(SLOTS // size, no_grade),
                learner=learner,
            )
            asyncio.run(scheduler.run())
        used = [after - before for before, after in pairwise(observer.cpu_s)]
        name = f"CPU of a trajectory, {groups} groups of {size} a step"
        each = (1000 * s / n for s, n in zip(used, observer.trajectories[1:], strict=True))
        figures.append(figure(name, "ms", each))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [*figures, figure("peak memory of the process", "MiB", [peak_kib / 1024])]


def _sampler(learner: InstantLearner) -> Callable[[Task, str, str], Trajectory]:
    """Trajectories by the weights of the moment: older ones would be dropped as stale."""
    return lambda task, trajectory_id, group_id: half_pass(task, trajectory_id, group_id, learner.version)
