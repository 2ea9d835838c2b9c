"""Which source comes next, where ready groups and starving sources meet; and steps whose stages take turns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted import Run, ScriptedLearner, ScriptedPool, even_slots_pass, run_config, trajectory

from envs.task import Task
from orchestrator.ledger import Stage
from orchestrator.simulation.clock import run_virtual
from rollout.trajectory import Trajectory

SOURCES = {
    "code": {"type": "minirepo", "groups_per_step": 4, "prior_acceptance": 0.6},
    "sums": {"type": "arith", "groups_per_step": 1, "prior_acceptance": 1.0},
}


def test_a_source_that_starves_is_probed_while_it_has_ready_groups(tmp_path: Path) -> None:
    """One group is ready, the next dozens come to nothing: the quota of two still has to be met."""

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        name, index = group_id.split("-")
        if name == "code" and 1 <= int(index) < 40:
            return trajectory(trajectory_id, task=task, passed=False)
        return even_slots_pass(task, trajectory_id, group_id)

    config = run_config(steps=2, scheduler={"starve_after_groups": 5})
    run = Run(tmp_path, config, rollout=rollout, rollout_delay_s=1.0)
    run_virtual(run.scheduler.run())
    assert run.steps == [1, 2]
    assert [(a.name, a.on) for a in run.alarms] == [("starved/code", True), ("starved/code", False)]


class Watched(ScriptedPool):
    """Tells what else is under way whenever one of its calls begins."""

    run: Run
    name: str
    seen: list[tuple[str, dict[str, int], str]]

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        ledger = self.run.ledger
        busy = {
            "rolling": ledger.count(Stage.ROLLING),
            "grading": self.run.grader.busy,
            "rollouts": self.run.rollout.busy,
        }
        self.seen.append((self.name, busy, self.run.scheduler.activity[0]))
        return await super().call(method, *args, **kwargs)


class SlowLearner(ScriptedLearner):
    async def train_step(self, items: Any) -> dict[str, float]:
        import asyncio

        await asyncio.sleep(60.0)
        return await super().train_step(items)


def in_turns(tmp_path: Path, **changes: Any) -> tuple[Run, list[tuple[str, dict[str, int], str]]]:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if task.source == "code" and int(group_id.split("-")[1]) % 3 == 0:
            return trajectory(trajectory_id, task=task, passed=True, versions=(run.scheduler.step,))
        made = even_slots_pass(task, trajectory_id, group_id)
        return trajectory(trajectory_id, task=task, passed=made.passed, versions=(run.scheduler.step,))

    scheduler = {"asynchronous": False, "overlap": False, **changes}
    config = run_config(steps=8, sources=SOURCES, scheduler=scheduler)
    run = Run(
        tmp_path,
        config,
        rollout=rollout,
        rollout_delay_s=20.0,
        grade_delay_s=50.0,
        pool=Watched,
        grader_pool=Watched,
        learner=SlowLearner(),
    )
    seen: list[tuple[str, dict[str, int], str]] = []
    for name, pool in (("rollout", run.rollout), ("grader", run.grader)):
        pool.run, pool.name, pool.seen = run, name, seen  # type: ignore[attr-defined]
    run_virtual(run.scheduler.run())
    return run, seen


@pytest.mark.parametrize("room", [64, 3])
def test_without_overlap_the_stages_take_turns(tmp_path: Path, room: int) -> None:
    """`room`: also where fewer groups may be under way than a step needs."""
    run, seen = in_turns(tmp_path, max_inflight_groups=room)
    assert run.steps == list(range(1, 9))
    gradings = [busy for name, busy, _ in seen if name == "grader"]
    assert gradings and all(busy["rolling"] == busy["rollouts"] == 0 for busy in gradings)
    rollouts = [(busy, activity) for name, busy, activity in seen if name == "rollout"]
    assert all(busy["grading"] == 0 and activity == "waiting" for busy, activity in rollouts)
    run.ledger.check()


def test_without_overlap_no_more_is_sampled_than_the_step_misses(tmp_path: Path) -> None:
    """A third of the groups of `code` is skipped: about 4 / (2/3) of them are sampled a step, and none grows old."""
    run, _ = in_turns(tmp_path, max_inflight_groups=64)
    outcomes = Counter(g["outcome"] for g in run.lines() if g["source"] == "code")
    assert outcomes["trained"] == 32 and outcomes["skipped_all_pass"] <= 24 and outcomes["dropped_stale"] <= 16
    ages = [
        g["step"] - 1 - v
        for g in run.lines()
        if g["outcome"] == "trained"
        for t in g["trajectories"]
        for v in t["policy_versions"]
    ]
    assert set(ages) == {0}


def test_overlap_is_faster_on_the_same_parts(tmp_path: Path) -> None:
    times = {}
    for overlap in (False, True):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        run, _ = in_turns(folder, overlap=overlap, max_inflight_groups=64)
        times[overlap] = run.scheduler.clock.now()
    assert times[True] < 0.9 * times[False]
