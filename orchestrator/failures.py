"""What the scheduler makes of failures of the infrastructure: a pause when too many are lost, the end of a broken task.

Told of every attempt at a trajectory; decides nothing about one trajectory, which is sampled again or masked by its
stage (rollout_stage.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from configs.schema import SchedulerConfig
from orchestrator.alarms import Alarm
from orchestrator.clock import Clock
from orchestrator.ledger import RollingGroup
from orchestrator.masking import MASKED, MaskWatch
from orchestrator.pause import Pauses
from orchestrator.quarantine import Quarantine
from rollout.trajectory import Trajectory


class Failures:
    """One for each run."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        sources: Collection[str],
        quarantine: Quarantine | None,
        pauses: Pauses,
        clock: Clock,
        step: Callable[[], int],
        on_alarm: Callable[[Alarm], None],
    ) -> None:
        """`quarantine` None: a new one, that no file remembers. `step`: optimiser steps done."""
        self._quarantine = quarantine if quarantine is not None else Quarantine(config.quarantine_after)
        self._watch = MaskWatch(sources, above=config.pause_masked_above, window=config.pause_masked_window)
        self._pauses = pauses
        self._clock = clock
        self._step = step
        self._on_alarm = on_alarm

    def attempt(self, rolling: RollingGroup, trajectory: Trajectory) -> list[str]:
        """An attempt ended, whatever comes of it. Returns the tasks that it puts into quarantine.

        Raises:
            StorageError: quarantine.jsonl cannot be written.
        """
        out = self._quarantine.attempt(rolling, trajectory, now_s=self._clock.unix(), step=self._step())
        # A broken task and its retries must not look like an outage; in a real one other tasks fail as well.
        changes = [] if self.repeats(trajectory) else self._watch.attempt(trajectory)
        if changes:
            message = self._watch.message
            self._pauses.clear(MASKED) if message is None else self._pauses.set(MASKED, message)
        for alarm in (*changes, *out.values()):
            self._on_alarm(alarm)
        return list(out)

    def repeats(self, trajectory: Trajectory) -> bool:
        """Whether this failure only says again what is known of its task. Asked after `attempt`."""
        return self._quarantine.repeats(trajectory)

    def quarantined(self, task_id: str) -> bool:
        """Whether the task is sampled no more, and its group not trained on."""
        return task_id in self._quarantine

    def complete(self, task_id: str) -> bool:
        """The task's group is complete; returns whether the task is in quarantine."""
        return self._quarantine.complete(task_id)

    @property
    def probed(self) -> frozenset[str]:
        """Sources that only probes are to be sampled of, until they come through again."""
        return self._watch.probed

    @property
    def alarms(self) -> tuple[str, ...]:
        """Names of the alarms that are on."""
        return self._watch.alarms

    def still_since_s(self, moved_s: float) -> float:
        """When the run came to a stand, given when anything last moved: what probes do under a pause is no progress."""
        since_s = self._pauses.since_s(MASKED)
        return moved_s if since_s is None else min(moved_s, since_s)

    def scalars(self) -> dict[str, float]:
        """Metrics `infra/...` that look back beyond the step."""
        return {**dict(self._watch.scalars()), "infra/quarantined_tasks": float(len(self._quarantine))}
