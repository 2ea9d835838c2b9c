"""Evaluations made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.evaluation import Evaluation, Sample, TaskSamples


def sample(
    id: str,
    passed: bool | None,
    *,
    turns: int = 4,
    tokens: int = 100,
    tier: str | None = None,
    known: str | None = None,
    hack: bool = False,
) -> Sample:
    """One trajectory; None for a masked one."""
    return Sample(
        id=id,
        status="infra_engine" if passed is None else "submitted",
        passed=passed,
        turns=turns,
        response_tokens=tokens,
        policy_versions=(7,),
        tier=tier,
        known=known,
        hack=hack,
    )


def evaluation(label: str, tasks: Sequence[Sequence[Sample]], *, grader: str | None = "judge") -> Evaluation:
    """Tasks t0, t1, ... with these samples."""
    return Evaluation(
        label=label,
        step=7,
        source="minirepo",
        samples=max(map(len, tasks)),
        tasks=tuple(TaskSamples(task_id=f"t{i}", samples=tuple(one), bug="order") for i, one in enumerate(tasks)),
        grader=grader,
    )


def simple(label: str, passes: Sequence[int], *, samples: int = 3, t1: int | None = None) -> Evaluation:
    """`passes` of `samples` trajectories of each task pass; of these the first `t1` in tier 1, the others in tier 2."""
    tasks = []
    for i, count in enumerate(passes):
        tasks.append(
            [
                sample(
                    f"{label}-{i}/{j}", j < count, tier=("T1" if t1 is None or j < t1 else "T2") if j < count else None
                )
                for j in range(samples)
            ]
        )
    return evaluation(label, tasks)
