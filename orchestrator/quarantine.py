"""Tasks whose evaluation is broken: they leave the run (M1.3, second sentence).

A verifier that cannot run, or a workspace that cannot be set up, is either the task's fault or an outage. It is the
task's if it happens `scheduler.quarantine_after` times, over all slots and attempts, while not one trajectory of the
task could be evaluated and evaluations of other tasks of the source went well. In an outage those fail too, and then
nothing is quarantined: the run pauses instead (masking.py).

`quarantine.jsonl` is the one memory of it: a resume reads it back, and no checkpoint cuts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infra.sinks import JsonlFile
from infra.unseen import one_line
from orchestrator.alarms import Alarm
from orchestrator.ledger import RollingGroup
from rollout.trajectory import Status, Trajectory

BROKEN = frozenset({Status.INFRA_VERIFIER, Status.INFRA_SETUP})
"""Classes of a task that cannot be evaluated."""
_KEPT_ERRORS = 5
_ERROR_CHARS = 500
_LATER = 16
"""Evaluations of other tasks that count after the last failure of one. Later ones say nothing of its time: what broke
in an outage must not look like the task's own fault when all is well again."""
_WELL = 0.25
"""Other tasks are evaluated well if no larger share of their evaluations fails than this."""


@dataclass(slots=True, kw_only=True)
class _Suspect:
    """A task that could not be evaluated so far."""

    group_id: str
    source: str
    index: int
    first_s: float
    failures: int = 0
    status: Status = Status.INFRA_VERIFIER
    """Of the last failure."""
    last_s: float = 0.0
    errors: list[str] = field(default_factory=list)
    """The last ones that differ."""
    well: int = 0
    """Evaluations of other tasks of the source between its first failure and its last."""
    bad: int = 0
    """Those of them that failed."""
    later_well: int = 0
    """The first ones since its last failure."""
    later_bad: int = 0
    complete: bool = False
    """Its group has ended: no more failures come."""

    @property
    def known(self) -> bool:
        """Whether enough others have ended since its last failure."""
        return self.later_well + self.later_bad >= _LATER


class Quarantine:
    """Which tasks are out, and which are suspected."""

    def __init__(
        self, after: int | None, *, file: JsonlFile | None = None, past: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """`after`: failures that put a task out; None: none is put out any more. `file`: quarantine.jsonl; `past`: its
        lines so far."""
        self._after = after
        self._file = file
        self._out = {str(line["task_id"]) for line in past}
        self._suspects: dict[str, _Suspect] = {}

    def __contains__(self, task_id: str) -> bool:
        """Whether the task is out: it is not sampled any more, and its groups are not trained on."""
        return task_id in self._out

    def __len__(self) -> int:
        """Tasks that are out."""
        return len(self._out)

    def complete(self, task_id: str) -> bool:
        """All trajectories of the task's group have ended; returns whether the task is out."""
        if task_id in self._suspects:
            self._suspects[task_id].complete = True
        return task_id in self._out

    def attempt(self, rolling: RollingGroup, trajectory: Trajectory, *, now_s: float, step: int) -> dict[str, Alarm]:
        """An attempt at a task of the group ended, at `now_s` (Unix). Returns the tasks that this puts out,
        and an alarm for each.

        Raises:
            StorageError: quarantine.jsonl cannot be written.
        """
        task_id, failed = trajectory.task_id, trajectory.status in BROKEN
        if self._after is None or task_id in self._out or (trajectory.status.masked and not failed):
            return {}  # a lost sandbox, engine or worker says nothing of any task's evaluation
        self._tell_others(task_id, trajectory.source, failed=failed)
        if not failed:
            self._suspects.pop(task_id, None)
        elif not any(not m.trajectory.status.masked for m in rolling.members.values()):
            self._suspect(rolling, trajectory, now_s)
        broken = [(name, s) for name, s in self._suspects.items() if s.source == trajectory.source and self._broken(s)]
        return {name: self._put_out(name, suspect, step) for name, suspect in broken}

    def _suspect(self, rolling: RollingGroup, trajectory: Trajectory, now_s: float) -> None:
        task_id = trajectory.task_id
        suspect = self._suspects.get(task_id)
        if suspect is None:
            suspect = self._suspects[task_id] = _Suspect(
                group_id=rolling.group_id, source=trajectory.source, index=rolling.index, first_s=now_s
            )
        error = (trajectory.error or "no message")[-_ERROR_CHARS:]
        suspect.failures += 1
        suspect.status, suspect.last_s = trajectory.status, now_s
        suspect.well, suspect.bad = suspect.well + suspect.later_well, suspect.bad + suspect.later_bad
        suspect.later_well = suspect.later_bad = 0
        if error not in suspect.errors:
            suspect.errors = [*suspect.errors, error][-_KEPT_ERRORS:]

    def _tell_others(self, task_id: str, source: str, *, failed: bool) -> None:
        """One more evaluation beside the suspects of a source; those of which nothing more is learned go."""
        for name, s in list(self._suspects.items()):
            if s.source != source or name == task_id:
                continue
            if not s.known:
                s.later_well += not failed
                s.later_bad += failed
            elif s.complete:
                del self._suspects[name]

    def _broken(self, s: _Suspect) -> bool:
        """Its every evaluation failed, and at least as many of other tasks went well, of which few failed."""
        assert self._after is not None
        well, bad = s.well + s.later_well, s.bad + s.later_bad
        return s.failures >= self._after and well >= self._after and bad <= _WELL * (well + bad)

    def _put_out(self, task_id: str, s: _Suspect, step: int) -> Alarm:
        del self._suspects[task_id]
        self._out.add(task_id)
        kind = s.status.value.removeprefix("infra_")
        if self._file is not None:
            self._file.append(
                {
                    "task_id": task_id,
                    "source": s.source,
                    "index": s.index,
                    "group_id": s.group_id,
                    "class": kind,
                    "failures": s.failures,
                    "errors": s.errors,
                    "first_s": s.first_s,
                    "last_s": s.last_s,
                    "step": step,
                }
            )
        return Alarm(
            name=f"quarantine/{task_id}",
            on=True,
            text=(
                f"{s.failures} evaluations of {task_id} failed ({kind}), while those of other tasks of {s.source} go "
                f"well; it is not sampled any more in this run (quarantine.jsonl). The last: {one_line(s.errors[-1])}"
            ),
        )
