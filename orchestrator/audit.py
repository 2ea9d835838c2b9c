"""`groups.jsonl`: one line a group, written when it ends in any way, from which an outsider recomputes every advantage.

The format is orchestrator/groups.schema.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.schema import AdvantageMode
from grader.worker import GradeReply
from infra.errors import StorageError
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
) -> dict[str, Any]:
    """One line of groups.jsonl. `step` is the optimiser step (1-based) that trained on the group, else None."""
    return {
        "group_id": group.group_id,
        "task_id": group.task.task_id,
        "source": group.task.source,
        "step": step,
        "mode": credit.mode.value,
        "outcome": outcome.value,
        "graded": credit.graded,
        "fallback_reason": credit.fallback_reason,
        "lambda": credit.lam,
        "lambda_max": lambda_max if credit.mode is AdvantageMode.REDISTRIBUTE else None,
        "capped": credit.capped,
        "grader": reply.audit() if reply else None,
        "ready_latency_s": round(group.completed_s - group.admitted_s, 3),
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
        "verify_s": round(t.verify_s, 4),
        "wall_s": round(t.wall_s, 4),
        "error": t.error,
    }


class AuditLog:
    """Appends to groups.jsonl; every line reaches the disk before `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as e:
            raise StorageError(f"{path}: cannot be written ({e}); free space or choose another `output`") from e

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line.

        Raises:
            StorageError: the disk is full or the folder unwritable.
        """
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            raise StorageError(f"{self.path}: cannot be written ({e}); free space and resume the run") from e

    def close(self) -> None:
        self._file.close()
