"""Pools and a learner that do nothing, at once: what is left of a run over them is the scheduler's own cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from configs.schema import RunConfig
from envs.task import Task, TaskKind
from grader.exchange import GradeReply, GradeRequest, lost_reply
from infra.sinks import JsonlFile
from infra.telemetry import Telemetry
from learner.group import BatchItem, StepStats
from orchestrator.alarms import Alarm
from orchestrator.checkpoint import Checkpoints
from orchestrator.ledger import Ledger, LedgerLog
from orchestrator.loop import Parts, Scheduler, StepRecord
from orchestrator.mixer import Mixer
from orchestrator.simulation.load import SimulatedSource
from rollout.trajectory import Status, Trajectory
from rollout.worker import lost_trajectory


def bench_config(*, steps: int, groups: int, size: int) -> RunConfig:
    """Three quarters of a step's groups are code, which is graded; the others are not."""
    model = {"model": "unused"}
    sources = {
        "code": {"type": "minirepo", "groups_per_step": groups - groups // 4},
        "sums": {"type": "arith", "groups_per_step": groups // 4},
    }
    return RunConfig.model_validate(
        {
            "name": "bench",
            "steps": steps,
            "sources": sources,
            "algorithm": {"group_size": size},
            "engine": model,
            "learner": model,
            "grader": {"backend": {"type": "vllm", "engine": model}},
            "scheduler": {"max_inflight_groups": 2 * groups},
            "checkpoint": {"every_steps": steps + 1},
        }
    )


class InstantPool:
    """Stands for ActorPool: a call ends in the next turn of the loop."""

    def __init__(self, slots: int, answer: Callable[..., Any]) -> None:
        self.slots = slots
        self.busy = 0
        self.calls = 0
        self._answer = answer

    def occupancy(self) -> tuple[int, int]:
        """See ActorPool."""
        return self.busy, self.slots

    async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
        """See ActorPool."""
        self.busy += 1
        self.calls += 1
        await asyncio.sleep(0)
        self.busy -= 1
        value = self._answer(*args)
        return (value, [None, None]) if num_returns > 1 else value


def half_pass(task: Task, trajectory_id: str, group_id: str, version: int = 0) -> Trajectory:
    """Even slots pass; policy `version` sampled every token."""
    passed = int(trajectory_id.partition("/")[2].partition(".")[0]) % 2 == 0
    return replace(
        lost_trajectory(task, trajectory_id, group_id, Status.INFRA_SANDBOX, "", 0.0),
        status=Status.SUBMITTED,
        reward=float(passed),
        passed=passed,
        response_tokens=100,
        total_tokens=300,
        policy_versions=(version,),
        error=None,
    )


def no_grade(request: GradeRequest, *transcripts: Any) -> GradeReply:
    """A fallback (M1.10): grades would cost the grader's time, not the scheduler's."""
    return lost_reply(request, "benchmark", run_s=0.0)


_STATS = StepStats(
    loss=0.0,
    grad_norm=1.0,
    lr=1e-4,
    skipped=False,
    entropy=1.0,
    ratio_mean=1.0,
    ratio_masked_share=0.0,
    logprob_gap_mean=None,
    logprob_gap_max=None,
    tokens=1,
    response_tokens=1,
    sequences=1,
    microbatches=1,
    row_fill=1.0,
    rank_balance=1.0,
    padded_factor=1.0,
    step_s=1.0,
)


class InstantLearner:
    """Stands for LearnerGroup."""

    def __init__(self) -> None:
        self.version = 0
        """Of the weights that sample."""

    async def train_step(self, items: list[BatchItem]) -> StepStats:
        """See LearnerGroup."""
        await asyncio.sleep(0)
        return _STATS

    async def publish(self, pool: Any, version: int) -> float:
        """See LearnerGroup."""
        self.version = version
        return 0.0

    async def save(self, folder: Path) -> None:
        """See LearnerGroup."""
        folder.mkdir()

    async def export_hf(self, folder: Path) -> None:
        """See LearnerGroup."""
        folder.mkdir()


class NoTelemetry:
    """Stands for Telemetry, to see what the scheduler costs without it."""

    def record_span(self, name: str, start_s: float, end_s: float, **attrs: Any) -> None:
        """See Telemetry."""

    @contextmanager
    def span(self, name: str, **attrs: Any) -> Iterator[None]:
        """See Telemetry."""
        yield


class Steps:
    """The observer: when each step was done, in seconds of CPU of this process, and how many trajectories ended."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []
        self.trajectories: list[int] = []

    def on_step(self, scheduler: Scheduler, record: StepRecord, stats: StepStats) -> None:
        """See Observer."""
        self.cpu_s.append(time.process_time())
        self.trajectories.append(sum(len(r["trajectories"]) for r in record.records))

    def on_checkpoint(self, path: Path) -> None:
        """See Observer."""

    def on_alarm(self, alarm: Alarm) -> None:
        """See Observer."""

    def on_tick(self, scheduler: Scheduler, still_s: float) -> None:
        """See Observer."""


def scheduler_of(
    config: RunConfig,
    folder: Path,
    observer: Steps,
    *,
    rollout: InstantPool,
    grader: InstantPool,
    learner: InstantLearner,
    telemetry: Telemetry | None = None,
    log: LedgerLog | None = None,
) -> Scheduler:
    """The production scheduler over these parts; its audit trail is written as in a run, but not synchronised.
    `telemetry` and `log`, what the ledger is written ahead to: None leaves out what they cost."""
    return Scheduler(
        config=config,
        parts=Parts(
            sources={
                "code": SimulatedSource("code", TaskKind.CODE),
                "sums": SimulatedSource("sums", TaskKind.SINGLE_TURN),
            },
            engines=cast(Any, None),
            rollout=cast(Any, rollout),
            grader=cast(Any, grader),
            learner=cast(Any, learner),
        ),
        ledger=Ledger(log),
        mixer=Mixer.of(config.sources, config.scheduler, group_size=config.algorithm.group_size),
        audit=JsonlFile(folder / "groups.jsonl", sync=False),
        checkpoints=Checkpoints(folder, keep=1),
        telemetry=telemetry or cast(Any, NoTelemetry()),
        observer=observer,
    )
