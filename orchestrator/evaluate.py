"""Held-out evaluation through a run's own rollout pool: the same tasks at every call, a few trajectories of each.

What passed is kept with its patch, so that graders and people can judge it later without sampling again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from configs.schema import EvalConfig, RunConfig
from envs.source import make_source
from envs.task import ExpertSource, Split, Task, TaskKind
from grader.stored import StoredGroup, write_archive
from infra.pool import ActorLost, ActorPool, ActorTimeout
from orchestrator.evaluation import Evaluation, Sample, TaskSamples, write_evaluation
from orchestrator.known_tiers import KnownTiers
from orchestrator.progress import Progress
from rollout.trajectory import Trajectory, Transcript


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation and, of tasks that a grader could be asked about, what was sampled."""

    evaluation: Evaluation
    groups: tuple[StoredGroup, ...]
    """One for each code task of which a trajectory passed."""


async def evaluate(
    *,
    label: str,
    step: int,
    config: EvalConfig,
    source: ExpertSource,
    rollout: ActorPool,
    wall_s: float,
    concurrency: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> Evaluated:
    """Sample `config.samples` trajectories for each of `config.tasks` held-out tasks at the training temperature.

    The same tasks are used at every call. Trajectories lost to infrastructure are left out of every figure and counted
    as masked (M1.3). `wall_s` is the per-trajectory backstop; `concurrency` how many trajectories run at once at most,
    None for as many as the pool takes; `on_done` is called after each one.
    """
    tasks = [source.task(Split.HELDOUT, config.seed + i) for i in range(config.tasks)]
    slots = asyncio.Semaphore(concurrency or config.tasks * config.samples)
    errors: list[str] = []

    async def one(i: int, sample: int) -> tuple[Trajectory, Transcript | None] | None:
        group_id = group_of(label, i)
        async with slots:
            try:
                trajectory, rest = await rollout.call(
                    "rollout", tasks[i], f"{group_id}/{sample}.0", group_id, num_returns=3, timeout_s=2 * wall_s
                )
            except (ActorLost, ActorTimeout) as e:
                errors.append(str(e))
                return None
            finally:
                on_done()
        if trajectory.status.masked:
            errors.append(f"{trajectory.status}: {trajectory.error}")
        wanted = trajectory.passed is not None and tasks[i].kind is TaskKind.CODE
        return trajectory, await _fetched(rest[1]) if wanted else None

    pairs = [(i, sample) for i in range(config.tasks) for sample in range(config.samples)]
    ended = await asyncio.gather(*(one(i, sample) for i, sample in pairs))
    by_task: list[list[tuple[Trajectory, Transcript | None] | None]] = [[] for _ in tasks]
    for (i, _), result in zip(pairs, ended, strict=True):
        by_task[i].append(result)
    groups = [g for i, task in enumerate(tasks) if (g := _group(group_of(label, i), task, by_task[i])) is not None]
    known = await asyncio.to_thread(_known_tiers, source, groups)
    evaluation = Evaluation(
        label=label,
        step=step,
        source=config.source,
        samples=config.samples,
        tasks=tuple(_samples(task, group_of(label, i), by_task[i], known) for i, task in enumerate(tasks)),
        first_error=errors[0] if errors else None,
    )
    return Evaluated(evaluation=evaluation, groups=tuple(groups))


def group_of(label: str, index: int) -> str:
    """Id of the group of one task."""
    return f"eval-{label}-{index:05d}"


async def _fetched(reference: object) -> Transcript | None:
    """A transcript, small; None if it was lost with its node: the trajectory still counts."""
    from ray.exceptions import RayError

    try:
        return cast(Transcript, await reference)  # type: ignore[misc]  # a Ray reference, which mypy does not see
    except RayError:
        return None


def _group(
    group_id: str, task: Task, ended: Sequence[tuple[Trajectory, Transcript | None] | None]
) -> StoredGroup | None:
    whole = [(t, transcript) for t, transcript in filter(None, ended) if transcript is not None]
    if task.kind is not TaskKind.CODE or not any(t.passed for t, _ in whole):
        return None
    return StoredGroup(
        group_id=group_id,
        task=task,
        trajectories=tuple(t for t, _ in whole),
        transcripts=tuple(transcript for _, transcript in whole),
    )


def _known_tiers(source: ExpertSource, groups: Sequence[StoredGroup]) -> dict[str, str]:
    """Trajectory id -> tier, of the passes whose tier the scripted solutions tell."""
    known: dict[str, str] = {}
    for group in groups:
        tiers = KnownTiers.of(source, group.task)
        patches = {t.trajectory_id: t.patch for t in group.transcripts}
        for t in group.trajectories:
            if t.passed and (tier := tiers(patches[t.trajectory_id])) is not None:
                known[t.trajectory_id] = tier.value
    return known


def _samples(
    task: Task, group_id: str, ended: Sequence[tuple[Trajectory, Transcript | None] | None], known: dict[str, str]
) -> TaskSamples:
    samples = []
    for slot, result in enumerate(ended):
        if result is None:
            lost = Sample(
                id=f"{group_id}/{slot}.0",
                status="infra_worker",
                passed=None,
                turns=0,
                response_tokens=0,
                policy_versions=(),
            )
            samples.append(lost)
            continue
        t = result[0]
        samples.append(
            Sample(
                id=t.trajectory_id,
                status=t.status.value,
                passed=None if t.status.masked else bool(t.passed),
                turns=t.turns,
                response_tokens=t.response_tokens,
                policy_versions=t.policy_versions,
                known=known.get(t.trajectory_id),
            )
        )
    return TaskSamples(task_id=task.task_id, samples=tuple(samples), bug=task.meta.get("bug"))


async def run_evaluation(
    config: RunConfig,
    settings: EvalConfig,
    label: str,
    step: int,
    rollout: ActorPool,
    progress: Progress,
    *,
    keep: Callable[[Evaluated], None] | None = None,
    model: str = "",
    concurrency: int | None = None,
    moved: Callable[[], None] = lambda: None,
) -> Evaluated:
    """One evaluation, told as it goes. `keep` is called with the result, in a thread; `moved` whenever a trajectory has
    ended."""
    total = settings.tasks * settings.samples
    done = 0

    def on_done() -> None:
        nonlocal done
        done += 1
        moved()
        if done % max(total // 4, 1) == 0:
            progress.event(f"evaluation {label}: {done}/{total} trajectories")

    found = await evaluate(
        label=label,
        step=step,
        config=settings,
        source=make_source(settings.source, config.sources[settings.source]),
        rollout=rollout,
        wall_s=config.rollout.limits.wall_s,
        concurrency=concurrency,
        on_done=on_done,
    )
    found = replace(found, evaluation=replace(found.evaluation, model=model))
    if keep is not None:
        await asyncio.to_thread(keep, found)
    record = found.evaluation.record()
    rate = "all masked" if record["pass_rate"] is None else f"{record['pass_rate']:.1%}"
    progress.event(
        f"held-out {settings.source} pass rate {label}: {rate} (avg@{settings.samples}, {settings.tasks} tasks)"
    )
    if record["masked"]:
        progress.event(
            f"{record['masked']} of {total} trajectories were lost and left out; the first: {record['first_error']}"
        )
    return found


def keep_evaluation(folder: Path, found: Evaluated) -> None:
    """Write LABEL.json and the groups in LABEL/. Raises StorageError."""
    label = found.evaluation.label
    for group in found.groups:
        write_archive(folder / label, group)
    write_evaluation(folder / f"{label}.json", found.evaluation)
