"""M2.6: grades attach by id, never by position, however the graders' answers come back.

Each case runs the grading stage over two groups whose tiers are mirror images, so that a grade on the wrong trajectory
shows. The same cases run against two variants that align by position: there the check must fail, or it checks nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from scripted import ScriptedSource, ScriptedTelemetry, run_config, tier_of, trajectory, transcript

from configs.schema import AlgorithmConfig
from envs.task import Split, TaskKind
from grader.exchange import GradeReply, GradeRequest, accept
from grader.scripted import ScriptedGrader
from infra.pool import ActorLost, ActorTimeout
from orchestrator.clock import Clock
from orchestrator.credit import Credit, credit
from orchestrator.grading_stage import GradingStage
from orchestrator.ledger import CompleteGroup, Member

A, B = "code-000000", "code-000001"
SOURCE = ScriptedSource("code", TaskKind.CODE)

Check = Callable[[GradeRequest, GradeReply], GradeReply]
Attach = Callable[..., Credit]
Answer = Callable[["Graders", GradeRequest], Awaitable[GradeReply]]


def group(group_id: str) -> CompleteGroup:
    """Slots 0 and 2 pass, 1 and 3 fail; which pass is T1 depends on the group (scripted.tier_of)."""
    index = int(group_id[-1])
    task = SOURCE.task(Split.TRAIN, index)
    names = [f"{group_id}/{slot}.0" for slot in range(4)]
    members = tuple(
        Member(
            trajectory=trajectory(name, task=task, passed=slot % 2 == 0),
            payload=None,
            transcript=transcript(name, tier_of(name)),
        )
        for slot, name in enumerate(names)
    )
    return CompleteGroup(group_id=group_id, task=task, index=index, members=members, admitted_s=0.0, completed_s=0.0)


class Graders:
    """A grader pool: every call is answered as `answer` says, with replies that a sound grader once gave."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.made: dict[tuple[str, int], GradeReply] = {}
        """(group, attempt) -> the right reply to it."""
        self.calls: list[tuple[str, int]] = []
        self.arrived: dict[str, asyncio.Event] = {A: asyncio.Event(), B: asyncio.Event()}

    def occupancy(self) -> tuple[int, int]:
        return 0, 2

    async def call(self, method: str, request: GradeRequest, *transcripts: Any, timeout_s: float) -> GradeReply:
        key = (request.group_id, request.attempt)
        self.calls.append(key)
        self.made[key] = ScriptedGrader().reply(request, *transcripts)
        self.arrived[request.group_id].set()
        await asyncio.gather(*(event.wait() for event in self.arrived.values()))  # both are under way
        return await self.answer(self, request)


async def in_another_order(graders: Graders, request: GradeRequest) -> GradeReply:
    """The first group's verdict comes back last."""
    await asyncio.sleep(0.02 if request.group_id == A else 0.0)
    return graders.made[request.group_id, request.attempt]


async def swapped(graders: Graders, request: GradeRequest) -> GradeReply:
    """Each call is given the other group's verdict."""
    return graders.made[B if request.group_id == A else A, 0]


async def late(graders: Graders, request: GradeRequest) -> GradeReply:
    """Group A's first grader hangs; its verdict comes when the second one was asked already."""
    if request.group_id == B:
        return graders.made[B, 0]
    if request.attempt == 0:
        raise ActorTimeout("grader-0", "grade", 1.0)
    return graders.made[A, 0]


async def late_for_another(graders: Graders, request: GradeRequest) -> GradeReply:
    """Group A falls back after two lost graders; then its verdict turns up as the answer to group B."""
    if request.group_id == A:
        raise ActorLost("grader-0", "grade")
    await asyncio.sleep(0.02)
    return graders.made[A, 0]


async def twice(graders: Graders, request: GradeRequest) -> GradeReply:
    """Group A's verdict comes for A, and once more for B."""
    return graders.made[A, 0]


CASES: dict[Answer, tuple[set[str], dict[str, str]]] = {
    in_another_order: ({A, B}, {}),
    swapped: (set(), {A: "mismatch", B: "mismatch"}),
    late: ({B}, {A: "mismatch"}),
    late_for_another: (set(), {A: "worker_lost", B: "mismatch"}),
    twice: ({A}, {B: "mismatch"}),
}
"""Answers -> groups whose grades land, and why the others keep their outcome advantages (M1.10)."""


def graded(answer: Answer, *, check: Check = accept, attach: Attach = credit) -> dict[str, list[Credit]]:
    """Both groups through a grading stage: group -> every credit it got."""
    got: dict[str, list[Credit]] = {A: [], B: []}
    finished = asyncio.Event()

    def on_grade(given: CompleteGroup, reply: GradeReply) -> None:
        trajectories = [m.trajectory for m in given.members]
        reason = reply.fallback_reason.value if reply.fallback_reason else None
        got[given.group_id].append(attach(trajectories, AlgorithmConfig(), grade=reply.grade, fallback_reason=reason))
        if all(got.values()):
            finished.set()

    async def go() -> None:
        config = run_config().grader
        assert config is not None
        async with asyncio.TaskGroup() as tasks:

            def spawn(work: Coroutine[Any, Any, None]) -> None:
                tasks.create_task(work)

            stage = GradingStage(
                config=config,
                seed=0,
                pool=cast(Any, Graders(answer)),
                telemetry=cast(Any, ScriptedTelemetry()),
                clock=Clock(),
                canaries=None,
                spawn=spawn,
                step=lambda: 0,
                on_grade=on_grade,
                on_alarm=lambda alarm: None,
                check=check,
            )
            loop = tasks.create_task(stage.run())
            for group_id in (A, B):
                await stage.put(group(group_id))
            await finished.wait()
            loop.cancel()

    asyncio.run(asyncio.wait_for(go(), timeout=30))
    return got


def right_or_nowhere(got: dict[str, list[Credit]], lands: set[str], reasons: dict[str, str]) -> None:
    for group_id, credits in got.items():
        (given,) = credits
        rows = {name: row for name, row in given.rows.items() if row.passed}
        assert set(rows) == {f"{group_id}/0.0", f"{group_id}/2.0"}
        if group_id in lands:
            assert {name: row.tier for name, row in rows.items()} == {name: tier_of(name) for name in rows}
            best = max(given.rows, key=lambda name: given.rows[name].advantage)
            assert tier_of(best) == "T1" and given.graded
        else:
            assert given.fallback_reason == reasons[group_id] and not given.graded
            assert all(row.tier is None and row.factor is None for row in given.rows.values())
            assert [row.advantage for row in given.rows.values()] == pytest.approx([0.5, -0.5, 0.5, -0.5])


def check_by_position(request: GradeRequest, reply: GradeReply) -> GradeReply:
    """What must not be: the n-th grade goes to the n-th passing trajectory of whatever call it came back to."""
    if reply.grade is None:
        return reply
    names = [t.trajectory_id for t in request.trajectories if t.passed]
    by_id = sorted(reply.grade.candidates.items())
    marks = dict(zip(names, (mark for _, mark in by_id), strict=True))
    return replace(reply, group_id=request.group_id, grade=replace(reply.grade, candidates=marks))


def attach_by_position(trajectories: Sequence[Any], algorithm: AlgorithmConfig, *, grade: Any, **rest: Any) -> Credit:
    """What must not be: candidates come in the order of their labels, which is not that of the trajectories."""
    if grade is not None:
        names = [t.trajectory_id for t in trajectories if t.passed]
        grade = replace(grade, candidates=dict(zip(names, grade.candidates.values(), strict=True)))
    return credit(trajectories, algorithm, grade=grade, **rest)


@pytest.mark.parametrize("answer", CASES, ids=lambda answer: answer.__name__)
def test_a_verdict_lands_on_the_right_trajectories_or_nowhere(answer: Answer) -> None:
    right_or_nowhere(graded(answer), *CASES[answer])


@pytest.mark.parametrize("answer", [swapped, late_for_another, twice], ids=lambda answer: answer.__name__)
def test_the_cases_would_find_replies_that_are_taken_by_position(answer: Answer) -> None:
    with pytest.raises(AssertionError):
        right_or_nowhere(graded(answer, check=check_by_position), *CASES[answer])
    wrong = [
        name
        for credits in graded(answer, check=check_by_position).values()
        for name, row in credits[0].rows.items()
        if row.tier is not None and row.tier != tier_of(name)
    ]
    assert wrong, "the variant really puts grades on other trajectories"


def test_the_cases_would_find_grades_that_are_attached_by_position() -> None:
    right_or_nowhere(graded(in_another_order), *CASES[in_another_order])
    with pytest.raises(AssertionError):
        right_or_nowhere(graded(in_another_order, attach=attach_by_position), *CASES[in_another_order])
