"""Tokens and seconds: what must fit into what."""

from __future__ import annotations

from collections.abc import Iterator

from configs.problems import Problem
from configs.rules.findings import problem
from configs.schema import EndpointGraderBackend, RunConfig


def token_budgets(config: RunConfig) -> Iterator[Problem]:
    """A trajectory must fit the engine's context and one packed row of the learner."""
    limits, key = config.rollout.limits, "rollout.limits.max_total_tokens"
    if limits.max_total_tokens > config.engine.max_model_len:
        yield problem(
            config,
            key,
            f"does not fit engine.max_model_len = {config.engine.max_model_len}; lower it, or raise max_model_len",
        )
    if limits.max_turn_tokens >= limits.max_total_tokens:
        yield problem(
            config,
            "rollout.limits.max_turn_tokens",
            f"leaves no room for a prompt in max_total_tokens = {limits.max_total_tokens}; lower it",
        )
    if config.learner.max_tokens_per_microbatch < limits.max_total_tokens:
        yield problem(
            config,
            "learner.max_tokens_per_microbatch",
            f"is below {key} = {limits.max_total_tokens}, so a trajectory may not fit one row; raise it",
        )


def time_budgets(config: RunConfig) -> Iterator[Problem]:
    """M1.3: command time is the policy's and must end a trajectory before the wall clock masks it."""
    limits, scheduler = config.rollout.limits, config.scheduler
    if limits.command_timeout_s > limits.command_budget_s:
        yield problem(
            config,
            "rollout.limits.command_timeout_s",
            f"is above command_budget_s = {limits.command_budget_s:g}, which ends the trajectory first; lower it",
        )
    if limits.wall_s <= limits.command_budget_s:
        yield problem(
            config,
            "rollout.limits.wall_s",
            f"is not above command_budget_s = {limits.command_budget_s:g}: trajectories would be masked instead of "
            "judged; raise it",
        )
    slowest = [("rollout.limits.wall_s", limits.wall_s, "lost trajectories are masked")]
    if config.grader is not None:
        slowest.append(("grader.timeout_s", config.grader.timeout_s, "a slow grading falls back"))
        if isinstance(config.grader.backend, EndpointGraderBackend):
            wait_s = config.grader.endpoint_wait_s
            slowest.append(("grader.endpoint_wait_s", wait_s, "groups that wait for a lost endpoint fall back"))
    late = next(((key, limit, what) for key, limit, what in slowest if scheduler.abort_after_s <= limit), None)
    if scheduler.abort_after_s <= scheduler.stall_after_s:
        yield problem(
            config,
            "scheduler.abort_after_s",
            f"is not above stall_after_s = {scheduler.stall_after_s:g}: the run would end before it says why; raise it",
        )
    elif late is not None:
        yield problem(
            config,
            "scheduler.abort_after_s",
            f"is not above {late[0]} = {late[1]:g}: the run could end before {late[2]}; raise it",
        )
