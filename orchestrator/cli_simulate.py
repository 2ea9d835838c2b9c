"""The command `gagar simulate`. `register` adds it to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from configs.errors import ConfigError

if TYPE_CHECKING:
    from configs.trace_schema import TraceConfig
    from orchestrator.simulation.run import Schedule

SCHEDULES: tuple[Schedule, ...] = ("overlap", "sequential")
EXAMPLE = "gagar simulate configs/traces/published.yaml grading.slots=128 --scale 0.1 --compare overlap,sequential"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(epilog=f"Example: {EXAMPLE}")(simulate)


def simulate(
    trace: Annotated[Path, typer.Argument(help="Load and pools, e.g. configs/traces/published.yaml.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to single keys, e.g. rollout.slots=16384."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps; short for the override steps=N.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of plots and simulation.json; without it, runs/simulate/NAME.")
    ] = None,
    compare: Annotated[
        str,
        typer.Option(
            metavar="SCHEDULES",
            help="Schedules to run, separated by commas: overlap (as trained with), sequential (grading after "
            "collection, on the same pools).",
        ),
    ] = "overlap",
    scale: Annotated[
        float, typer.Option(min=0.0, help="So many times the groups of a step, with every pool in proportion.")
    ] = 1.0,
) -> None:
    """Run the scheduler on simulated pools in virtual time, to choose their sizes before renting them."""
    schedules = [name.strip() for name in compare.split(",")]
    if unknown := [name for name in schedules if name not in SCHEDULES]:
        raise ConfigError(f"--compare {compare}: {unknown[0]!r} is no schedule; choose from {', '.join(SCHEDULES)}")
    named = [] if steps is None else [f"steps={steps}"]
    loaded = _scaled(trace, [*(overrides or []), *named], scale)
    from orchestrator.simulation.command import run_simulation

    try:
        code = run_simulation(
            loaded,
            schedules=[name for name in SCHEDULES if name in schedules],
            output=output or Path("runs") / "simulate" / loaded.name,
        )
    except KeyboardInterrupt:
        typer.echo("gagar: stopped by the keyboard; --scale 0.1 is ten times as fast", err=True)
        raise typer.Exit(130) from None
    raise typer.Exit(code)


def _scaled(file: Path, overrides: list[str], scale: float) -> TraceConfig:
    from pydantic import ValidationError

    from configs.load import load
    from configs.trace_schema import TraceConfig

    trace = load(TraceConfig, file, overrides).config
    if scale == 1.0:
        return trace
    try:
        return trace.scaled(scale)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{file}, --scale {scale:g}: {reason}; give a larger scale") from None
