"""Runs the real quickstart at full load for long, and says what grows.

    python -m tests.bench.soak --minutes 60 --out FOLDER [--config configs/quickstart.yaml] [KEY=VALUE ...]

Every 15 s it reads, from outside: memory (RSS, and PSS, which shares out what several processes map), open files,
threads and processes by role; the object store's pages; files and bytes of the run's folder by subfolder; what lies in
the run's temporary folder; jails; the size of the ledger. At the end the driver gets SIGTERM, must end by itself, and
nothing may be left. Samples are in FOLDER/samples.jsonl, the table in FOLDER/soak.json and on the console.

A slope is Theil and Sen's median of the slopes between all pairs of samples after the warm-up, with the interval that
Sen's test on Kendall's tau gives at 95 %. It reads samples as independent, which they are not quite, so "grows" also
asks for a difference that matters: more than `GROWS` of the quantity's unit an hour, and more than 2 % of its level.
Logs and archives of the run grow by design; they are shown and never called a leak.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sqlite3
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import driven
from tests.bench.driven import Driven, Process

NAME = "soak"
EVERY_S = 15.0
WARM_UP_S = 600.0
START_S = 900.0
END_S = 120.0
"""Seconds from SIGTERM until the driver must have ended by itself."""
MIB = 2**20
GROWS: Mapping[str, float] = {"rss_mib": 8.0, "pss_mib": 8.0, "mib": 8.0, "fds": 4.0, "threads": 2.0, "count": 2.0}
"""Unit -> growth an hour that matters."""
BY_DESIGN = ("run/", "temp/ray")
"""Grows with the steps done, or with Ray's logs."""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="from the first step on")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, help="seconds after the first step left out")
    parser.add_argument("--config", type=Path, default=driven.ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    driven.adopt_orphans()
    run_dir = out / NAME
    command = driven.train(
        args.config,
        *(f"name={NAME}", f"output={out}", "steps=1000000", "eval=null", "checkpoint.every_steps=5"),
        *("telemetry.wandb.mode=offline", *args.overrides),
    )
    run = Driven(command, console=out / "console.txt")
    samples: list[dict[str, float]] = []
    faults: list[str] = []
    if not driven.wait_for(lambda: run.ended or driven.lines(run_dir / "metrics.jsonl") > 0, START_S, 0.5):
        faults.append(f"no step within {START_S:g} s")
    begin_s = time.monotonic()
    with (out / "samples.jsonl").open("w") as file:
        while not run.ended and not faults and (now_s := time.monotonic() - begin_s) < 60.0 * args.minutes:
            samples.append(sample(run, run_dir, now_s))
            file.write(json.dumps(samples[-1]) + "\n")
            file.flush()
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - begin_s - now_s)))
    if run.ended:
        faults.append(f"the driver ended by itself with {run.process.returncode}: {run.text()[-1500:]}")
    run.signal(signal.SIGTERM)
    stopped_s = time.monotonic()
    if not driven.wait_for(lambda: run.ended, END_S):
        faults.append(f"the driver did not end within {END_S:g} s of SIGTERM")
        run.signal(signal.SIGKILL)
    end_s = time.monotonic() - stopped_s
    gone = run.gone(30.0)
    if gone.left:
        faults.append(f"{len(gone.left)} processes are left: {[p.command[:80] for p in gone.left[:5]]}")
    leftovers = run.leftovers()
    run.clean()
    counted = [s for s in samples if s["time_s"] >= min(args.warm_up, 60.0 * args.minutes / 3)]
    rows = [row for name in sorted({k for s in counted for k in s} - {"time_s"}) if (row := _row(name, counted))]
    result = {
        "minutes": args.minutes,
        "samples": len(counted),
        "steps": driven.lines(run_dir / "metrics.jsonl"),
        "end_s": round(end_s, 2),
        "gone_s": round(gone.took_s, 2),
        "leftovers": leftovers,
        "faults": faults,
        "leaks": [row["name"] for row in rows if row["grows"]],
        "rows": rows,
    }
    (out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    _show(result)
    raise SystemExit(1 if faults or result["leaks"] else 0)


# ---- one moment -----------------------------------------------------------------------------------------------------


def sample(run: Driven, run_dir: Path, now_s: float) -> dict[str, float]:
    """All quantities now, by name `<what>/<unit>`."""
    values: dict[str, float] = defaultdict(float)
    values["time_s"] = now_s
    processes = driven.descendants()
    for process in processes:
        for unit, value in _used(process).items():
            values[f"{process.role}/{unit}"] += value
        values[f"{process.role}/count"] += 1
    values["all/pss_mib"] = sum(v for k, v in values.items() if k.endswith("/pss_mib"))
    values["all/count"] = len(processes)
    values["object store/mib"] = _plasma_mib(processes)
    for folder, (count, size) in _folders(run_dir).items():
        values[f"run/{folder}/count"], values[f"run/{folder}/mib"] = count, size / MIB
    for path in run.temp.iterdir():
        count, size = _tree(path)
        kind = driven.kind(path.name)
        values[f"temp/{kind}/count"] += count
        values[f"temp/{kind}/mib"] += size / MIB
    values["ledger rows/count"] = _rows(run_dir / "ledger.sqlite")
    values["steps"] = driven.lines(run_dir / "metrics.jsonl")
    return dict(values)


def _used(process: Process) -> dict[str, float]:
    """Memory in MiB, open files and threads of one process; nothing once it has ended."""
    folder = Path(f"/proc/{process.pid}")
    with suppress(OSError, AttributeError):
        status = (folder / "status").read_text()
        rollup = (folder / "smaps_rollup").read_text()
        return {
            "rss_mib": _kib(r"VmRSS:\s+(\d+)", status) / 1024,
            "pss_mib": _kib(r"Pss:\s+(\d+)", rollup) / 1024,
            "threads": _kib(r"Threads:\s+(\d+)", status),
            "fds": len(os.listdir(folder / "fd")),
        }
    return {}


def _kib(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    return float(match[1]) if match else 0.0


def _plasma_mib(processes: Sequence[Process]) -> float:
    """Pages of the object store that have ever held something: of the file in shared memory that the raylet has open,
    whose name is gone. Objects below 100 KiB stay in their owner's memory and are in none."""
    files: dict[tuple[int, int], float] = {}
    for process in processes:
        if process.role == "raylet":
            with suppress(OSError):
                for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                    if os.readlink(fd).startswith("/dev/shm/plasma"):
                        found = fd.stat()
                        files[found.st_dev, found.st_ino] = found.st_blocks * 512 / MIB
    return sum(files.values())


def _folders(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Subfolder, or file by itself -> number of files and bytes."""
    found = {}
    with suppress(OSError):
        for path in run_dir.iterdir():
            if not path.name.startswith("."):
                found[path.name] = _tree(path)
    return found


def _tree(path: Path) -> tuple[int, int]:
    count = size = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                size += (Path(folder) / name).lstat().st_size
                count += 1
    if path.is_file():
        return 1, path.lstat().st_size
    return count, size


def _rows(path: Path) -> float:
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=1.0)) as db:
        return float(db.execute("SELECT COUNT(*) FROM groups").fetchone()[0])
    return 0.0


# ---- slopes ---------------------------------------------------------------------------------------------------------


def theil_sen(times_s: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Slope an hour with its 95 % interval, from n >= 3 samples at different times (Sen 1968, ties corrected)."""
    slopes = sorted(
        3600.0 * (y2 - y1) / (t2 - t1)
        for (t1, y1), (t2, y2) in combinations(zip(times_s, values, strict=True), 2)
        if t2 != t1
    )
    n = len(values)
    ties = sum(c * (c - 1) * (2 * c + 5) for c in (list(values).count(v) for v in set(values)) if c > 1)
    spread = 1.96 * math.sqrt(max(n * (n - 1) * (2 * n + 5) - ties, 0) / 18)
    low = max(math.floor((len(slopes) - spread) / 2), 0)
    high = min(math.ceil((len(slopes) + spread) / 2), len(slopes) - 1)
    return median(slopes), slopes[low], slopes[high]


def _row(name: str, samples: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """One quantity: level, slope, and whether it leaks."""
    pairs = [(s["time_s"], s.get(name, 0.0)) for s in samples]
    if len(pairs) < 3:
        return None
    slope, low, high = theil_sen(*zip(*pairs, strict=True))
    level = median(v for _, v in pairs)
    unit = name.rpartition("/")[2]
    matters = max(GROWS.get(unit, math.inf), 0.02 * level)
    return {
        "name": name,
        "first": round(pairs[0][1], 2),
        "median": round(level, 2),
        "last": round(pairs[-1][1], 2),
        "max": round(max(v for _, v in pairs), 2),
        "slope_per_hour": round(slope, 2),
        "interval": [round(low, 2), round(high, 2)],
        "grows": low > 0.0 and slope > matters and not name.startswith(BY_DESIGN),
    }


def _show(result: Mapping[str, Any]) -> None:
    console = Console(width=140)
    table = Table(title=f"{result['steps']} steps, {result['samples']} samples", title_justify="left")
    for column in ("quantity", "first", "median", "last", "max", "an hour", "95 %", ""):
        table.add_column(column, justify="left" if column in ("quantity", "") else "right")
    for row in result["rows"]:
        low, high = row["interval"]
        table.add_row(
            row["name"],
            *(f"{row[k]:g}" for k in ("first", "median", "last", "max")),
            f"{row['slope_per_hour']:+g}",
            f"{low:+g} .. {high:+g}",
            "GROWS" if row["grows"] else "",
        )
    console.print(table)
    console.print(f"ended {result['end_s']} s after SIGTERM, and all else {result['gone_s']} s later")
    console.print(f"left outside the run's folder: {result['leftovers']}")
    console.print(f"leaks: {', '.join(result['leaks']) or 'none'}; faults: {result['faults'] or 'none'}")


if __name__ == "__main__":
    main()
