"""The grader: its budgets, tools, canaries and backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

from configs.problems import Problem
from configs.rules.findings import check_address, check_variable, idle, problem
from configs.schema import EndpointGraderBackend, GraderConfig, RunConfig, VllmGraderBackend


def grader_budget(config: RunConfig) -> Iterator[Problem]:
    """A verdict needs room after the prompt, and time after the work."""
    grader = config.grader
    if grader is None:
        return
    context = _grader_context(grader)
    if context is not None and grader.max_tokens >= context:
        yield problem(
            config,
            "grader.max_tokens",
            f"leaves no room for a prompt in grader.backend.engine.max_model_len = {context}; lower it",
        )
        return
    if grader.mode == "single":
        return
    seconds, tokens = grader.budget.seconds, grader.budget.tokens
    if seconds is not None and seconds >= grader.timeout_s:
        yield problem(
            config,
            "grader.budget.seconds",
            f"is not below grader.timeout_s = {grader.timeout_s:g}, which would end the group before it can answer; "
            "lower it",
        )
    if context is not None and tokens >= context:
        yield from idle(
            config,
            "grader.budget.tokens",
            f"grader.backend.engine.max_model_len = {context} is reached first",
            "lower it, or remove the key",
        )
    least, binding = tokens, "grader.budget.tokens"
    if context is not None and context < tokens:
        least, binding = context, "grader.backend.engine.max_model_len"
    if least <= 2 * grader.max_tokens:
        yield problem(
            config,
            "grader.max_tokens",
            f"leaves no room in {binding} = {least} for a prompt and two answers, a call and the verdict; lower it",
        )


def _grader_context(grader: GraderConfig) -> int | None:
    """The longest conversation that the grader's model reads; nobody says so for an endpoint."""
    return grader.backend.engine.max_model_len if isinstance(grader.backend, VllmGraderBackend) else None


def grader_mode(config: RunConfig) -> Iterator[Problem]:
    """Keys of the tools, where the grader has none (grader.mode single) or no commands."""
    grader = config.grader
    if grader is None:
        return
    commands = [f"grader.{key}" for key in ("checks.limit", "checks.timeout_s", "sandbox")]
    native = isinstance(grader.backend, EndpointGraderBackend) and grader.backend.tool_calling
    if grader.mode == "single":
        budget = [f"grader.budget.{key}" for key in ("turns", "tokens", "seconds")]
        others = ("grader.checks.enabled", "grader.tool_output_chars", "grader.reference_patch")
        for key in (*budget, *commands, *others, "grader.backend.tool_calling"):
            yield from idle(config, key, "grader.mode = single has no tools", "remove the key, or choose mode agent")
        return
    if native:
        yield from idle(
            config,
            "grader.backend.structured",
            "grader.backend.tool_calling = true, and tools are called natively instead of as JSON",
            "remove the key, or set tool_calling: false",
        )
    why, remedy = "grader.checks.enabled = false", "remove the key"
    if grader.checks.enabled:
        if grader.style != "compact":
            if grader.checks.timeout_s >= grader.timeout_s:
                yield problem(
                    config,
                    "grader.checks.timeout_s",
                    f"is not below grader.timeout_s = {grader.timeout_s:g}, the time of the whole group; lower it",
                )
            return
        why, remedy = "grader.style = compact offers no commands", "remove the key, or choose style full"
        commands = ["grader.checks.enabled", *commands]
    for key in commands:
        yield from idle(config, key, why, remedy)


def canaries(config: RunConfig) -> Iterator[Problem]:
    """Keys of canaries that are off, and where stored ones lie."""
    grader = config.grader
    if grader is None:
        return
    if grader.canaries.share == 0:
        for key in ("path", "window", "alarm_below"):
            yield from idle(
                config, f"grader.canaries.{key}", "grader.canaries.share = 0 turns canaries off", "raise share"
            )
        return
    path = grader.canaries.path
    if path is not None and not os.path.isdir(path):
        yield problem(
            config,
            "grader.canaries.path",
            "no such folder; give a folder of stored groups with labels (relative to the configuration file), or null "
            "for the built-in ones",
        )
    elif path is not None and not any(os.scandir(path)):
        yield problem(config, "grader.canaries.path", "is empty; give a folder of stored groups with labels")


def grader_engine(config: RunConfig) -> Iterator[Problem]:
    """The grader's weights never change."""
    yield from idle(config, "grader.backend.engine.weight_transfer", "the grader's weights are never updated")


def grader_backend(config: RunConfig) -> Iterator[Problem]:
    """What an endpoint's address must look like, and no key in the configuration, which the run folder keeps."""
    grader = config.grader
    if grader is None or not isinstance(backend := grader.backend, EndpointGraderBackend):
        return
    yield from check_address(config, "grader.backend.base_url", backend.base_url, "https://host/v1")
    yield from check_variable(config, "grader.backend.api_key_env", backend.api_key_env)
    if backend.max_concurrency < grader.workers:
        yield problem(
            config,
            "grader.backend.max_concurrency",
            f"is below grader.workers = {grader.workers}, of which each sends one request at least; raise it, or lower "
            "workers",
        )
    if backend.request_timeout_s > grader.timeout_s:
        yield from idle(
            config,
            "grader.backend.request_timeout_s",
            f"grader.timeout_s = {grader.timeout_s:g} ends the group first",
            "lower it, or raise grader.timeout_s",
        )
