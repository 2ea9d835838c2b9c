"""How commands read the configuration of a run: what can be known to be wrong is said before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from configs.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from configs.problems import Problem
    from configs.schema import RunConfig


def load_config(
    config: Path,
    overrides: list[str] | None,
    arms: list[Path] | None,
    name: str | None = None,
    *,
    advise: bool = False,
) -> RunConfig:
    """The checked RunConfig, its task sources included. `advise`: say what of it runs but wastes something."""
    from configs.advice import find_advice
    from configs.check import load_run

    named = [] if name is None else [f"name={json.dumps(name)}"]
    loaded = load_run(config, [*(overrides or []), *named], arms or [], also=task_sources)
    for text in loaded.lines(find_advice(loaded.config)) if advise else ():
        typer.echo(f"warning: {text}", err=True)
    return loaded.config


def task_sources(config: RunConfig) -> Iterator[Problem]:
    """Settings that a source of tasks cannot serve."""
    from configs.problems import Problem, show
    from envs.formats.stream import ListedTasks
    from envs.source import make_source

    for name, source in config.sources.items():
        try:
            tasks = make_source(name, source)
            if config.rollout.sandbox.type == "jail" and isinstance(tasks, ListedTasks) and tasks.images_needed:
                yield Problem(path=("sources", name, "path"), message=_without_images(tasks.images_needed))
        except ConfigError as error:
            place, _, message = str(error).removeprefix(f"sources.{name}.").partition(": ")
            value = getattr(source, place, None)
            shown = None if value is None else show(list(value) if isinstance(value, tuple) else value)
            yield Problem(path=("sources", name, place), message=message, shown=shown)


def _without_images(needed: tuple[str, ...]) -> str:
    return (
        f"{len(needed)} of its tasks (e.g. {needed[0]}) have their files in an image alone, and jails have none; set "
        "rollout.sandbox.type to docker or modal, or give their repositories (repos)"
    )
