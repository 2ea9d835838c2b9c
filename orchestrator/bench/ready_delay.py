"""How long a complete group waits before a grader is called, while the driver is busy with other groups."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from envs.task import Task
from grader.exchange import GradeReply, GradeRequest
from orchestrator.bench.figures import Figure, Options, figure, percentile
from orchestrator.bench.parts import InstantLearner, InstantPool, Steps, bench_config, half_pass, no_grade, scheduler_of
from rollout.trajectory import Trajectory

GROUPS, SIZE = 64, 16


def run(options: Options) -> list[Figure]:
    """Median and 95th percentile over the groups of a run; graders have a slot for every group."""
    medians, tails = [], []
    for _ in range(options.times(5)):
        delays = _delays()
        medians.append(1000 * percentile(delays, 0.5))
        tails.append(1000 * percentile(delays, 0.95))
    return [figure("group complete to grader called, p50", "ms", medians), figure("..., p95", "ms", tails)]


def _delays() -> list[float]:
    """Seconds, of every graded group of one run."""
    done: Counter[str] = Counter()
    completed: dict[str, float] = {}
    delays: list[float] = []
    learner = InstantLearner()

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        done[group_id] += 1
        if done[group_id] == SIZE:
            completed[group_id] = time.perf_counter()
        return half_pass(task, trajectory_id, group_id, learner.version)

    class Graders(InstantPool):
        async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
            request: GradeRequest = args[0]
            delays.append(time.perf_counter() - completed[request.group_id])
            reply: GradeReply = await super().call(method, *args)
            return reply

    config = bench_config(steps=3, groups=GROUPS, size=SIZE)
    with tempfile.TemporaryDirectory(prefix="gagar-bench-") as folder:
        scheduler = scheduler_of(
            config,
            Path(folder),
            Steps(),
            rollout=InstantPool(256, rollout),
            grader=Graders(2 * GROUPS, no_grade),
            learner=learner,
        )
        asyncio.run(scheduler.run())
    return delays
