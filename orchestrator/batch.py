"""What a step's groups are to the learner. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from learner.group import BatchItem
from orchestrator.ledger import ReadyGroup
from rollout.spool import rollout_file


def batch_items(batch: Sequence[ReadyGroup], rollouts: Path | None) -> list[BatchItem]:
    """The valid trajectories of a batch. `rollouts`: folder of the finished rollouts, if they are kept."""
    return [
        BatchItem(
            trajectory_id=m.trajectory.trajectory_id,
            group_id=ready.group.group_id,
            advantage=ready.credit.rows[m.trajectory.trajectory_id].advantage,
            response_tokens=m.trajectory.response_tokens,
            total_tokens=m.trajectory.total_tokens,
            payload=m.payload,
            file=rollouts and rollout_file(rollouts, ready.group.group_id, m.trajectory.trajectory_id),
        )
        for ready in batch
        for m in ready.group.valid
    ]


def losses(batch: Sequence[ReadyGroup], reasons: Mapping[str, str]) -> Iterator[tuple[ReadyGroup, str | None]]:
    """Each group of a batch, with what was lost of it or None. `reasons`: trajectory id -> why it is gone."""
    for ready in batch:
        lost = [f"{t}: {reasons[t]}" for m in ready.group.valid if (t := m.trajectory.trajectory_id) in reasons]
        yield ready, "; ".join(lost) or None
