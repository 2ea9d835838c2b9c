"""The commands about time: `gagar trace` and `gagar bench`. `register` adds them to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(epilog="Example: gagar trace runs/quickstart --output trace.json")(trace)
    app.command(epilog="Example: gagar bench driver mixer --repeat 10 --json bench.json")(bench)


def trace(
    run: Annotated[Path, typer.Argument(help="Folder of a run, running or ended.")],
    output: Annotated[
        Path | None, typer.Option(help="File to write, trace.json in the run's folder by default; .gz compresses.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Only the last so many optimiser steps.")] = None,
) -> None:
    """Write what ran when as a trace file for ui.perfetto.dev or chrome://tracing."""
    from orchestrator.trace import write_trace

    path, events = write_trace(run, output, steps=steps)
    typer.echo(f"wrote {path} ({events} events); open it at https://ui.perfetto.dev or chrome://tracing")


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="driver, ready-delay, queues, mixer, payload, publish, sandbox, learner, grading; without any, all.",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every measured value to this file too.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Repetitions, instead of each benchmark's own.")] = None,
    config: Annotated[
        Path, typer.Option(help="Where publish, sandbox, learner and grading take their models and sandboxes from.")
    ] = Path("configs/quickstart.yaml"),
) -> None:
    """Measure how fast the parts are on this machine: median, spread and repetitions of each figure."""
    from orchestrator.bench.command import run_benchmarks
    from orchestrator.bench.figures import Options

    run_benchmarks(names or [], Options(repeat=repeat, config=config), json)
