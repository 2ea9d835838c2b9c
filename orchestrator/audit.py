"""`groups.jsonl`: one line a group, written when it ends in any way, from which an outsider recomputes every advantage.

The format is orchestrator/groups.schema.json.
"""

from __future__ import annotations

from typing import Any

from configs.schema import AdvantageMode
from grader.exchange import GradeReply
from orchestrator.credit import Credit, GroupOutcome, Row
from orchestrator.ledger import CompleteGroup, Member


def audit_record(
    group: CompleteGroup,
    credit: Credit,
    *,
    outcome: GroupOutcome,
    step: int | None,
    lambda_max: float,
    reply: GradeReply | None,
    ready_s: float | None,
    error: str | None = None,
) -> dict[str, Any]:
    """One line of groups.jsonl. `step` is the optimiser step (1-based) that trained on the group, else None.

    `ready_s`: when the group got its advantages, on the clock of its other times; None if it never did. `error`: why a
    group failed that could have been trained on.
    """
    return {
        "group_id": group.group_id,
        "task_id": group.task.task_id,
        "source": group.task.source,
        "step": step,
        "mode": credit.mode.value,
        "outcome": outcome.value,
        "error": error,
        "graded": credit.graded,
        "fallback_reason": credit.fallback_reason,
        "lambda": credit.lam,
        "lambda_max": lambda_max if credit.mode is AdvantageMode.REDISTRIBUTE else None,
        "capped": credit.capped,
        "grader": reply.audit() if reply else None,
        "rollout_s": round(group.completed_s - group.admitted_s, 3),
        "ready_latency_s": round(ready_s - group.completed_s, 3) if ready_s is not None else None,
        "trajectories": [_trajectory(m, credit.rows.get(m.trajectory.trajectory_id)) for m in group.members],
    }


def _trajectory(member: Member, row: Row | None) -> dict[str, Any]:
    t = member.trajectory
    valid = not t.status.masked
    return {
        "id": t.trajectory_id,
        "status": t.status.value,
        "valid": valid,
        "passed": row.passed if row else t.passed,
        "outcome_reward": t.reward,
        "reward": row.reward if row else t.reward,
        "hack": row.hack if row else False,
        "tier": row.tier if row else None,
        "scores": dict(row.scores) if row and row.scores else None,
        "flags": dict(row.flags) if row and row.flags else None,
        "tie": row.tie if row else None,
        "factor": row.factor if row else None,
        "advantage": row.advantage if row else None,
        "turns": t.turns,
        "response_tokens": t.response_tokens,
        "policy_versions": list(t.policy_versions),
        "payload_sha256": t.payload_sha256,
        "engine_s": round(t.engine_s, 4),
        "sandbox_s": round(t.sandbox_s, 4),
        "sandbox_start_s": round(t.sandbox_start_s, 4),
        "verify_s": round(t.verify_s, 4),
        "wall_s": round(t.wall_s, 4),
        "worker": t.worker,
        "error": t.error,
        "tampered": list(t.tampered),
        "contexts": t.contexts,
        "drift": t.drift,
        "notes": list(t.notes),
    }
