"""Held-out evaluation through the run's own rollout pool: avg@samples, the mean over samples and tasks (not pass@k)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import cast

from configs.schema import EvalConfig
from envs.task import Split, TaskSource
from infra.pool import ActorLost, ActorPool, ActorTimeout
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
