"""A run's configuration, valid in itself and as a combination: what every command but `sft` starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from configs.load import Loaded, load
from configs.problems import Problem
from configs.rules import RULES
from configs.schema import RunConfig


def load_run(
    file: Path,
    overrides: Sequence[str] = (),
    arms: Sequence[Path] = (),
    also: Callable[[RunConfig], Iterable[Problem]] = lambda _: (),
) -> Loaded[RunConfig]:
    """A run configuration that is valid in itself and passes every rule.

    Args:
        also: one more rule, of what this package knows nothing of.

    Raises:
        ConfigError: names every problem with place, key path, value and remedy.
    """
    loaded = load(RunConfig, file, overrides, arms)
    problems = [*find_problems(loaded.config), *also(loaded.config)]
    if problems:
        raise loaded.refuse(problems)
    return loaded


def find_problems(config: RunConfig) -> list[Problem]:
    """Everything that keeps this combination from running as written."""
    return [problem for rule in RULES for problem in rule(config)]


def resolved(config: RunConfig) -> dict[str, Any]:
    """Every key that has an effect, with its value, as plain data that can be run again; a run folder keeps it."""
    data: dict[str, Any] = config.model_dump(mode="json")
    for problem in find_problems(RunConfig.model_validate(data)):
        if not problem.idle:
            continue
        *parents, key = problem.path
        section: Any = data
        for part in parents:
            section = section[str(part)]
        del section[str(key)]
    return data
