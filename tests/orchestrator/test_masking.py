"""A run pauses while most of what it samples is lost (M1.3), and goes on by itself."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from scripted import Run, ScriptedLearner, ScriptedSource, even_slots_pass, run_config, trajectory

from envs.task import Split, Task, TaskKind
from infra.errors import GagarError
from learner.group import BatchItem
from orchestrator.masking import MASKED, MaskWatch
from rollout.trajectory import Status, Trajectory


class WatchedLearner(ScriptedLearner):
    """Remembers which reasons to pause stood at the beginning of each step."""

    run: Run

    def __init__(self) -> None:
        super().__init__()
        self.standing: list[dict[str, str]] = []

    async def train_step(self, items: list[BatchItem]) -> dict[str, float]:
        self.standing.append(dict(self.run.scheduler.pauses.reasons()))
        return await super().train_step(items)


def watched(folder: Path, attempt: Any, **changes: Any) -> tuple[Run, WatchedLearner]:
    learner = WatchedLearner()
    run = Run(folder, run_config(**changes), rollout=attempt, rollout_delay_s=0.002, learner=learner)
    learner.run = run
    return run, learner


def losing(first: int, last: int, share: float, source: str | None = None) -> Any:
    """Loses a share of the attempts from the `first` to the `last` one."""
    seen, rng = 0, Random(5)

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        nonlocal seen
        if source is None or task.source == source:
            seen += 1
            if first <= seen <= last and rng.random() < share:
                return trajectory(trajectory_id, task=task, status=Status.INFRA_SANDBOX)
        return even_slots_pass(task, trajectory_id, group_id)

    return rollout


ONE_SOURCE = {"code": {"type": "minirepo", "groups_per_step": 2}}
SCHEDULER = {"pause_masked_window": 16, "max_staleness": 8}


def test_training_pauses_while_most_is_lost_and_goes_on_by_itself(tmp_path: Path) -> None:
    run, learner = watched(tmp_path, losing(10, 150, 0.9), steps=6, scheduler=SCHEDULER)
    run.go()
    assert run.steps == [1, 2, 3, 4, 5, 6]
    begun = [a for a in run.alarms if a.on and a.name.startswith("masked")]
    over = [a for a in run.alarms if not a.on and a.name.startswith("masked")]
    assert begun and {a.name for a in begun} == {a.name for a in over}
    text = begun[0].text
    assert "sandbox" in text and "scheduler.pause_masked_above" in text and "gagar doctor" in text
    assert learner.standing == [{}] * 6, "no step begins under a pause"
    assert run.scheduler.pauses.reasons() == {}
    run.ledger.check()


def test_one_source_that_is_lost_pauses_the_run(tmp_path: Path) -> None:
    """Every step needs the quota of each source. The other one is sampled as before, within its bounds."""
    run, learner = watched(tmp_path, losing(1, 60, 1.0, "sums"), steps=2, scheduler=SCHEDULER)
    run.go()
    assert run.steps == [1, 2] and learner.standing == [{}, {}]
    assert {a.name for a in run.alarms if a.on} >= {"masked/sums"}


def test_only_probes_are_sampled_meanwhile(tmp_path: Path) -> None:
    most = 0

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        nonlocal most
        if MASKED in run.scheduler.pauses.reasons():
            since_s = run.scheduler.pauses.since_s(MASKED)
            assert since_s is not None
            new = [g for g in run.scheduler.ledger._rolling.values() if g.admitted_s > since_s]
            most = max(most, len(new))
        return lose(task, trajectory_id, group_id)

    lose = losing(10, 200, 0.95)
    run, _ = watched(tmp_path, rollout, steps=3, scheduler=SCHEDULER, sources=ONE_SOURCE)
    run.go()
    assert 1 <= most <= 2, "one group of four at once, and the next one when the first has begun to end"
    assert run.steps == [1, 2, 3]


def test_ready_groups_do_not_keep_probes_from_running(tmp_path: Path) -> None:
    """All that the bound on staleness admits is ready when the pause begins: without an exception nobody would learn
    that rollouts come through again."""
    config = {"pause_masked_window": 8, "max_staleness": 0}

    def rollout(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
        slot = int(trajectory_id.split("/")[1].split(".")[0])
        if group_id in ("code-000000", "code-000001", "sums-000000") and slot >= 2 and not late:
            lost.append(trajectory_id)
            return trajectory(trajectory_id, task=task, status=Status.INFRA_ENGINE)
        return even_slots_pass(task, trajectory_id, group_id)

    late: list[str] = []
    lost: list[str] = []
    run, learner = watched(
        tmp_path, rollout, steps=1, scheduler=config, rollout={"infra_retries": 5}, algorithm={"group_size": 4}
    )
    run.go()
    assert any(a.on and a.name == "masked" for a in run.alarms)
    assert run.steps == [1] and learner.standing == [{}]


def test_what_comes_through_under_a_pause_does_not_keep_a_run_alive(tmp_path: Path) -> None:
    """Probes that end well now and then are no progress: `abort_after_s` ends the run, its last checkpoint stays."""
    scheduler = {"max_staleness": 8, "stall_after_s": 0.5, "abort_after_s": 1.5}
    run, learner = watched(
        tmp_path, losing(60, 10**9, 0.9), steps=50, scheduler=scheduler, checkpoint={"every_steps": 1}
    )
    with pytest.raises(ExceptionGroup) as e:
        run.go()
    assert e.group_contains(GagarError, match="abort_after_s")
    assert 0 < run.scheduler.step < 50 and learner.standing == [{}] * len(learner.standing)
    assert (tmp_path / "checkpoints" / f"step-{run.scheduler.step:06d}" / "state.json").exists()


def test_null_trains_on_what_is_left(tmp_path: Path) -> None:
    scheduler = {**SCHEDULER, "pause_masked_above": None}
    run, _ = watched(tmp_path, losing(10, 150, 0.6), steps=3, scheduler=scheduler)
    run.go()
    assert run.steps == [1, 2, 3]
    assert not [a for a in run.alarms if a.name.startswith("masked")]


# ---- the rule -------------------------------------------------------------------------------------------------------


TASK = ScriptedSource("code", TaskKind.CODE).task(Split.TRAIN, 0)


def told(watch: MaskWatch, *statuses: Status) -> list[tuple[str, bool]]:
    out = []
    for status in statuses:
        out += [(a.name, a.on) for a in watch.attempt(trajectory("code-0/0.0", task=TASK, status=status))]
    return out


def test_a_handful_of_losses_at_the_start_is_no_pause() -> None:
    watch = MaskWatch(["code"], above=0.5, window=64)
    assert told(watch, *[Status.INFRA_SANDBOX] * 32) == [], "half of a window may be lost"
    assert told(watch, Status.INFRA_SANDBOX) == [("masked/code", True), ("masked", True)]


def test_it_ends_on_what_came_since_and_not_on_what_was_before() -> None:
    watch = MaskWatch(["code"], above=0.5, window=16)
    told(watch, *[Status.SUBMITTED] * 16, *[Status.INFRA_ENGINE] * 9)
    assert watch.probed == {"code"} and watch.message is not None and "engine 9" in watch.message
    assert told(watch, Status.SUBMITTED) == [], "one that ends well is no recovery"
    assert told(watch, *[Status.INFRA_ENGINE] * 4, *[Status.SUBMITTED] * 2) == []
    assert told(watch, Status.SUBMITTED) == [("masked/code", False), ("masked", False)]
    assert watch.probed == frozenset() and watch.message is None and watch.alarms == ()


def test_a_share_just_at_the_bound_is_no_pause() -> None:
    watch = MaskWatch(["code"], above=0.5, window=16)
    assert told(watch, *[Status.INFRA_SANDBOX, Status.SUBMITTED] * 100) == []
    assert dict(watch.scalars()) == {"infra/lost_share": 0.5, "infra/lost_share/code": 0.5}


def test_the_cancelled_count_for_nothing() -> None:
    watch = MaskWatch(["code"], above=0.5, window=4)
    assert told(watch, *[Status.INFRA_CANCELLED] * 50) == []
    assert dict(watch.scalars()) == {}
