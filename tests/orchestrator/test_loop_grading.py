"""The scheduler and its graders: lost ones and their groups (M1.10, M2.6), queueing, grades that come too late."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectLostError
from scripted import Run, ScriptedPool, TranscriptPool, run_config, tier_of

from grader.exchange import GradeReply, GradeRequest
from grader.scripted import ScriptedGrader
from infra.pool import ActorLost, ActorTimeout
from orchestrator.credit import GroupOutcome
from orchestrator.ledger import CompleteGroup
from orchestrator.loop import Scheduler

LOST = [ActorLost("grader-0", "grade", "killed"), ActorTimeout("grader-0", "grade", 17.5)]


def grade(request: GradeRequest, *transcripts: Any) -> GradeReply:
    return ScriptedGrader().reply(request, *transcripts)


def asked(run: Run) -> dict[str, list[int]]:
    """Group -> attempts at it, in order."""
    out: dict[str, list[int]] = defaultdict(list)
    for _, request, *_ in run.grader.calls:
        out[request.group_id].append(request.attempt)
    return out


def trained_code(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [g for g in groups if g["source"] == "code" and g["outcome"] == "trained"]


def test_grades_reach_the_advantages_of_their_own_trajectories(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(), grade=grade, pool=TranscriptPool)
    trained = trained_code(run.go())
    assert len(trained) == 6 and all(g["graded"] and g["grader"]["attempt"] == 0 for g in trained)
    for g in trained:
        passing = {t["id"]: t["tier"] for t in g["trajectories"] if t["passed"]}
        assert passing == {name: tier_of(name) for name in passing}
    assert all(attempts == [0] for attempts in asked(run).values()), "each group is graded once"
    given = {t["id"]: t["advantage"] for g in trained for t in g["trajectories"]}
    learned = {i.trajectory_id: i.advantage for batch in run.learner.batches for i in batch}
    assert given.items() <= learned.items()


@pytest.mark.parametrize("lost", LOST, ids=lambda e: type(e).__name__)
def test_a_lost_grader_gives_its_group_back_once(tmp_path: Path, lost: Exception) -> None:
    def once(request: GradeRequest, *transcripts: Any) -> GradeReply:
        if request.attempt == 0:
            raise lost
        return grade(request, *transcripts)

    run = Run(tmp_path, run_config(), grade=once, pool=TranscriptPool)
    trained = trained_code(run.go())
    assert trained and all(g["graded"] and g["grader"]["attempt"] == 1 for g in trained)
    assert {tuple(asked(run)[g["group_id"]]) for g in trained} == {(0, 1)}
    assert not run.alarms


@pytest.mark.parametrize("lost", LOST, ids=lambda e: type(e).__name__)
def test_after_two_lost_graders_the_group_falls_back(tmp_path: Path, lost: Exception) -> None:
    def never(request: GradeRequest, *transcripts: Any) -> GradeReply:
        raise lost

    run = Run(tmp_path, run_config(), grade=never)
    trained = trained_code(run.go())
    assert trained
    for g in trained:
        assert asked(run)[g["group_id"]] == [0, 1], "at most one retry"
        assert g["fallback_reason"] == "worker_lost" and g["mode"] == "outcome" and not g["graded"]
        assert str(lost) in g["grader"]["detail"]
        assert [t["advantage"] for t in g["trajectories"]] == pytest.approx([0.5, -0.5, 0.5, -0.5])


def test_a_group_that_nobody_can_read_is_not_tried_again(tmp_path: Path) -> None:
    def unreadable(request: GradeRequest, *transcripts: Any) -> GradeReply:
        raise ObjectLostError("0" * 40, "", "")

    run = Run(tmp_path, run_config(steps=1), grade=unreadable)
    trained = trained_code(run.go())
    assert trained and all(g["fallback_reason"] == "worker_lost" for g in trained)
    assert all(attempts == [0] for attempts in asked(run).values())


def test_the_late_reply_of_a_lost_grader_lands_nowhere(tmp_path: Path) -> None:
    def late(request: GradeRequest, *transcripts: Any) -> GradeReply:
        reply = grade(request, *transcripts)
        if request.attempt == 0:
            waiting[request.group_id] = reply
            raise ActorTimeout("grader-0", "grade", 17.5)
        return waiting[request.group_id]

    waiting: dict[str, GradeReply] = {}
    run = Run(tmp_path, run_config(steps=1), grade=late, pool=TranscriptPool)
    trained = trained_code(run.go())
    assert trained and all(g["fallback_reason"] == "mismatch" and not g["graded"] for g in trained)
    assert all(t["tier"] is None for g in trained for t in g["trajectories"])


def test_a_grade_for_a_group_that_has_ended_lands_nowhere(tmp_path: Path) -> None:
    """Nor does it stop the run: the group was counted when it ended."""

    class Dropping(Scheduler):
        def _on_grade(self, group: CompleteGroup, reply: GradeReply) -> None:
            if not gone:
                gone.append(group.group_id)
                self.ledger.end(group, GroupOutcome.FAILED)
            super()._on_grade(group, reply)

    gone: list[str] = []
    run = Run(tmp_path, run_config(), grade=grade, pool=TranscriptPool, scheduler=Dropping)
    groups = run.go()
    assert gone and run.steps == [1, 2, 3]
    assert gone[0] not in {g["group_id"] for g in groups}
    assert gone[0] not in {i.group_id for batch in run.learner.batches for i in batch}
    run.ledger.check()


def test_a_grade_that_lands_twice_counts_once(tmp_path: Path) -> None:
    class Doubling(Scheduler):
        def _on_grade(self, group: CompleteGroup, reply: GradeReply) -> None:
            super()._on_grade(group, reply)
            super()._on_grade(group, reply)

    run = Run(tmp_path, run_config(), grade=grade, pool=TranscriptPool, scheduler=Doubling)
    groups = run.go()
    assert max(Counter(g["group_id"] for g in groups).values()) == 1
    assert max(Counter(i.trajectory_id for batch in run.learner.batches for i in batch).values()) == 1
    run.ledger.check()


def test_the_wait_for_a_grader_is_not_time_spent_grading(tmp_path: Path) -> None:
    """M7: queueing is measured from the end of the last trajectory, so it grows where graders are few."""
    waits: list[float] = []

    def slow(request: GradeRequest, *transcripts: Any) -> GradeReply:
        assert request.submitted_unix_s is not None
        waits.append(time.time() - 0.05 - request.submitted_unix_s)  # the pool calls this at the end of its delay
        return grade(request, *transcripts)

    run = Run(tmp_path, run_config(steps=1), grade=slow, pool=TranscriptPool, grade_delay_s=0.05, grade_slots=1)
    run.go()
    assert waits[0] < 0.05 and waits[1] >= 0.045, "the second group waited for the first one's grading"


def test_a_group_that_never_comes_back_costs_its_own_slot_and_not_the_step(tmp_path: Path) -> None:
    class Hanging(ScriptedPool):
        async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
            if args[0].group_id == "code-000000":
                await asyncio.Event().wait()
            return await super().call(method, *args, num_returns=num_returns, timeout_s=timeout_s)

    run = Run(tmp_path, run_config(), grade=grade, pool=TranscriptPool, grader_pool=Hanging)
    trained = trained_code(run.go())
    assert run.steps == [1, 2, 3] and all(g["graded"] for g in trained)
    assert "code-000000" not in {g["group_id"] for g in trained}
