"""Scripted parts for tests of the scheduler: pools, learner and logs that need no process; a run made of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from configs.schema import GraderConfig, RunConfig
from envs.task import ExactAnswer, Split, Task, TaskKind
from grader.exchange import GradeReply, GradeRequest, lost_reply
from infra.members import PoolState
from infra.sinks import JsonlFile
from infra.storage import Storage
from learner.group import BatchItem
from orchestrator.alarms import Alarm
from orchestrator.archive import GroupArchive
from orchestrator.canaries import make_canaries
from orchestrator.checkpoint import Checkpoint, Checkpoints
from orchestrator.credit import GroupOutcome
from orchestrator.ledger import Ledger, LedgerLog, RollingGroup
from orchestrator.ledger_store import KeptGroup, indices
from orchestrator.loop import Parts, Scheduler
from orchestrator.mixer import Mixer
from orchestrator.quarantine import Quarantine
from rollout.trajectory import Status, Trajectory, Transcript


def grader_section(**changes: Any) -> dict[str, Any]:
    """The `grader` section that `run_config` takes."""
    return {"backend": {"type": "vllm", "engine": {"model": "unused"}}, "timeout_s": 5.0, **changes}


def grader_config(**changes: Any) -> GraderConfig:
    return GraderConfig.model_validate(grader_section(**changes))


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


PATCH_LINES = {"T1": 1, "T2": 4, "T3": 8}
"""Added lines for which `grader.scripted.judge_by_size` gives a tier."""


def transcript(trajectory_id: str, tier: str) -> Transcript:
    """What is graded as `tier` by ScriptedGrader."""
    count = PATCH_LINES[tier]
    lines = "".join(f"+line {i}\n" for i in range(count))
    patch = f"diff --git a/a.py b/a.py\nnew file mode 100644\n--- /dev/null\n+++ b/a.py\n@@ -0,0 +1,{count} @@\n{lines}"
    return Transcript(trajectory_id=trajectory_id, turns=(), patch=patch, test_log="")


class TranscriptPool(ScriptedPool):
    """A rollout pool whose transcripts can be read: slot 0 is T1, slot 2 is T3; the other way round in odd groups."""

    async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
        value, (payload, _) = await super().call(method, *args, num_returns=num_returns, timeout_s=timeout_s)
        return value, [payload, transcript(args[1], tier_of(args[1]))]


def tier_of(trajectory_id: str) -> str:
    """The tier of a trajectory from a TranscriptPool."""
    group_id, slot = trajectory_id.split("/")
    first = int(group_id.rpartition("-")[2]) % 2 == 0
    return "T1" if slot.startswith("0") is first else "T3"


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


async def at_once(work: Callable[..., Any], *args: Any) -> Any:
    """As asyncio.to_thread, in the loop: one with a virtual clock has no threads."""
    return work(*args)


class ScriptedEngines:
    """Stands for EnginePool."""

    live = 1

    def state(self) -> PoolState:
        return PoolState(target=self.live, live=self.live, starting=0, draining=0, busy=0, slots=0)


class MemoryLog:
    """A LedgerLog that outlives schedulers, not the test; `disk` holds finished rollouts by path."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.disk: dict[Path, Trajectory] = {}
        self.grades: Counter[str] = Counter()
        self.forgotten = 0
        self._ends = 0

    def admitted(self, group: RollingGroup) -> None:
        assert group.group_id not in self.rows
        self.rows[group.group_id] = {"group": group, "reply": None, "ended": None, "outcome": None}

    def graded(self, group_id: str, reply: GradeReply) -> None:
        self.grades[group_id] += self.rows[group_id]["reply"] is None
        self.rows[group_id]["reply"] = reply

    def ended(self, group_id: str, outcome: GroupOutcome) -> None:
        self._ends += 1
        self.rows[group_id].update(ended=self._ends, outcome=outcome)

    def mark(self) -> int:
        return self._ends

    async def flush(self) -> None:
        await asyncio.sleep(0)

    def forget(self, mark: int) -> None:
        self.forgotten = mark
        self.rows = {k: r for k, r in self.rows.items() if r["ended"] is None or r["ended"] > mark}

    def keep(self, trajectory: Trajectory) -> None:
        """As a rollout worker writes what it has finished."""
        group_id, slot = trajectory.trajectory_id.split("/")
        self.disk[Path(group_id) / f"{slot}.npz"] = trajectory

    def load(self, mark: int, oldest: int | None = None) -> list[KeptGroup]:
        """As LedgerStore.load."""
        self.forget(mark if oldest is None else oldest)
        self._ends = mark
        kept = []
        for row in self.rows.values():
            if row["ended"] is not None and row["ended"] <= mark:
                continue
            row.update(ended=None, outcome=None)
            g = row["group"]
            files = {int(p.stem.split(".")[0]): p for p in sorted(self.disk) if p.parent.name == g.group_id}
            kept.append(
                KeptGroup(
                    group_id=g.group_id,
                    source=g.task.source,
                    index=g.index,
                    size=g.size,
                    version=g.version,
                    reply=row["reply"],
                    rollouts=files,
                )
            )
        return kept


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


def even_slots_pass(task: Task, trajectory_id: str, group_id: str) -> Trajectory:
    slot = int(trajectory_id.split("/")[1].split(".")[0])
    return trajectory(trajectory_id, task=task, passed=slot % 2 == 0)


def fallback(request: GradeRequest, *transcripts: Any) -> GradeReply:
    assert len(transcripts) == len(request.trajectories)
    return lost_reply(request, "scripted", run_s=0.0)


class Run:
    """One scheduler with scripted parts."""

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        *,
        rollout: Any = even_slots_pass,
        grade: Any = fallback,
        rollout_delay_s: float = 0.0,
        grade_delay_s: float = 0.0,
        grade_slots: int = 2,
        pool: type[ScriptedPool] = ScriptedPool,
        grader_pool: type[ScriptedPool] = ScriptedPool,
        learner: ScriptedLearner | None = None,
        scheduler: type[Scheduler] = Scheduler,
        telemetry: Any = None,
        observer: Any = None,
        log: LedgerLog | None = None,
        archive: GroupArchive | None = None,
        kept: Sequence[KeptGroup] = (),
        taken: Sequence[KeptGroup] | None = None,
        checkpoint: Checkpoint | None = None,
        quarantine: Quarantine | None = None,
        keep: int = 1,
        storage: Storage | None = None,
    ) -> None:
        """With `grader.canaries` in the configuration, as build.py makes them. `observer` None: the run itself.
        `taken`: groups whose tasks count as done, if others than `kept`."""
        self.config = config
        self.rollout = pool(rollout, slots=8, delay_s=rollout_delay_s)
        self.grader = grader_pool(grade, slots=grade_slots, delay_s=grade_delay_s)
        self.learner = learner or ScriptedLearner()
        self.engines = ScriptedEngines()
        self.telemetry = telemetry or ScriptedTelemetry()
        self.ledger = Ledger(log)
        self.audit = JsonlFile(run_dir / "groups.jsonl", sync=False, storage=storage)
        self.steps: list[int] = []
        self.alarms: list[Alarm] = []
        self.retries: Counter[str] = Counter()
        parts = Parts(
            sources={
                "code": ScriptedSource("code", TaskKind.CODE),
                "sums": ScriptedSource("sums", TaskKind.SINGLE_TURN),
            },
            engines=cast(Any, self.engines),
            rollout=cast(Any, self.rollout),
            grader=cast(Any, self.grader),
            learner=cast(Any, self.learner),
            canaries=make_canaries(config, run_dir),
        )
        self.mixer = Mixer.of(config.sources, config.scheduler, group_size=config.algorithm.group_size)
        self.mixer.restore(checkpoint.state["mixer"] if checkpoint else {}, indices(kept if taken is None else taken))
        self.scheduler = scheduler(
            config=config,
            parts=parts,
            ledger=self.ledger,
            mixer=self.mixer,
            audit=self.audit,
            checkpoints=Checkpoints(run_dir, keep=keep, storage=storage, in_thread=at_once),
            telemetry=cast(Any, self.telemetry),
            observer=observer or self,
            start_step=checkpoint.step if checkpoint else 0,
            archive=archive,
            kept=kept,
            storage=storage,
            quarantine=quarantine,
        )

    def on_step(self, scheduler: Scheduler, record: Any, stats: Any) -> None:
        self.steps.append(scheduler.step)
        self.retries += record.retries

    def on_checkpoint(self, path: Path) -> None:
        pass

    def on_alarm(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)

    def on_tick(self, scheduler: Scheduler, still_s: float) -> None:
        pass

    def go(self) -> list[dict[str, Any]]:
        asyncio.run(asyncio.wait_for(self.scheduler.run(), timeout=30))
        return self.lines()

    def lines(self) -> list[dict[str, Any]]:
        """The audit trail so far."""
        return [json.loads(line) for line in self.audit.path.read_text().splitlines()]
