"""Reads the files of a run folder, finished, running or killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from infra.errors import StorageError
from infra.spans import Span

METRICS = "metrics.jsonl"
GROUPS = "groups.jsonl"
SPANS = "spans.jsonl"
EVAL = "eval.jsonl"
CANARIES = "canaries.jsonl"
QUARANTINE = "quarantine.jsonl"
"""Tasks that are sampled no more (orchestrator/quarantine.py)."""
CONFIG = "config.yaml"
STATUS = "status.json"
LEDGER = "ledger.sqlite"
"""What a resume must know of the groups that no checkpoint covers (orchestrator/ledger_store.py)."""
ROLLOUTS = "rollouts"
"""Folder of the finished rollouts of these groups (rollout/spool.py)."""
ARCHIVE = "archive"
"""Folder of the graded groups (grader/stored.py)."""


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; [] if there is none. The last line may be torn by a kill, and is then left out.

    Raises:
        StorageError: another line is not a JSON object, or the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise StorageError(f"{path}: cannot be read ({e})") from e
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError as e:
            if number == len(lines):
                break
            raise StorageError(f"{path}:{number}: not JSON ({e}); the file was damaged outside this program") from e
        if not isinstance(row, dict):
            raise StorageError(f"{path}:{number}: not a JSON object; the file was damaged outside this program")
        rows.append(row)
    return rows


def read_spans(path: Path) -> list[Span]:
    """Spans of all sessions of a run, in Unix seconds. Lines that come before any anchor are left out.

    Raises:
        StorageError: the file is damaged.
    """
    spans: list[Span] = []
    to_unix_s: float | None = None
    for row in read_jsonl(path):
        if (anchor := row.get("anchor")) is not None:
            to_unix_s = anchor["unix_s"] - anchor["monotonic_s"]
        elif to_unix_s is not None:
            attrs = {k: v for k, v in row.items() if k not in ("name", "start_s", "end_s")}
            start_s, end_s = row["start_s"] + to_unix_s, row["end_s"] + to_unix_s
            spans.append(Span(name=row["name"], start_s=start_s, end_s=end_s, attrs=attrs))
    return spans


def read_sessions(path: Path) -> list[float]:
    """When each session of a run opened its file of spans, Unix seconds.

    Raises:
        StorageError: the file is damaged.
    """
    return [row["anchor"]["unix_s"] for row in read_jsonl(path) if "anchor" in row]


def require_run(run_dir: Path) -> None:
    """Refuse a folder that is not a run.

    Raises:
        StorageError: with the runs that stand beside it.
    """
    if any((run_dir / name).is_file() for name in (CONFIG, STATUS, METRICS)):
        return
    beside = sorted(p.parent.name for p in run_dir.parent.glob(f"*/{CONFIG}")) if run_dir.parent.is_dir() else []
    known = f"runs there: {', '.join(beside)}" if beside else "no run stands beside it"
    raise StorageError(f"{run_dir}: not the folder of a run ({known}); name one as runs/<name>")
