"""Tasks whose evaluation is broken: they leave the run (M1.3, second sentence).

A verifier that cannot run, or a workspace that cannot be set up, is either the task's fault or an outage. It is the
task's if it happens `scheduler.quarantine_after` times, over all slots and attempts, while not one trajectory of the
task could be evaluated, and other tasks of the source went well before, meanwhile and after. In an outage those fail
too, and then nothing is quarantined: the run pauses instead (masking.py). Tasks are counted, not attempts: one broken
task with its many retries must not make another one beside it look like an outage.

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
_AROUND = 4
"""Other tasks of the source that are looked at before the first failure of one, and after its last: with fewer on
either side the last tasks of an outage would look broken as soon as all is well again."""
_WELL = 3
"""Other tasks that must have been evaluated since its first failure."""
_BAD_SHARE = 0.25
"""Of the others that are looked at, no larger share may have failed."""


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
    before: Mapping[str, bool]
    """Of the others, those evaluated last before its first failure: task -> whether that failed."""
    others: dict[str, bool] = field(default_factory=dict)
    """Those evaluated since: task -> whether all their evaluations failed."""
    later: set[str] = field(default_factory=set)
    """Those evaluated since its last failure."""
    complete: bool = False
    """Its group has ended: no more failures come."""


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
        self._recent: dict[str, dict[str, bool]] = {}
        """Source -> its tasks that were evaluated last, the newest last -> whether that failed."""

    def __contains__(self, task_id: str) -> bool:
        """Whether the task is out: it is not sampled any more, and its groups are not trained on."""
        return task_id in self._out

    def __len__(self) -> int:
        """Tasks that are out."""
        return len(self._out)

    def repeats(self, trajectory: Trajectory) -> bool:
        """Whether this failure only says again what is known of its task, and nothing of the infrastructure. Asked
        after `attempt`."""
        if self._after is None or trajectory.status not in BROKEN:
            return False
        suspect = self._suspects.get(trajectory.task_id)
        return trajectory.task_id in self._out or (suspect is not None and suspect.failures > self._after)

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
                group_id=rolling.group_id,
                source=trajectory.source,
                index=rolling.index,
                first_s=now_s,
                before={n: failed for n, failed in self._recent[trajectory.source].items() if n != task_id},
            )
        error = (trajectory.error or "no message")[-_ERROR_CHARS:]
        suspect.failures += 1
        suspect.status, suspect.last_s = trajectory.status, now_s
        suspect.later.clear()
        if error not in suspect.errors:
            suspect.errors = [*suspect.errors, error][-_KEPT_ERRORS:]

    def _tell_others(self, task_id: str, source: str, *, failed: bool) -> None:
        """One more evaluation beside the suspects of a source; those of which nothing more is learned go."""
        for name, s in list(self._suspects.items()):
            if s.source != source or name == task_id:
                continue
            if len(s.later) < _AROUND or task_id in s.later:
                s.later.add(task_id)
                s.others[task_id] = failed and s.others.get(task_id, True)
            elif s.complete:
                del self._suspects[name]
        recent = self._recent.setdefault(source, {})
        recent.pop(task_id, None)
        recent[task_id] = failed
        while len(recent) > _AROUND + 1:  # the task itself, and those before it
            del recent[next(iter(recent))]

    def _broken(self, s: _Suspect) -> bool:
        """It failed often enough, and others around it went well."""
        assert self._after is not None
        around = {**s.before, **s.others}
        well = len(s.others) - sum(s.others.values())
        return s.failures >= self._after and well >= _WELL and sum(around.values()) <= _BAD_SHARE * len(around)

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
