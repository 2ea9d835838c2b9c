"""Evaluations made by hand, and a rollout pool that needs no process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from envs.minirepo.family import MinirepoTasks
from envs.replay import patch_of
from envs.task import Task
from infra.pool import ActorLost
from orchestrator.evaluation import Evaluation, Sample, TaskSamples
from rollout.trajectory import Status, Trajectory, Transcript
from rollout.worker import lost_trajectory


def sample(
    id: str,
    passed: bool | None,
    *,
    turns: int = 4,
    tokens: int = 100,
    tier: str | None = None,
    known: str | None = None,
    hack: bool = False,
) -> Sample:
    """One trajectory; None for a masked one."""
    return Sample(
        id=id,
        status="infra_engine" if passed is None else "submitted",
        passed=passed,
        turns=turns,
        response_tokens=tokens,
        policy_versions=(7,),
        tier=tier,
        known=known,
        hack=hack,
    )


def evaluation(label: str, tasks: Sequence[Sequence[Sample]], *, grader: str | None = "judge") -> Evaluation:
    """Tasks t0, t1, ... with these samples."""
    return Evaluation(
        label=label,
        step=7,
        source="minirepo",
        samples=max(map(len, tasks)),
        tasks=tuple(TaskSamples(task_id=f"t{i}", samples=tuple(one), bug="order") for i, one in enumerate(tasks)),
        grader=grader,
    )


def simple(label: str, passes: Sequence[int], *, samples: int = 3, t1: int | None = None) -> Evaluation:
    """`passes` of `samples` trajectories of each task pass; of these the first `t1` in tier 1, the others in tier 2."""
    tasks = []
    for i, count in enumerate(passes):
        tasks.append(
            [
                sample(
                    f"{label}-{i}/{j}", j < count, tier=("T1" if t1 is None or j < t1 else "T2") if j < count else None
                )
                for j in range(samples)
            ]
        )
    return evaluation(label, tasks)


class ScriptedRollouts:
    """A rollout pool whose trajectories follow the scripted solutions: the first sample of a task is clean, the second
    fails, the third is lost."""

    def __init__(self, source: MinirepoTasks) -> None:
        self.source = source
        self.running = self.most = 0

    def occupancy(self) -> tuple[int, int]:
        return self.running, 8

    async def call(self, method: str, task: Task, name: str, group_id: str, **options: Any) -> Any:
        assert method == "rollout" and options["num_returns"] == 3
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        try:
            slot = int(name.rpartition("/")[2].partition(".")[0])
            if slot == 2 and task.task_id.endswith("/1"):
                raise ActorLost("rollout-0", method, "gone")
            lost = lost_trajectory(task, name, group_id, Status.INFRA_SANDBOX, "no sandbox", 1.0)
            if slot == 2:
                return lost, [None, None]
            clean = next(t for t in self.source.experts(task) if t.strategy == "clean")
            patch = patch_of(task, clean.actions) if slot == 0 else ""
            return done(lost, passed=slot == 0), [
                None,
                ready(Transcript(trajectory_id=name, turns=(), patch=patch, test_log="")),
            ]
        finally:
            self.running -= 1


def done(lost: Trajectory, *, passed: bool) -> Trajectory:
    return replace(
        lost, status=Status.SUBMITTED, passed=passed, reward=float(passed), turns=3, response_tokens=50,
        policy_versions=(4, 5), error=None,
    )  # fmt: skip


async def ready(transcript: Transcript) -> Transcript:
    """Stands for a reference of the object store."""
    return transcript
