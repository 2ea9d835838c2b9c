"""Turns what the scheduler does into metrics, progress, stall messages and the status file."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from configs.schema import RunConfig
from infra.errors import StorageError
from infra.pool import ActorPool
from infra.spans import QUEUE, Span
from infra.telemetry import Telemetry
from learner.group import StepStats
from orchestrator.alarms import Alarm
from orchestrator.ledger import Stage
from orchestrator.loop import Scheduler, StepRecord
from orchestrator.metrics import StepFacts, pool_units, step_metrics
from orchestrator.progress import Activity, PoolLoad, Progress, ProgressSnapshot, SourceLoad
from orchestrator.runfiles import STATUS
from orchestrator.status import State, write_status

REMIND_S = 30.0
"""Between two messages that say why the run holds still."""


class RunObserver:
    """The observer of a real run."""

    def __init__(self, config: RunConfig, run_dir: Path, telemetry: Telemetry, progress: Progress) -> None:
        self._config = config
        self._run_dir = run_dir
        self._telemetry = telemetry
        self._progress = progress
        self._trained = Counter[str]()
        self._skipped = Counter[str]()
        self._rewards: dict[str, float] = {}
        self._cap_rate: float | None = None
        self._slots: dict[str, int] = {}
        """At the end of the last step."""
        self.still: Callable[[float], None] = lambda _: None
        """Told every second for how long nothing has moved."""
        self.figures: Callable[[], Mapping[str, float]] = dict
        """More metrics of the step that ends, by name."""
        self.after_step: Callable[[int], None] = lambda _: None
        """Told when a step is done and its weights are in the engines."""
        self._canaries = 0
        """Graded up to the last step."""
        self._reminded_s = time.monotonic()
        self.checkpoint: str | None = None
        """The last complete checkpoint, for the status file."""
        self._shown = ProgressSnapshot(
            step=0,
            total_steps=config.steps,
            activity="starting",
            activity_s=0.0,
            pools={},
            sources={},
            living=0,
            max_living=config.scheduler.max_inflight_groups,
            oldest_rollout_s=None,
            oldest_grading_s=None,
            cap_rate=None,
        )

    def state(self, state: State, *, activity: Activity | None = None, error: str | None = None) -> None:
        """Write the status file outside the training loop: starting, evaluating, finished, failed."""
        if activity is not None:
            self._shown = replace(self._shown, activity=activity)
        self._write(state, error=error)

    @property
    def shown(self) -> ProgressSnapshot:
        """Where the run stood when somebody looked last."""
        return self._shown

    def on_step(self, scheduler: Scheduler, record: StepRecord, stats: StepStats) -> None:
        """Log the step (metrics.jsonl, W&B) and say one line about it."""
        now_s = scheduler.clock.now()
        window = (record.started_s, now_s)
        metrics = step_metrics(
            StepFacts(
                records=record.records,
                retries=record.retries,
                stats=asdict(stats),
                window=window,
                spans=[*self._telemetry.take(window), *_queued(scheduler, now_s)],
                quotas=scheduler.mixer.quotas,
                supply=scheduler.supply_figures(),
                grader=self._grader(scheduler),
                pool_units=pool_units(self._config),
                slots=self._fewest_slots(scheduler),
            )
        )
        metrics.scalars.update(self.figures())
        if self._telemetry.storage is not None:
            metrics.scalars.update(self._telemetry.storage.scalars())
            metrics.scalars["storage/rollouts_unwritten"] = float(record.unwritten)
        self._telemetry.log_step(scheduler.step, metrics.scalars, metrics.histograms)
        for line in record.records:
            (self._trained if line["outcome"] == "trained" else self._skipped)[line["source"]] += 1
        for source in {line["source"] for line in record.records}:
            lines = [line for line in record.records if line["source"] == source]
            rewards = [t["outcome_reward"] for line in lines for t in line["trajectories"] if t["valid"]]
            if rewards:
                self._rewards[source] = fmean(rewards)
        self._cap_rate = metrics.scalars.get("redistribution/lambda_capped_rate")
        self._progress.event(_step_line(scheduler, now_s - record.started_s, metrics.scalars))
        self.after_step(scheduler.step)

    def on_tick(self, scheduler: Scheduler, still_s: float) -> None:
        """Show progress, and tell the watchdog when there is none."""
        self.still(still_s)
        shown = self._shown = self._snapshot(scheduler)
        self._progress.update(shown)
        self._write("running", idle_s=still_s)
        self._remind(shown.paused)

    def _write(self, state: State, *, idle_s: float = 0.0, error: str | None = None) -> None:
        """The status file; the next tick writes it again, so a disk that takes nothing costs no more than that."""
        storage = self._telemetry.storage
        try:
            write_status(
                self._run_dir, self._shown, state=state, idle_s=idle_s, checkpoint=self.checkpoint, error=error
            )
        except StorageError as e:
            if storage is None:
                raise
            storage.failed(self._run_dir / STATUS, e)
        else:
            if storage is not None:
                storage.recovered(self._run_dir / STATUS)

    def _remind(self, paused: Mapping[str, str]) -> None:
        """Say why the run holds still, again and again while it does."""
        now_s = time.monotonic()
        if not paused:
            self._reminded_s = now_s
        elif now_s - self._reminded_s >= REMIND_S:
            self._reminded_s = now_s
            for reason, message in paused.items():
                self._progress.event(f"PAUSED: {reason}: {message}")

    def _fewest_slots(self, scheduler: Scheduler) -> dict[str, int]:
        """Slots by pool; of one that grew or shrank in this step those it had all the time."""
        pools = {"rollout": scheduler.parts.rollout, "grader": scheduler.parts.grader}
        now = {name: pool.occupancy()[1] for name, pool in pools.items() if pool is not None}
        before, self._slots = self._slots, now
        return {name: min(slots, before.get(name, slots)) for name, slots in now.items()}

    def _grader(self, scheduler: Scheduler) -> dict[str, float]:
        """The graders' rolling figures, and the canaries of this step."""
        stage = scheduler.grading
        if stage is None:
            return {}
        scalars = stage.watch.scalars()
        if self._config.grader is not None and self._config.grader.canaries.share > 0.0:
            scalars["canary/graded"] = float(stage.canaries_graded - self._canaries)
            self._canaries = stage.canaries_graded
        return scalars

    def on_alarm(self, alarm: Alarm) -> None:
        """Say it once where it is seen: on the console and as a W&B alert."""
        title = f"ALARM {alarm.name}" if alarm.on else f"alarm {alarm.name} is over"
        self._progress.event(f"{title}: {alarm.text}")
        self._telemetry.alert(f"{self._config.name}: {title}", alarm.text)

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint is complete."""
        self.checkpoint = str(path)

    def _snapshot(self, scheduler: Scheduler) -> ProgressSnapshot:
        now_s = scheduler.clock.now()
        ledger = scheduler.ledger
        rollout, grader = scheduler.parts.rollout, scheduler.parts.grader
        pools = {name: load(pool) for name, pool in (("rollout", rollout), ("grader", grader)) if pool is not None}
        ages = {stage: ledger.oldest_s(stage) for stage in Stage}
        oldest = {stage: None if t is None else now_s - t for stage, t in ages.items()}
        return ProgressSnapshot(
            step=scheduler.step,
            total_steps=self._config.steps,
            activity=scheduler.activity[0],
            activity_s=now_s - scheduler.activity[1],
            pools=pools,
            sources={
                name: SourceLoad(
                    quota=s.quota,
                    rolling=ledger.count(Stage.ROLLING, name),
                    grading=ledger.count(Stage.GRADING, name),
                    ready=ledger.count(Stage.READY, name),
                    trained=self._trained[name],
                    skipped=self._skipped[name],
                    reward=self._rewards.get(name),
                )
                for name, s in scheduler.mixer.sources.items()
            },
            living=ledger.inflight,
            max_living=self._config.scheduler.max_inflight_groups,
            oldest_rollout_s=oldest[Stage.ROLLING],
            oldest_grading_s=oldest[Stage.GRADING],
            cap_rate=self._cap_rate,
            alarms=(
                *scheduler.failures.alarms,
                *scheduler.supply.alarms,
                *(scheduler.grading.alarms if scheduler.grading else ()),
            ),
            paused=scheduler.pauses.reasons(),
        )


def _queued(scheduler: Scheduler, now_s: float) -> list[Span]:
    """The waits for a grader that have not ended: no file has them yet."""
    waiting = scheduler.grading.waiting if scheduler.grading is not None else {}
    return [Span(name=QUEUE, start_s=since_s, end_s=now_s) for since_s in waiting.values()]


def load(pool: ActorPool) -> PoolLoad:
    """Occupancy of a pool."""
    busy, slots = pool.occupancy()
    return PoolLoad(busy=busy, slots=slots)


def _step_line(scheduler: Scheduler, step_s: float, scalars: dict[str, float]) -> str:
    parts = [f"step {scheduler.step}/{scheduler.config.steps} in {step_s:.0f} s"]
    for name in scheduler.mixer.sources:
        if (rate := scalars.get(f"pass_rate/{name}")) is not None:
            parts.append(f"{name} pass {rate:.0%}")
    for key, label in (
        ("grading/tier1_share", "T1"),
        ("redistribution/lambda_capped_rate", "cap"),
        ("grading/fallback_rate", "fallback"),
        ("canary/tier_agreement", "canary tiers"),
        ("overlap/share", "overlap"),
    ):
        if key in scalars:
            parts.append(f"{label} {scalars[key]:.0%}")
    if "learner/grad_norm" in scalars:
        parts.append(f"grad norm {scalars['learner/grad_norm']:.3f}")
    return ", ".join(parts)
