"""Crashes and resumes under virtual time: what is kept, what is repeated, and that short rollouts are not favoured."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from scripted import MemoryLog, Run, ScriptedLearner, ScriptedPool, run_config, trajectory

from grader.exchange import GradeReply, GradeRequest, lost_reply
from orchestrator.checkpoint import Checkpoint, Checkpoints, cut_logs
from orchestrator.ledger_store import KeptGroup
from orchestrator.simulation.clock import run_virtual
from rollout.trajectory import Trajectory

SOURCES = {
    "code": {"type": "minirepo", "groups_per_step": 3, "prior_acceptance": 1.0},
    "sums": {"type": "arith", "groups_per_step": 1, "prior_acceptance": 1.0},
}
STEPS = 30


def difficulty(group_id: str) -> float:
    """Seconds that rollouts of a task take on average: heavy-tailed over tasks, shorter than a session."""
    return min(20.0 * Random(group_id).lognormvariate(0.0, 1.0), 80.0)


class DurablePool(ScriptedPool):
    """Rollouts take as long as they are; what has finished is on `log`'s disk before the driver hears of it."""

    log: MemoryLog
    draw: Callable[[str], Random]
    run: Run

    async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
        if method == "restore":
            await asyncio.sleep(0.1)
            kept = self.log.disk[args[0]]
            return kept, [f"payload:{kept.trajectory_id}", None]
        task, trajectory_id, group_id = args
        self.calls.append((method, *args))
        version = self.run.scheduler.step
        seconds = difficulty(group_id) * self.draw(trajectory_id).uniform(0.5, 1.5)
        await asyncio.sleep(seconds)
        slot = int(trajectory_id.split("/")[1].split(".")[0])
        made = trajectory(
            trajectory_id, task=task, passed=slot % 2 == 0, versions=(version,), response_tokens=round(10 * seconds)
        )
        self.log.keep(made)
        return made, [f"payload:{trajectory_id}", None]


class Sessions:
    """One run, crashed every `crash_s` until it has done its steps."""

    def __init__(
        self,
        folder: Path,
        *,
        crash_s: float,
        resume: Callable[[list[KeptGroup]], list[KeptGroup]],
        draw: Callable[[str], Random],
        log: MemoryLog | None = None,
        steps: int = STEPS,
    ) -> None:
        folder.mkdir()
        self.log = log or MemoryLog()
        self.asked: Counter[str] = Counter()
        """Groups that graders were asked about."""
        self.sampled: list[str] = []
        """Trajectories that were started, over all sessions."""
        self.crashes = 0
        self.trained: list[dict[str, Any]] = []
        config = run_config(steps=steps, sources=SOURCES, checkpoint={"every_steps": 2}, scheduler={"stale": "wait"})

        def grade(request: GradeRequest, *transcripts: Any) -> GradeReply:
            self.asked[request.group_id] += 1
            return lost_reply(request, "scripted", run_s=0.0)

        async def session(run: Run) -> bool:
            running = asyncio.create_task(run.scheduler.run())
            await asyncio.wait((running,), timeout=crash_s)
            if running.done():
                running.result()
                return True
            running.cancel()
            await asyncio.wait((running,))
            return False

        done = False
        while not done:
            checkpoint: Checkpoint | None = Checkpoints(folder, keep=1).latest()
            cut_logs(folder, checkpoint.state["logs"] if checkpoint else {})
            left = self.log.load(checkpoint.state["ledger"] if checkpoint else 0)
            kept = resume(left)
            for group in left:
                if group not in kept:
                    del self.log.rows[group.group_id]
            run = Run(
                folder,
                config,
                pool=DurablePool,
                grade=grade,
                grade_delay_s=5.0,
                learner=ScriptedLearner(),
                log=self.log,
                kept=kept,
                taken=left,
                checkpoint=checkpoint,
            )
            pool: Any = run.rollout
            pool.log, pool.draw, pool.run = self.log, draw, run
            done = run_virtual(session(run))
            run.audit.close()
            run.ledger.check()
            self.sampled += [args[2] for args in pool.calls]
            self.crashes += not done
            assert self.crashes < 100, "it gets nowhere"
        lines = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
        self.trained = [g for g in lines if g["outcome"] == "trained"]

    def lengths(self) -> list[int]:
        """Tokens of every trained trajectory."""
        return [t["response_tokens"] for g in self.trained for t in g["trajectories"]]

    def task_difficulty(self) -> float:
        """Mean over trained code groups."""
        return fmean(difficulty(g["group_id"]) for g in self.trained)


def everything(kept: list[KeptGroup]) -> list[KeptGroup]:
    return kept


def only_finished(kept: list[KeptGroup]) -> list[KeptGroup]:
    """What favours short rollouts: finished groups stay, the others are forgotten and their tasks never come back."""
    return [k for k in kept if len(k.rollouts) == k.size]


def same(trajectory_id: str) -> Random:
    return Random(trajectory_id)


class Redraw:
    """Another length every time a trajectory is sampled."""

    def __init__(self) -> None:
        self.random = Random(7)

    def __call__(self, trajectory_id: str) -> Random:
        return self.random


def test_no_finished_rollout_is_sampled_again_and_no_group_graded_twice(tmp_path: Path) -> None:
    run = Sessions(tmp_path / "run", crash_s=151.0, resume=everything, draw=same)
    assert run.crashes >= 5
    finished = {t["id"] for g in run.trained for t in g["trajectories"]}
    again = [i for i, n in Counter(run.sampled).items() if n > 1]
    assert len(finished) == STEPS * 4 * 4
    assert again, "what had not finished is"
    assert max(run.asked.values()) == 1
    assert len({g["group_id"] for g in run.trained}) == len(run.trained) == STEPS * 4, "each is trained once"
    assert Counter(g["step"] for g in run.trained) == dict.fromkeys(range(1, STEPS + 1), 4), "lost steps are done again"


def test_finished_rollouts_are_started_once(tmp_path: Path) -> None:
    starts_after_end: list[str] = []

    class Watching(MemoryLog):
        def keep(self, made: Trajectory) -> None:
            if any(t.trajectory_id == made.trajectory_id for t in self.disk.values()):
                starts_after_end.append(made.trajectory_id)
            super().keep(made)

    log = Watching()
    Sessions(tmp_path / "run", crash_s=151.0, resume=everything, draw=same, log=log)
    assert len(log.disk) > STEPS * 16 and not starts_after_end


def test_crashes_do_not_change_which_rollouts_are_trained_on(tmp_path: Path) -> None:
    """Each length belongs to its trajectory: with crashes and without, the same groups are trained on, so the lengths
    are the same; forgetting unfinished groups loses the long ones."""
    smooth = Sessions(tmp_path / "smooth", crash_s=1e9, resume=everything, draw=same)
    crashed = Sessions(tmp_path / "crashed", crash_s=211.0, resume=everything, draw=same)
    naive = Sessions(tmp_path / "naive", crash_s=211.0, resume=only_finished, draw=same)
    assert crashed.crashes >= 5 and naive.crashes >= 3
    first = {f"{s}-{i:06d}" for s, quota in (("code", 3), ("sums", 1)) for i in range((STEPS - 3) * quota)}
    for run in (smooth, crashed):
        assert first <= {g["group_id"] for g in run.trained}, "every task in turn, however long it takes"
    pick = lambda run: sorted(  # noqa: E731
        t["response_tokens"] for g in run.trained if g["group_id"] in first for t in g["trajectories"]
    )
    assert pick(smooth) == pick(crashed)
    assert fmean(naive.lengths()) < 0.85 * fmean(smooth.lengths())
    assert len(first - {g["group_id"] for g in naive.trained}) >= 5


def test_rollouts_that_are_sampled_again_draw_from_the_same_tasks(tmp_path: Path) -> None:
    """Where an interrupted rollout comes out differently the second time, the tasks stay the same, and only what was
    under way at a crash is drawn again."""
    crashed = Sessions(tmp_path / "crashed", crash_s=211.0, resume=everything, draw=Redraw())
    smooth = Sessions(tmp_path / "smooth", crash_s=1e9, resume=everything, draw=Redraw())
    naive = Sessions(tmp_path / "naive", crash_s=211.0, resume=only_finished, draw=Redraw())
    assert crashed.task_difficulty() == pytest.approx(smooth.task_difficulty(), rel=0.05)
    assert naive.task_difficulty() < 0.95 * smooth.task_difficulty()


def test_a_rollout_that_cannot_be_read_is_sampled_again(tmp_path: Path) -> None:
    from infra.errors import StorageError

    class Damaged(DurablePool):
        async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
            if method == "restore" and args[0].name.startswith("1."):
                raise StorageError(f"{args[0]}: not a kept rollout")
            return await super().call(method, *args, num_returns=num_returns, timeout_s=timeout_s)

    log = MemoryLog()
    config = run_config(steps=1, sources=SOURCES)
    first = Run(tmp_path, config, pool=DurablePool, log=log)
    pool: Any = first.rollout
    pool.log, pool.draw, pool.run = log, same, first

    async def crash() -> None:
        running = asyncio.create_task(first.scheduler.run())
        await asyncio.wait((running,), timeout=60.0)
        running.cancel()
        await asyncio.wait((running,))

    run_virtual(crash())
    finished = {t.trajectory_id for t in log.disk.values()}
    damaged = {t for t in finished if t.split("/")[1].startswith("1.")}
    assert damaged and finished - damaged
    cut_logs(tmp_path, {})
    second = Run(tmp_path, config, pool=Damaged, log=log, kept=log.load(0))
    pool = second.rollout
    pool.log, pool.draw, pool.run = log, same, second
    run_virtual(second.scheduler.run())
    sampled = {args[2] for args in second.rollout.calls}
    assert {t.replace("/1.0", "/1.1") for t in damaged} <= sampled
    assert not (finished - damaged) & sampled
