"""Held-out evaluation through the run's own rollout pool: avg@samples, the mean over samples and tasks (not pass@k)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from configs.schema import EvalConfig, RunConfig
from envs.source import make_source
from envs.task import Split, TaskSource
from infra.pool import ActorLost, ActorPool, ActorTimeout
from orchestrator.build import ray_session, rollout_pool, run_loop
from orchestrator.progress import Progress
from rollout.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """One evaluation. Trajectories lost to infrastructure are left out of every mean and counted as masked."""

    label: str
    """before, after, or a free label of `gagar eval`."""
    step: int
    """Optimiser steps behind the evaluated weights."""
    source: str
    tasks: int
    samples: int
    pass_rate: float | None
    """Mean over all valid trajectories, 0..1; None if all were masked."""
    masked: int
    first_error: str | None
    """What the first masked trajectory lost."""
    turns_mean: float | None
    response_tokens_mean: float | None
    pass_rate_by: Mapping[str, float] = field(default_factory=dict)
    """Pass rate by the task's `bug` label, where tasks carry one."""

    def record(self) -> dict[str, object]:
        """A line of eval.jsonl."""
        return asdict(self)


async def evaluate(
    *,
    label: str,
    step: int,
    config: EvalConfig,
    source: TaskSource,
    rollout: ActorPool,
    wall_s: float,
    on_done: Callable[[], None] = lambda: None,
) -> EvalResult:
    """Sample `config.samples` trajectories for each of `config.tasks` held-out tasks at the training temperature.

    The same tasks are used at every call. `wall_s` is the per-trajectory backstop; `on_done` is called after each one.
    """
    tasks = [source.task(Split.HELDOUT, config.seed + i) for i in range(config.tasks)]

    errors: list[str] = []

    async def one(i: int, sample: int) -> Trajectory | None:
        group_id = f"eval-{label}-{i:05d}"
        try:
            trajectory, _ = await rollout.call(
                "rollout", tasks[i], f"{group_id}/{sample}.0", group_id, num_returns=3, timeout_s=2 * wall_s
            )
        except (ActorLost, ActorTimeout) as e:
            errors.append(str(e))
            return None
        finally:
            on_done()
        if trajectory.status.masked:
            errors.append(f"{trajectory.status}: {trajectory.error}")
            return None
        return cast(Trajectory, trajectory)

    indices = [(i, sample) for i in range(config.tasks) for sample in range(config.samples)]
    ended = await asyncio.gather(*(one(i, sample) for i, sample in indices))
    valid = [(tasks[i], t) for (i, _), t in zip(indices, ended, strict=True) if t is not None]
    by_label: dict[str, list[float]] = defaultdict(list)
    for task, t in valid:
        if "bug" in task.meta:
            by_label[task.meta["bug"]].append(float(bool(t.passed)))
    return EvalResult(
        label=label,
        step=step,
        source=config.source,
        tasks=config.tasks,
        samples=config.samples,
        pass_rate=_mean([float(bool(t.passed)) for _, t in valid]),
        masked=len(ended) - len(valid),
        first_error=errors[0] if errors else None,
        turns_mean=_mean([float(t.turns) for _, t in valid]),
        response_tokens_mean=_mean([float(t.response_tokens) for _, t in valid]),
        pass_rate_by={name: sum(v) / len(v) for name, v in sorted(by_label.items())},
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


async def run_evaluation(
    config: RunConfig,
    settings: EvalConfig,
    label: str,
    step: int,
    rollout: ActorPool,
    progress: Progress,
    moved: Callable[[], None] = lambda: None,
) -> EvalResult:
    """One evaluation, told as it goes; `moved` is called whenever a trajectory has ended."""
    total = settings.tasks * settings.samples
    done = 0

    def on_done() -> None:
        nonlocal done
        done += 1
        moved()
        if done % max(total // 4, 1) == 0:
            progress.event(f"evaluation {label}: {done}/{total} trajectories")

    result = await evaluate(
        label=label,
        step=step,
        config=settings,
        source=make_source(settings.source, config.sources[settings.source]),
        rollout=rollout,
        wall_s=config.rollout.limits.wall_s,
        on_done=on_done,
    )
    rate = "all masked" if result.pass_rate is None else f"{result.pass_rate:.1%}"
    progress.event(
        f"held-out {settings.source} pass rate {label}: {rate} (avg@{settings.samples}, {settings.tasks} tasks)"
    )
    if result.masked:
        progress.event(
            f"{result.masked} of {total} trajectories were lost and left out; the first: {result.first_error}"
        )
    return result


def run_eval(config: RunConfig, checkpoint: Path | None) -> int:
    """Evaluate the configuration's policy on held-out tasks, or that of a run's checkpoint or of an HF folder; prints
    the result."""
    settings = config.eval or EvalConfig()
    if checkpoint is not None:
        policy = checkpoint / "policy"
        engine = config.engine.model_copy(update={"model": str(policy if policy.is_dir() else checkpoint)})
        config = config.model_copy(update={"engine": engine})
    progress = Progress(0, config.telemetry.progress_every_s)

    async def go() -> EvalResult:
        async with rollout_pool(config, progress) as (_, ready):
            rollout = await ready()
            return await run_evaluation(config, settings, "eval", 0, rollout, progress)

    try:
        with ray_session(config):
            result = run_loop(go())
    finally:
        progress.close()
    for name, rate in result.pass_rate_by.items():
        progress.console.print(f"  {name:24} {rate:6.1%}")
    return 0
