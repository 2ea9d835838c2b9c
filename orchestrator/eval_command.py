"""`gagar eval`: one policy or several on the same held-out tasks, what passes graded, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from configs.schema import EvalConfig, RunConfig
from grader.stored import StoredGroup
from infra.pool import ActorPool
from orchestrator.build import grader_pool, ray_session, rollout_pool, run_loop
from orchestrator.evaluate import Evaluated, keep_evaluation, run_evaluation
from orchestrator.evaluation import Evaluation, TaskSamples, rows
from orchestrator.grading import Asked, default_order_seed, grade_groups, setup_digest
from orchestrator.progress import Progress
from orchestrator.trust import GroupResult, tiers_of


def run_eval(
    config: RunConfig,
    policies: Sequence[tuple[str, Path]],
    *,
    k: int | None = None,
    grade: bool = True,
    output: Path | None = None,
) -> list[Evaluation]:
    """Evaluate each policy (label, Hugging Face folder) on the configuration's held-out tasks; prints the table.

    Args:
        k: of pass@k; the number of samples by default.
        grade: whether what passes is graded by the configuration's grader, where it has one.
        output: folder that keeps LABEL.json and the groups of each.

    Raises:
        GagarError: with one message for the user; evaluations that were complete are kept.
    """
    settings = config.eval or EvalConfig()
    progress = Progress(0, config.telemetry.progress_every_s)
    judged = grade and config.grader is not None

    async def go() -> list[Evaluation]:
        done = []
        async with grader_pool(config if judged else config.model_copy(update={"grader": None}), progress) as graders:
            for label, folder in policies:
                engine = config.engine.model_copy(update={"model": str(folder)})
                one = config.model_copy(update={"engine": engine})
                async with rollout_pool(one, progress) as (_, ready):
                    rollout = await ready()
                    found = await run_evaluation(one, settings, label, 0, rollout, progress, model=str(folder))
                if (pool := await graders()) is not None and found.groups:
                    found = replace(found, evaluation=await graded(config, pool, found))
                if output is not None:
                    keep_evaluation(output, found)
                done.append(found.evaluation)
        return done

    try:
        with ray_session(config):
            evaluations = run_loop(go(), stopped="stopped by SIGTERM; evaluations that were complete are kept")
    finally:
        progress.close()
    progress.console.print(table(evaluations, k=k))
    return evaluations


async def graded(config: RunConfig, pool: ActorPool, found: Evaluated) -> Evaluation:
    """The evaluation with the grader's tiers and scores of what passed; a fallback leaves its task without.

    Raises:
        GraderError: no grader is left (in an ExceptionGroup).
    """
    assert config.grader is not None
    results: dict[str, GroupResult] = {}

    def keep(result: GroupResult) -> None:
        results[result.group_id] = result

    def plan(group: StoredGroup) -> list[Asked]:
        return [Asked(order_seed=default_order_seed(config, group.group_id), permuted=False)]

    await grade_groups(
        pool,
        found.groups,
        plan,
        concurrency=pool.occupancy()[1],
        timeout_s=config.grader.timeout_s,
        setup=setup_digest(config, repeat=1, permute=False),
        on_result=keep,
    )
    models = [g.reply.model for r in results.values() for g in r.gradings if g.reply.model]
    tasks = tuple(with_grade(task, results.get(task.group_id)) for task in found.evaluation.tasks)
    return replace(found.evaluation, tasks=tasks, grader=models[0] if models else None)


def with_grade(task: TaskSamples, result: GroupResult | None) -> TaskSamples:
    """One task with what its grading says."""
    if result is None:
        return task
    reply = result.gradings[0].reply
    if reply.grade is None:
        return replace(task, fallback=reply.fallback_reason.value if reply.fallback_reason else None)
    tiers, given = tiers_of(reply.grade), reply.grade.candidates
    samples = []
    for sample in task.samples:
        hack = sample.id in reply.grade.hacks
        scores = given[sample.id].scores.as_dict() if sample.id in given else None
        samples.append(replace(sample, tier=None if hack else tiers.get(sample.id), hack=hack, scores=scores))
    return replace(task, samples=tuple(samples))


def table(evaluations: Sequence[Evaluation], *, k: int | None = None) -> Table:
    """All evaluations beside each other, with 95 % intervals over tasks."""
    first = evaluations[0]
    title = f"{len(first.tasks)} held-out tasks of {first.source}, {first.samples} samples each; 95 % intervals"
    shown = Table(title=escape(title), title_justify="left")
    shown.add_column("", style="dim", no_wrap=True)
    for evaluation in evaluations:
        shown.add_column(escape(evaluation.label), justify="right")
    for name, values in rows(evaluations, k=k):
        shown.add_row(escape(name), *map(escape, values))
    if graders := sorted({e.grader for e in evaluations if e.grader}):
        shown.caption = escape(f"graded by {', '.join(graders)}")
    return shown
