"""Runs benchmarks by name and prints their figures."""

from __future__ import annotations

import importlib
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from infra.errors import ConfigError, StorageError
from orchestrator.bench.figures import Figure, Options

NAMES = {
    "driver": "CPU time of the scheduler's own code for a trajectory, with scripted pools",
    "ready-delay": "from a group's last trajectory to the call of a grader",
    "queues": "operations of the bounded queues and of the ledger",
    "mixer": "decisions which source comes next",
    "payload": "payloads from a rollout worker to a learner rank through the object store",
    "publish": "new weights to the engines, against a memory copy of their size",
    "sandbox": "starting a sandbox, and running a command in it",
    "learner": "tokens a second of packed rows, against padding, on a skewed mix of lengths",
    "grading": "groups a minute of the configured graders",
}
"""Benchmarks in the order in which they run: module orchestrator.bench.<name> with `-` as `_`, function `run`."""


def run_benchmarks(names: Sequence[str], options: Options, output: Path | None) -> None:
    """Run the benchmarks with these names, or all; print a table for each, and write `output` as JSON.

    Raises:
        ConfigError: an unknown name.
        StorageError: `output` cannot be written.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"no benchmark is called {unknown[0]}; there are {', '.join(NAMES)}")
    console = Console()
    machine = _machine()
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), style="dim", soft_wrap=True)
    results: dict[str, Any] = {}
    for name in names or NAMES:
        load = os.getloadavg()[0]
        start_s = time.monotonic()
        figures: list[Figure] = importlib.import_module(f"orchestrator.bench.{name.replace('-', '_')}").run(options)
        console.print(table(name, figures, load))
        results[name] = {
            "about": NAMES[name],
            "load": load,
            "seconds": time.monotonic() - start_s,
            "figures": [f.record() for f in figures],
        }
        if output is not None:  # after each, so that one that fails leaves those before it
            _write(output, {"machine": machine, "benchmarks": results})


def table(name: str, figures: Sequence[Figure], load: float) -> Table:
    """One row a figure: median, spread, repetitions."""
    title = f"{name}: {NAMES[name]} (load average at its start {load:.1f})"
    out = Table(title=title, title_justify="left", header_style="dim")
    out.add_column("figure")
    for column in ("median", "min", "max"):
        out.add_column(column, justify="right")
    out.add_column("unit")
    out.add_column("repetitions", justify="right")
    for f in figures:
        values = (f"{v:,.4g}" if abs(v) < 10_000 else f"{v:,.0f}" for v in (f.median, min(f.values), max(f.values)))
        out.add_row(f.name, *values, f.unit, str(len(f.values)))
    return out


def _machine() -> dict[str, Any]:
    return {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


def _write(path: Path, data: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); choose another --json") from e
