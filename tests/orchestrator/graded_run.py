"""Run folders with an archive, written by the project's own grading, credit and audit trail."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.schema import AlgorithmConfig
from grader.exchange import GradeReply, GradeRequest, base_state_of
from grader.scripted import Judge, ScriptedGrader, judge_by_size
from grader.stored import StoredGroup, write_archive
from grader.verdict import FallbackReason
from orchestrator.audit import audit_record
from orchestrator.credit import GroupOutcome, credit
from orchestrator.ledger import CompleteGroup, Member

ALGORITHM = AlgorithmConfig()
Change = Callable[[GradeReply], GradeReply]


def record_of(group: StoredGroup, *, judge: Judge = judge_by_size, change: Change = lambda reply: reply) -> Any:
    """The line of groups.jsonl of a graded group that was trained at step 3."""
    request = GradeRequest(
        group_id=group.group_id,
        task=group.task,
        base_state=base_state_of(group.task),
        trajectories=group.trajectories,
        order_seed=7,
    )
    reply = change(ScriptedGrader(judge=judge).reply(request, *group.transcripts))
    reason = reply.fallback_reason.value if reply.fallback_reason else None
    given = credit(group.trajectories, ALGORITHM, grade=reply.grade, fallback_reason=reason)
    members = tuple(Member(trajectory=t, payload=None, transcript=None) for t in group.trajectories)
    complete = CompleteGroup(
        group_id=group.group_id, task=group.task, index=0, members=members, admitted_s=0.0, completed_s=1.0
    )
    outcome = given.skip or GroupOutcome.TRAINED
    return audit_record(
        complete,
        given,
        outcome=outcome,
        step=None if given.skip else 3,
        lambda_max=ALGORITHM.lambda_max,
        reply=reply,
        ready_s=2.0,
    )


def fallback(reply: GradeReply) -> GradeReply:
    """The same answer, refused."""
    return replace(reply, grade=None, fallback_reason=FallbackReason.NOT_JSON, detail="no JSON", verdict='{"cand')


def hack(name_end: str, text: str) -> Change:
    """The candidate whose id ends so is called a hack, citing `text`."""

    def change(reply: GradeReply) -> GradeReply:
        from grader.evidence import Citation, CitationKind

        assert reply.grade is not None
        name = next(n for n in reply.grade.candidates if n.endswith(name_end))
        left = {n: c for n, c in reply.grade.candidates.items() if n != name}
        found = (Citation(kind=CitationKind.TURN, text=text),)
        return replace(reply, grade=replace(reply.grade, candidates=left, hacks={name: found}))

    return change


def write_run(run_dir: Path, entries: Sequence[tuple[StoredGroup, dict[str, Any]]], *, archive: bool = True) -> None:
    """A run folder with these groups and records."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text("name: demo\nsteps: 3\n", encoding="utf-8")
    lines = [json.dumps(record) + "\n" for _, record in entries]
    (run_dir / "groups.jsonl").write_text("".join(lines), encoding="utf-8")
    for group, _ in entries:
        if archive:
            write_archive(run_dir / "archive", group)
