"""`gagar status`: where a run stands, from its folder alone. The driver keeps `status.json` up to date."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from infra.errors import StorageError
from infra.scrub import scrubbed
from orchestrator.bottleneck import verdict
from orchestrator.progress import ProgressSnapshot, clock_text
from orchestrator.runfiles import METRICS, QUARANTINE, STATUS, read_jsonl, require_run

State = Literal["running", "finished", "failed"]

SILENT_AFTER_S = 60.0
"""On another machine the process cannot be looked at; a status older than this counts as dead."""

SHOWN = (
    "learner/loss",
    "learner/entropy",
    "grading/tier1_share",
    "redistribution/lambda_capped_rate",
    "overlap/share",
    "time/step_s",
)
"""Metrics of the last step that are worth a glance."""

LISTED = 5
"""Tasks in quarantine that are named, the last ones."""

RECENT_STEPS = 5
"""Steps whose bottleneck is told."""

EXIT_CODES = {"running": 0, "finished": 0, "failed": 1, "dead": 1}


def write_status(
    run_dir: Path,
    snapshot: ProgressSnapshot,
    *,
    state: State,
    idle_s: float,
    checkpoint: str | None = None,
    error: str | None = None,
) -> None:
    """Replace status.json in one piece. `idle_s`: seconds since anything last moved; `error`: why the run failed.

    Raises:
        StorageError: the folder cannot be written.
    """
    now = time.time()
    status = {
        "state": state,
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "host": socket.gethostname(),
        "written_s": now,
        "last_progress_s": now - idle_s,
        "checkpoint": checkpoint,
        "error": error,
        "snapshot": asdict(snapshot),
    }
    path, part = run_dir / STATUS, run_dir / f".{STATUS}.part"
    try:
        part.write_text(json.dumps(scrubbed(status)), encoding="utf-8")
        part.replace(path)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space and resume the run") from e


def print_status(run_dir: Path, *, console: Console | None = None, clock: Callable[[], float] = time.time) -> int:
    """Print where the run stands; returns the exit code: 0 while it runs and when it has finished, else 1.

    Raises:
        StorageError: the folder is not a run, or its files are damaged.
    """
    require_run(run_dir)
    console = console or Console()
    status = _read(run_dir / STATUS)
    if status is None:
        console.print(f"{escape(str(run_dir))}: starting, or ended before its first status was written", soft_wrap=True)
        return 1
    now = clock()
    state = judge(status, now)
    console.print(_table(run_dir, status, state, now))
    return EXIT_CODES[state]


def judge(status: Mapping[str, Any], now: float) -> str:
    """running, finished, failed, or dead: it says running, but its process is gone."""
    if status["state"] != "running":
        return str(status["state"])
    if status["host"] != socket.gethostname():
        return "running" if now - status["written_s"] <= SILENT_AFTER_S else "dead"
    start = _process_start(status["pid"])
    return "running" if start is not None and start == status["process_start"] else "dead"


def run_state(run_dir: Path) -> str | None:
    """`judge` of a folder's status file; None if it has none that can be read."""
    try:
        status = _read(run_dir / STATUS)
    except StorageError:
        return None
    return None if status is None else judge(status, time.time())


def _process_start(pid: int) -> str | None:
    """When a process started, in kernel ticks, which tells it from a later one with its number; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        return status if isinstance(status, dict) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        raise StorageError(f"{path}: cannot be read ({e})") from e


def _table(run_dir: Path, status: Mapping[str, Any], state: str, now: float) -> Table:
    snapshot = status["snapshot"]
    table = Table(title=escape(str(run_dir)), title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()

    def row(name: str, value: str) -> None:
        table.add_row(name, escape(value))

    row("state", _state_text(status, state))
    if status["error"]:
        row("error", status["error"])
    row("step", f"{snapshot['step']} of {snapshot['total_steps']}, {snapshot['activity']}")
    row("last progress", f"{clock_text(max(now - status['last_progress_s'], 0.0))} ago")
    row("checkpoint", status["checkpoint"] or "none yet")
    for reason, message in (snapshot.get("paused") or {}).items():
        row("paused", f"{reason}: {message}")
    if alarms := snapshot.get("alarms"):
        row("alarms", ", ".join(alarms))
    if out := read_jsonl(run_dir / QUARANTINE):
        named = ", ".join(f"{one['task_id']} ({one['class']})" for one in out[-LISTED:])
        row("quarantine", f"{len(out)} tasks, see {QUARANTINE}: {'..., ' if len(out) > LISTED else ''}{named}")
    if state == "running":
        pools = (f"{name} {p['busy']}/{p['slots']} busy" for name, p in snapshot["pools"].items())
        row("pools", ", ".join(pools))
    for name, s in snapshot["sources"].items():
        reward = "" if s["reward"] is None else f", reward {s['reward']:.2f}"
        row(
            f"groups of {escape(name)}",
            f"{s['rolling']} rolling, {s['grading']} grading, {s['ready']} of {s['quota']} ready, "
            f"{s['trained']} trained, {s['skipped']} skipped{reward}",
        )
    metrics = read_jsonl(run_dir / METRICS)
    if metrics:
        last = metrics[-1]
        values = ", ".join(f"{name} {last[name]:.4g}" for name in SHOWN if last.get(name) is not None)
        row(f"metrics of step {last['step']}", values)
    if (found := verdict(metrics[-RECENT_STEPS:])) is not None:
        row("bottleneck", f"{found.sentence} ({found.evidence})")
    return table


def _state_text(status: Mapping[str, Any], state: str) -> str:
    where = f"process {status['pid']} on {status['host']}"
    if state == "dead":
        return f"dead: {where} is gone; run the same command with --resume"
    return f"{state} ({where})" if state == "running" else state
