"""The scheduler's bounds under virtual time: staleness, on-policy runs, starvation, order, payloads that go free."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from scripted import Run, ScriptedLearner, ScriptedPool, even_slots_pass, run_config, trajectory

from configs.schema import RunConfig
from envs.task import Task
from orchestrator.simulation.clock import run_virtual
from rollout.trajectory import Status, Trajectory

SOURCES = {
    "code": {"type": "minirepo", "groups_per_step": 2, "prior_acceptance": 1.0},
    "sums": {"type": "arith", "groups_per_step": 1, "prior_acceptance": 1.0},
}


class LongTail(ScriptedPool):
    """Rollouts of 10 to 500 s, decided by their ids; tokens carry the versions that served meanwhile."""

    run: Run

    async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
        task, trajectory_id, group_id = args
        first = self.run.scheduler.step
        self.calls.append((method, *args))
        self.busy += 1
        try:
            await asyncio.sleep(10.0 * Random(trajectory_id).paretovariate(1.0) % 500.0)
            self.made = self.handler(task, trajectory_id, group_id)
        finally:
            self.busy -= 1
        passed = self.made.passed
        versions = tuple(range(first, self.run.scheduler.step + 1))
        return trajectory(trajectory_id, task=task, passed=passed, versions=versions), [trajectory_id, None]


class SlowLearner(ScriptedLearner):
    async def train_step(self, items: Any) -> dict[str, float]:
        await asyncio.sleep(60.0)
        return await super().train_step(items)


def go(tmp_path: Path, config: RunConfig, **parts: Any) -> tuple[Run, list[dict[str, Any]]]:
    run = Run(tmp_path, config, pool=LongTail, learner=SlowLearner(), **parts)
    run.rollout.run = run  # type: ignore[attr-defined]
    run_virtual(run.scheduler.run())
    run.audit.close()
    return run, run.lines()


def staleness(groups: list[dict[str, Any]]) -> list[int]:
    trained = [g for g in groups if g["outcome"] == "trained"]
    return [g["step"] - 1 - v for g in trained for t in g["trajectories"] for v in t["policy_versions"]]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_dropping_bounds_the_age_of_every_token(tmp_path: Path, max_staleness: int) -> None:
    """M6.4: with rollouts of very different lengths and a slow learner."""
    config = run_config(steps=40, sources=SOURCES, scheduler={"max_staleness": max_staleness})
    _, groups = go(tmp_path, config)
    assert max(staleness(groups)) <= max_staleness


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_waiting_bounds_it_too_and_drops_nothing(tmp_path: Path, max_staleness: int) -> None:
    """M6.4: a step waits for the groups that would grow too old."""
    config = run_config(steps=40, sources=SOURCES, scheduler={"max_staleness": max_staleness, "stale": "wait"})
    _, groups = go(tmp_path, config)
    assert max(staleness(groups)) <= max_staleness
    assert {g["outcome"] for g in groups} == {"trained"}


def test_waiting_survives_groups_that_are_skipped(tmp_path: Path) -> None:
    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if int(group_id.split("-")[1]) % 3 == 0:
            return trajectory(trajectory_id, task=task, passed=True)
        return even_slots_pass(task, trajectory_id, group_id)

    config = run_config(steps=30, sources=SOURCES, scheduler={"max_staleness": 2, "stale": "wait"})
    _, groups = go(tmp_path, config, rollout=rollout)
    assert max(staleness(groups)) <= 2
    assert Counter(g["outcome"] for g in groups)["trained"] == 90
    assert {g["outcome"] for g in groups} == {"trained", "skipped_all_pass"}


@pytest.mark.parametrize("stale", ["drop", "wait"])
def test_without_asynchronous_training_only_current_tokens_are_trained_on(tmp_path: Path, stale: str) -> None:
    started: list[tuple[int, bool]] = []

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        return even_slots_pass(task, trajectory_id, group_id)

    class Pool(LongTail):
        async def call(self, *args: Any, **kwargs: Any) -> Any:
            started.append((self.run.scheduler.step, self.run.scheduler.activity[0] == "waiting"))
            return await super().call(*args, **kwargs)

    config = run_config(steps=20, sources=SOURCES, scheduler={"asynchronous": False, "stale": stale})
    run = Run(tmp_path, config, pool=Pool, learner=SlowLearner(), rollout=rollout)
    run.rollout.run = run  # type: ignore[attr-defined]
    run_virtual(run.scheduler.run())
    assert set(staleness(run.lines())) == {0}
    assert all(idle for _, idle in started), "no rollout starts before the weights of its step are published"


def test_asynchronous_training_is_faster(tmp_path: Path) -> None:
    times = {}
    for asynchronous in (True, False):
        folder = tmp_path / str(asynchronous)
        folder.mkdir()
        config = run_config(steps=20, sources=SOURCES, scheduler={"asynchronous": asynchronous})
        run, _ = go(folder, config)
        times[asynchronous] = run.scheduler.clock.now()
    assert times[True] < 0.8 * times[False]


def test_groups_are_trained_in_the_order_of_their_admission_where_they_are_ready(tmp_path: Path) -> None:
    """First-finished bias: what overtakes does so for a bounded number of steps."""
    config = run_config(steps=60, sources=SOURCES, scheduler={"max_staleness": 2, "stale": "wait"})
    _, groups = go(tmp_path, config)
    for source, quota in (("code", 2), ("sums", 1)):
        order = [int(g["group_id"].split("-")[1]) for g in groups if g["source"] == source]
        late = [position - index for position, index in enumerate(order)]
        assert max(map(abs, late)) <= 3 * quota, "no further from its place than the bound on staleness"
    tokens = [t["response_tokens"] for g in groups for t in g["trajectories"]]
    assert len(tokens) == 60 * 3 * 4


def test_a_starving_source_raises_an_alarm_is_probed_and_comes_back(tmp_path: Path) -> None:
    hard_until = 30

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        name, index = group_id.split("-")
        if name == "sums" and int(index) < hard_until:
            return trajectory(trajectory_id, task=task, passed=False)
        return even_slots_pass(task, trajectory_id, group_id)

    config = run_config(steps=3, sources=SOURCES, scheduler={"starve_after_groups": 10})
    run, groups = go(tmp_path, config, rollout=rollout)
    assert [(a.name, a.on) for a in run.alarms] == [("starved/sums", True), ("starved/sums", False)]
    assert run.steps == [1, 2, 3], "it waits, and goes on when something can be trained on"
    assert sum(g["outcome"] == "skipped_all_fail" for g in groups) == hard_until


def test_a_starving_source_is_not_spun_on(tmp_path: Path) -> None:
    at_once: list[int] = []

    class Pool(LongTail):
        async def call(self, *args: Any, **kwargs: Any) -> Any:
            if self.run.mixer.starved("sums"):
                at_once.append(self.run.ledger.rolling()["sums"])
            return await super().call(*args, **kwargs)

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        if group_id.startswith("sums") and int(group_id.split("-")[1]) < 40:
            return trajectory(trajectory_id, task=task, passed=False)
        return even_slots_pass(task, trajectory_id, group_id)

    config = run_config(steps=1, sources=SOURCES, scheduler={"starve_after_groups": 5, "max_staleness": 4})
    run = Run(tmp_path, config, pool=Pool, learner=SlowLearner(), rollout=rollout)
    run.rollout.run = run  # type: ignore[attr-defined]
    run_virtual(run.scheduler.run())
    settled = at_once[len(at_once) // 2 :]
    assert settled and max(settled) <= 4, "one group of four"


def test_a_grader_that_falls_behind_slows_its_sources_and_no_others(tmp_path: Path) -> None:
    """Backpressure: what waits for a grader bounds what is admitted."""
    waiting: list[int] = []

    class Observed(Run):
        def on_tick(self, scheduler: Any, still_s: float) -> None:
            waiting.append(len(scheduler.grading.waiting))

    config = run_config(steps=4, sources=SOURCES, scheduler={"max_staleness": 8, "max_inflight_groups": 64})
    run = Observed(tmp_path, config, pool=LongTail, grade_delay_s=900.0, grade_slots=1, learner=SlowLearner())
    run.rollout.run = run  # type: ignore[attr-defined]
    run.rollout.slots = 16
    run_virtual(run.scheduler.run())
    assert 2 <= max(waiting) <= 2 + (16 + 4) // 4, "twice its slots, and what rolled out when it became full"


def test_nothing_is_left_of_groups_that_ended_in_whatever_way(tmp_path: Path) -> None:
    """Payloads over 1,000 steps with skipped, masked, stale and trained groups."""

    class Payload:
        pass

    alive: weakref.WeakSet[Payload] = weakref.WeakSet()
    seen: list[int] = []

    class Pool(LongTail):
        async def call(self, *args: Any, **kwargs: Any) -> Any:
            value, _ = await super().call(*args, **kwargs)
            if self.made.status.masked:
                return self.made, [None, None]
            payload = Payload()
            alive.add(payload)
            return value, [payload, Payload()]

    class Learner(SlowLearner):
        async def train_step(self, items: Any) -> dict[str, float]:
            await asyncio.sleep(60.0)
            return {"loss": 0.0}

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        kind = Random(group_id).random()
        if kind < 0.2:
            return trajectory(trajectory_id, task=task, passed=kind < 0.1)
        if Random(trajectory_id).random() < 0.05:
            return trajectory(trajectory_id, task=task, status=Status.INFRA_ENGINE)
        return even_slots_pass(task, trajectory_id, group_id)

    class Observed(Run):
        def on_step(self, scheduler: Any, record: Any, stats: Any) -> None:
            super().on_step(scheduler, record, stats)
            if scheduler.step % 50 == 0:
                gc.collect()
            seen.append(len(alive) - 4 * (self.ledger.living))

    config = run_config(steps=1000, sources=SOURCES, scheduler={"max_staleness": 1}, checkpoint={"every_steps": 500})
    run = Observed(tmp_path, config, pool=Pool, learner=Learner(), rollout=rollout)
    run.rollout.run = run  # type: ignore[attr-defined]
    run_virtual(run.scheduler.run())
    outcomes = Counter(g["outcome"] for g in run.lines())
    assert outcomes["trained"] == 3000
    assert outcomes["dropped_stale"] and outcomes["skipped_all_pass"] and outcomes["skipped_all_fail"]
    assert max(seen) <= 0, "no more payloads than those of living groups, after any step"
