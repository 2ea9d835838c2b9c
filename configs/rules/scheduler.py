"""The driver: pauses, and the mix of sources (M6)."""

from __future__ import annotations

from collections.abc import Iterator

from configs.problems import Problem
from configs.rules.findings import idle, problem
from configs.schema import RunConfig, VllmGraderBackend


def failures(config: RunConfig) -> Iterator[Problem]:
    """M1.3: settings of a pause that is off, and of an endpoint that is not there."""
    if config.scheduler.pause_masked_above is None:
        yield from idle(config, "scheduler.pause_masked_window", "scheduler.pause_masked_above is null")
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        yield from idle(config, "grader.endpoint_wait_s", "grader.backend.type = vllm has no endpoint")


def mixing(config: RunConfig) -> Iterator[Problem]:
    """M6.2: with one source there is nothing to weigh; M6.4: what is strictly on-policy is never stale."""
    if not config.scheduler.asynchronous:
        why = "scheduler.asynchronous = false trains on tokens of the current weights only"
        yield from idle(config, "scheduler.max_staleness", why)
    elif not config.scheduler.overlap:
        yield problem(
            config,
            "scheduler.overlap",
            "needs steps that do not overlap either; set scheduler.asynchronous to false, and remove max_staleness",
        )
    for name, source in config.sources.items():
        if source.max_concurrency is not None and source.min_concurrency > source.max_concurrency:
            yield problem(
                config,
                f"sources.{name}.min_concurrency",
                f"is above max_concurrency = {source.max_concurrency}; lower it, or raise max_concurrency",
            )
    if len(config.sources) == 1:
        yield from idle(config, "scheduler.alpha", "there is only one source")
    elif sum(source.groups_per_step > 0 for source in config.sources.values()) == 1:
        yield from idle(config, "scheduler.alpha", "only one source has a quota")
