"""The rules of `configs.check`: what cannot run in combination, and keys without effect in this combination.

Each rule is a function that yields problems; `RULES` is the whole list, and each has tests of its own. Keys without
effect count only if the user wrote them: defaults are silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from configs.problems import Problem
from configs.rules import budgets, checkpoints, devices, grader, groups, run, sandboxes, scheduler
from configs.schema import RunConfig

__all__ = ["RULES"]

RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    groups.quotas,
    groups.group_sizes,
    groups.algorithm_keys,
    groups.grading,
    sandboxes.harness,
    budgets.token_budgets,
    budgets.time_budgets,
    scheduler.failures,
    grader.grader_budget,
    grader.grader_mode,
    grader.canaries,
    devices.engine_device,
    devices.learner_device,
    devices.scaling,
    grader.grader_engine,
    grader.grader_backend,
    sandboxes.remote_sandbox,
    sandboxes.containers,
    run.mirror,
    devices.worker_resources,
    sandboxes.unused_sandbox,
    scheduler.mixing,
    run.evaluation,
    run.telemetry,
    run.ray_cluster,
    run.run_folder,
    checkpoints.models,
)
"""In the order in which their problems are shown."""
