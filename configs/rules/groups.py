"""Sources, groups and what their advantages need (M1, M4)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.problems import Problem
from configs.rules.findings import idle, problem, repeated
from configs.schema import AdvantageMode, ListedSource, MinirepoSource, RunConfig


def quotas(config: RunConfig) -> Iterator[Problem]:
    """A batch needs groups, and the same task twice in a batch is a mistake."""
    if sum(source.groups_per_step for source in config.sources.values()) == 0:
        yield problem(config, "sources", "no source has a quota; set groups_per_step above 0 for at least one source")
    streams: dict[tuple[Any, ...], str] = {}
    for name, source in config.sources.items():
        kinds = tuple(sorted(source.kinds)) if isinstance(source, MinirepoSource) else ()
        if twice := repeated(kinds):
            yield problem(config, f"sources.{name}.kinds", f"names {twice} twice; remove one of them")
        place = source.path if isinstance(source, ListedSource) else ""
        stream = (source.type, source.seed, kinds, place)
        if stream in streams:
            yield problem(
                config,
                f"sources.{name}.seed",
                f"gives the same tasks as sources.{streams[stream]}; choose another one",
            )
        streams.setdefault(stream, name)
        if not name or not all(c.isalnum() or c in "_-" for c in name):
            yield problem(config, f"sources.{name}", "is not a usable name; use letters, digits, _ and -")


def group_sizes(config: RunConfig) -> Iterator[Problem]:
    """M1.3: a group whose valid trajectories can never reach the minimum is always skipped."""
    algorithm = config.algorithm
    if algorithm.min_valid > algorithm.group_size:
        yield problem(
            config,
            "algorithm.min_valid",
            f"is above algorithm.group_size = {algorithm.group_size}, so every group would be skipped; lower it",
        )
    wanted = sum(source.groups_per_step for source in config.sources.values())
    if config.scheduler.max_inflight_groups < wanted:
        yield problem(
            config,
            "scheduler.max_inflight_groups",
            f"is below the {wanted} groups of one batch (the quotas together); raise it to {wanted} at least",
        )


def algorithm_keys(config: RunConfig) -> Iterator[Problem]:
    """Constants of a mode that is not chosen (M4.6)."""
    mode = config.algorithm.mode
    if mode is not AdvantageMode.REDISTRIBUTE:
        yield from idle(
            config,
            "algorithm.lambda_max",
            f"algorithm.mode = {mode.value} has no cap",
            "remove it, or choose mode redistribute",
        )
    if mode is AdvantageMode.OUTCOME:
        yield from idle(config, "algorithm.rubric", "algorithm.mode = outcome uses no quality factors")
    elif not _code_quota(config):
        for key in ("rubric", "lambda_max") if mode is AdvantageMode.REDISTRIBUTE else ("rubric",):
            why = "no code source has a quota, and only code groups are graded"
            yield from idle(config, f"algorithm.{key}", why)


def grading(config: RunConfig) -> Iterator[Problem]:
    """Quality factors come from a grader, and only code groups have them (M1, last paragraph)."""
    mode = config.algorithm.mode
    if mode is AdvantageMode.OUTCOME:
        if config.grader is not None:
            yield from idle(config, "grader", "algorithm.mode = outcome uses no grades", "set grader: null")
    elif not _code_quota(config):
        why = "no code source has a quota, and only code groups are graded"
        yield from idle(config, "algorithm.mode", why, "set mode: outcome, or give a minirepo source a quota")
        if config.grader is not None:
            yield from idle(config, "grader", why, "set grader: null, or give a minirepo source a quota")
    elif config.grader is None:
        yield Problem(
            path=("grader",),
            message=f"is missing, and algorithm.mode = {mode.value} needs grades; add a grader, or choose mode outcome",
        )


def _code_quota(config: RunConfig) -> bool:
    code = MinirepoSource | ListedSource
    return any(isinstance(s, code) and s.groups_per_step > 0 for s in config.sources.values())
