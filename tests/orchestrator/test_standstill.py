"""Scripted runs that hang in one place each: the report names that loop, and what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scripted import Run, ScriptedLearner, ScriptedPool, run_config, trajectory

from envs.task import Task
from infra.actors import ScriptedActor, ScriptedActors
from infra.pool import ActorPool
from infra.waits import Wait
from infra.watchdog import report
from orchestrator.cli import main
from orchestrator.standstill import report_of
from rollout.trajectory import Trajectory


async def hang(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


class Hanging(ScriptedPool):
    async def call(self, method: str, *args: Any, **_: Any) -> Any:
        self.busy += 1
        await hang()


def waits_of(
    run: Run, until: Callable[[set[tuple[str, str]]], bool], *, first: Callable[[], None] = lambda: None
) -> list[Wait]:
    """What it waits for, once `until` holds of the pairs (loop, what it waits on) and nothing changes any more; `first`
    is called before it runs."""

    async def go() -> list[Wait]:
        first()
        task = asyncio.create_task(run.scheduler.run())
        before: list[Wait] = []
        try:
            async with asyncio.timeout(60.0):
                while True:
                    await asyncio.sleep(0.1)
                    now = run.scheduler.waits.now()
                    found = [Wait(w.loop, w.on, w.since_s, partial(str, w.detail())) for w in now]
                    if until({(wait.loop, wait.on) for wait in found}) and shown(found) == shown(before):
                        return found
                    before = found
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    return asyncio.run(go())


def shown(waits: list[Wait]) -> dict[str, str]:
    """Loop -> what it waits for, and the figures."""
    return {wait.loop: f"{wait.on}: {wait.detail()}" for wait in waits}


def test_rollouts_that_hang(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(), pool=Hanging)
    found = shown(waits_of(run, lambda w: ("rollouts", "a free slot of the rollout pool") in w))
    assert found["rollouts"].startswith("a free slot of the rollout pool: 8 of 8 slots taken")
    assert found["training"] == "the groups of the batch: code 0 of 2, sums 0 of 1"
    assert "8 of 8 rollout slots taken" in found["admission"]


def test_graders_that_hang(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(), grader_pool=Hanging)
    found = shown(waits_of(run, lambda w: ("grading", "a free slot of the grader pool") in w and len(w) >= 4))
    assert found["grading"].startswith("a free slot of the grader pool: 2 of 2 slots taken")
    assert found["training"].startswith("the groups of the batch: code 0 of 2")
    assert found["rollouts"] == "the queue of admitted groups: empty"


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("train_step", "the learner's ranks: an optimiser step"),
        ("publish", "the learner's ranks and the engines: new weights"),
        ("save", "the learner's ranks and the disk: a checkpoint"),
    ],
)
def test_a_learner_that_hangs(tmp_path: Path, method: str, part: str) -> None:
    learner = ScriptedLearner()
    setattr(learner, method, hang)
    run = Run(tmp_path, run_config(checkpoint={"every_steps": 1}), learner=learner)
    found = waits_of(run, lambda w: ("training", part) in w)
    assert {wait.on for wait in found if wait.loop == "training"} == {part}


def test_a_pause_is_a_wait_with_its_reason(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config())
    pause = partial(run.scheduler.pauses.set, "endpoint", "the grader answers 503")
    found = shown(waits_of(run, lambda w: len(w) >= 3, first=pause))
    assert found["admission"] == found["training"] == "the end of a pause: endpoint: the grader answers 503"


def test_a_source_that_cannot_be_admitted_is_no_silent_hang(tmp_path: Path) -> None:
    """Every trajectory ends, none can be trained on: training waits, and says for which groups."""

    def sums_fail(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        passed = task.source == "code" and trajectory_id.endswith("/0.0")
        return trajectory(trajectory_id, task=task, passed=passed)

    run = Run(tmp_path, run_config(), rollout=sums_fail, rollout_delay_s=0.01)
    found = shown(waits_of(run, lambda w: any(loop == "training" for loop, _ in w) and run.scheduler.step == 0))
    assert "sums 0 of 1" in found["training"]


async def test_a_pool_whose_calls_wait_is_reported_with_its_queue() -> None:
    class Worker:
        grade = staticmethod(hang)

    pool = ActorPool("grader", lambda _: ScriptedActor(Worker()), size=1, slots=1, actors=ScriptedActors())
    await pool.ready()
    calls = [asyncio.create_task(pool.call("grade")) for _ in range(3)]
    await asyncio.sleep(0.05)
    text = report("still", [], [report_of(pool)], [])
    assert "pool grader: 1 live, 0 starting, 0 draining; 1 of 1 slots busy, 2 calls wait (the oldest since 0 s)" in text
    assert "its oldest call: grade on grader-0 since 0 s" in text
    for call in calls:
        call.cancel()
    await pool.shutdown()


def test_a_run_that_was_ended_for_standing_still_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from infra.watchdog import EXIT_STALLED, Stalled
    from orchestrator import cli

    def stalled() -> None:
        raise Stalled("nothing moved for 900 s")

    monkeypatch.setattr(cli, "app", stalled)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_STALLED == 3
    assert "nothing moved for 900 s" in capsys.readouterr().err


def test_a_run_that_does_not_move_ends_as_stalled(tmp_path: Path) -> None:
    from infra.watchdog import Stalled
    from orchestrator.build import run_loop

    run = Run(tmp_path, run_config(scheduler={"stall_after_s": 0.5, "abort_after_s": 1.0}), rollout_delay_s=60.0)
    with pytest.raises(Stalled, match="abort_after_s"):
        run_loop(run.scheduler.run())
