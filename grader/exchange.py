"""What goes to a grader and what comes back. Everything is matched by id, never by position (M2.6)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from envs.task import Task
from grader.evidence import CheckResult
from grader.verdict import FallbackReason, Grade
from infra.scrub import scrub
from rollout.trajectory import Trajectory, Transcript


def base_state_of(task: Task) -> str:
    """Digest of the repository state that all trajectories of a task start from, hex."""
    digest = hashlib.sha256()
    for path, content in sorted(task.files.items()):
        for part in (path, content):
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeRequest:
    """One mixed group to be graded."""

    group_id: str
    task: Task
    base_state: str
    """`base_state_of(task)`: the state that the trajectories really started from."""
    trajectories: tuple[Trajectory, ...]
    """The valid ones (M1.3), passing and failing."""
    order_seed: int
    """Decides the candidates' order and labels (M2.5)."""
    attempt: int = 0
    """Counts resubmissions of one group after a grader was lost."""
    submitted_unix_s: float | None = None
    """Wall-clock time at which the driver handed the group over; queueing is measured from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeReply:
    """A grade, or why there is none (M1.10); with what the audit trail wants."""

    group_id: str
    attempt: int
    base_state: str
    """Digest of the repository state that was graded."""
    policy_versions: Mapping[str, tuple[int, ...]]
    """Trajectory id -> policy versions of what was graded."""
    order_seed: int
    grade: Grade | None
    fallback_reason: FallbackReason | None
    """Set exactly if `grade` is None."""
    detail: str
    """For a fallback, what was wrong."""
    model: str
    queue_s: float
    run_s: float
    turns: int
    """Model calls that answered."""
    prompt_tokens: int
    completion_tokens: int
    verdict: str | None
    """The last verdict exactly as the model returned it, valid or not."""
    labels: Mapping[str, str]
    """Label -> trajectory id: what the verdict's anonymous labels stand for."""
    checks: tuple[CheckResult, ...] = ()
    """Commands that the grader ran, in order: what "run:N" stands for."""
    cost_usd: float = 0.0
    """Price of the model's tokens; 0 where the configuration names none."""

    def audit(self) -> dict[str, Any]:
        """The `grader` object of groups.jsonl."""
        grade = self.grade
        return {
            "model": self.model,
            "queue_s": round(self.queue_s, 4),
            "run_s": round(self.run_s, 4),
            "turns": self.turns,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "order_seed": self.order_seed,
            "attempt": self.attempt,
            "labels": dict(self.labels),
            "verdict": self.verdict,
            "detail": self.detail,
            "reasons": {name: list(c.reasons) for name, c in grade.candidates.items()} if grade else {},
            "evidence": {name: [c.text for c in c_.evidence] for name, c_ in grade.candidates.items()} if grade else {},
            "hacks": {name: [c.text for c in found] for name, found in grade.hacks.items()} if grade else {},
            "dropped_citations": grade.dropped_citations if grade else 0,
            "checks": [
                {"number": c.number, "candidate": c.candidate, "command": c.command, "exit_code": c.exit_code}
                for c in self.checks
            ],
            "cost_usd": self.cost_usd,
        }


class Grader(Protocol):
    """What the scheduler asks for grades."""

    async def grade(self, request: GradeRequest, *transcripts: Transcript) -> GradeReply:
        """Grade one group. Never raises for faults of the model, the endpoint or the verdict."""
        ...


def lost_reply(request: GradeRequest, detail: str, *, run_s: float) -> GradeReply:
    """The driver's stand-in for the answer of a grader that died or hung: a fallback (M1.10)."""
    return GradeReply(
        group_id=request.group_id,
        attempt=request.attempt,
        base_state=request.base_state,
        policy_versions={t.trajectory_id: t.policy_versions for t in request.trajectories},
        order_seed=request.order_seed,
        grade=None,
        fallback_reason=FallbackReason.WORKER_LOST,
        detail=scrub(detail),
        model="",
        queue_s=0.0,
        run_s=run_s,
        turns=0,
        prompt_tokens=0,
        completion_tokens=0,
        verdict=None,
        labels={},
    )


def accept(request: GradeRequest, reply: GradeReply) -> GradeReply:
    """The driver's check of a reply against what it sent (M2.6); a reply to something else becomes a `mismatch`."""
    problem = _mismatch(request, reply)
    if problem is None:
        return reply
    return replace(reply, grade=None, fallback_reason=FallbackReason.MISMATCH, detail=problem)


def _mismatch(request: GradeRequest, reply: GradeReply) -> str | None:
    if reply.group_id != request.group_id or reply.attempt != request.attempt:
        return f"asked for {request.group_id}#{request.attempt}, answered {reply.group_id}#{reply.attempt}"
    if reply.grade is None:
        return None if reply.fallback_reason is not None else "neither a grade nor a reason"
    if reply.fallback_reason is not None:
        return "both a grade and a reason for having none"
    if reply.base_state != request.base_state:
        return "another repository state was graded"
    if reply.order_seed != request.order_seed:
        return "another candidate order was used"
    sent = {t.trajectory_id: t.policy_versions for t in request.trajectories}
    if dict(reply.policy_versions) != sent:
        return "trajectory ids or policy versions differ from those sent"
    passing = {t.trajectory_id for t in request.trajectories if t.passed}
    graded = set(reply.grade.candidates)
    if graded & set(reply.grade.hacks) or graded | set(reply.grade.hacks) != passing:
        return "the grade does not cover exactly the passing trajectories"
    return None
