"""`gagar simulate`: runs a trace under one or several schedules, prints the figures, writes the plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from configs.advice import find_advice
from configs.trace_schema import TraceConfig
from infra.errors import StorageError
from orchestrator.simulation.figures import SimulatedStep, Simulation
from orchestrator.simulation.plots import write_plots
from orchestrator.simulation.report import print_report, step_line, summary
from orchestrator.simulation.run import Schedule, simulate


def run_simulation(trace: TraceConfig, *, schedules: Sequence[Schedule], output: Path) -> int:
    """Simulate, print and write; returns the exit code.

    Raises:
        GagarError: the scheduler gave up, or the results cannot be written.
    """
    console = Console()
    for advice in find_advice(trace.run_config()):
        console.print(f"warning: {'.'.join(map(str, advice.path))} = {advice.shown}: {advice.message}")
    runs: list[Simulation] = []
    for schedule in schedules:
        before_s = 0.0

        def say(step: SimulatedStep, schedule: str = schedule) -> None:
            nonlocal before_s
            console.print(f"{schedule}: {step_line(step, before_s)}", highlight=False, soft_wrap=True)
            before_s = step.end_s

        runs.append(simulate(trace, schedule=schedule, on_step=say))
    print_report(console, runs)
    for run in runs:
        page, picture = write_plots(run, output, run.schedule)
        console.print(f"plots: {page} {picture}", highlight=False, soft_wrap=True)
    results = output / "simulation.json"
    try:
        results.write_text(json.dumps([summary(run) for run in runs], indent=1), encoding="utf-8")
    except OSError as e:
        raise StorageError(f"{results}: not written ({e}); give another --output") from e
    return 0
