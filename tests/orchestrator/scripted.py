"""Scripted parts for tests of the scheduler: pools, learner and logs that need no process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from envs.task import ExactAnswer, Split, Task, TaskKind
from grader.exchange import GradeReply, GradeRequest
from learner.group import BatchItem
from rollout.trajectory import Status, Trajectory


def run_config(**changes: Any) -> RunConfig:
    """A small valid configuration; sections are replaced by keyword."""
    base: dict[str, Any] = {
        "name": "scripted",
        "steps": 3,
        "sources": {
            "code": {"type": "minirepo", "groups_per_step": 2},
            "sums": {"type": "arith", "groups_per_step": 1},
        },
        "algorithm": {"group_size": 4},
        "engine": {"model": "unused"},
        "learner": {"model": "unused"},
        "grader": {"backend": {"type": "vllm", "engine": {"model": "unused"}}, "timeout_s": 5.0},
    }
    return RunConfig.model_validate({**base, **changes})


class ScriptedSource:
    """Tasks that hold nothing but their ids."""

    def __init__(self, name: str, kind: TaskKind) -> None:
        self.name = name
        self.kind = kind

    def task(self, split: Split, index: int) -> Task:
        return Task(
            task_id=f"{self.name}/{split.value}/0/{index}",
            source=self.name,
            kind=self.kind,
            split=split,
            statement="",
            files={},
            verifier=ExactAnswer(answer=""),
        )


def trajectory(
    trajectory_id: str,
    *,
    task: Task,
    passed: bool | None = True,
    status: Status = Status.SUBMITTED,
    versions: tuple[int, ...] = (0,),
    response_tokens: int = 10,
    turns: int = 2,
    total_tokens: int = 30,
) -> Trajectory:
    masked = status.masked
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=trajectory_id.split("/")[0],
        task_id=task.task_id,
        source=task.source,
        status=status,
        reward=None if masked else float(bool(passed)),
        passed=None if masked else passed,
        turns=turns,
        prompt_tokens=20,
        response_tokens=response_tokens,
        total_tokens=total_tokens,
        policy_versions=() if masked else versions,
        payload_sha256=None if masked else "0" * 64,
        engine_s=0.0,
        sandbox_s=0.0,
        verify_s=0.0,
        wall_s=0.0,
    )


Rollout = Callable[[Task, str, str], Trajectory]


class ScriptedPool:
    """Stands for ActorPool: runs `handler` in process after `delay_s`."""

    def __init__(self, handler: Callable[..., Any], *, slots: int = 4, delay_s: float = 0.0) -> None:
        self.handler = handler
        self.slots = slots
        self.delay_s = delay_s
        self.busy = 0
        self.calls: list[tuple[Any, ...]] = []

    def occupancy(self) -> tuple[int, int]:
        return self.busy, self.slots

    async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
        self.calls.append((method, *args))
        self.busy += 1
        try:
            await asyncio.sleep(self.delay_s)
            value = self.handler(*args)
        finally:
            self.busy -= 1
        if num_returns == 1:
            return value
        return value, [f"payload:{args[1]}", f"transcript:{args[1]}"]


class ScriptedLearner:
    """Remembers what it was given; publishes by setting a version."""

    def __init__(self) -> None:
        self.batches: list[list[BatchItem]] = []
        self.published: list[int] = []

    async def train_step(self, items: list[BatchItem]) -> dict[str, float]:
        await asyncio.sleep(0)
        self.batches.append(list(items))
        return {"loss": 0.0}

    async def publish(self, engines: Any, version: int) -> float:
        self.published.append(version)
        return 0.0

    async def save(self, path: Path) -> None:
        path.mkdir()
        (path / "steps").write_text(str(len(self.batches)))

    async def export_hf(self, path: Path) -> None:
        path.mkdir()


class ScriptedTelemetry:
    """Keeps spans in a list."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float, dict[str, Any]]] = []

    def record_span(self, name: str, start_s: float, end_s: float, **attrs: Any) -> None:
        self.spans.append((name, start_s, end_s, attrs))

    @contextmanager
    def span(self, name: str, **attrs: Any) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self.record_span(name, start_s, time.monotonic(), **attrs)


GradeHandler = Callable[[GradeRequest], GradeReply]
