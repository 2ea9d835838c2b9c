"""The one way out for a group, however it ends."""

from __future__ import annotations

from typing import Any

from configs.schema import RunConfig
from grader.exchange import GradeReply
from infra.sinks import JsonlFile
from orchestrator.archive import GroupArchive
from orchestrator.audit import audit_record
from orchestrator.credit import Credit, GroupOutcome
from orchestrator.ledger import CompleteGroup, Ledger
from orchestrator.mixer import Mixer


class Exit:
    """Writes down what became of a group, tells the mixer, and lets its references go."""

    def __init__(
        self, *, config: RunConfig, ledger: Ledger, mixer: Mixer, audit: JsonlFile, archive: GroupArchive | None
    ) -> None:
        """`archive`: where graded groups are kept."""
        self._lambda_max = config.algorithm.lambda_max
        self._ledger = ledger
        self._mixer = mixer
        self._audit = audit
        self._archive = archive

    def end(
        self,
        group: CompleteGroup,
        given: Credit,
        outcome: GroupOutcome,
        reply: GradeReply | None,
        *,
        ready_s: float | None = None,
        step: int | None = None,
        error: str | None = None,
    ) -> dict[str, Any]:
        """Returns its line of groups.jsonl; the arguments are those of `audit_record`."""
        record = audit_record(
            group,
            given,
            outcome=outcome,
            step=step,
            lambda_max=self._lambda_max,
            reply=reply,
            ready_s=ready_s,
            error=error,
        )
        self._audit.append(record)
        if reply is not None and self._archive is not None:
            self._archive.add(group)
        self._ledger.end(group, outcome)
        source = group.task.source
        if outcome is GroupOutcome.TRAINED:
            self._mixer.trained(source)
        elif outcome is GroupOutcome.DROPPED_STALE:
            self._mixer.stale(source, ready=ready_s is not None)
        elif outcome is GroupOutcome.FAILED:
            self._mixer.lost(source)
        else:
            self._mixer.observe(source, accepted=False, time_s=group.effective_s)
        return record
