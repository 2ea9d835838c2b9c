"""Kills the driver of a real run with SIGKILL, resumes it, and does so again and again; the files must never lie.

    python -m tests.bench.kills --cycles 100 --seed 0 --out FOLDER [--config configs/quickstart.yaml] [--window 70]

One run, no evaluation, a checkpoint after every step, W&B offline. Each cycle starts the driver (with --resume once
there is something to resume), kills that one process, and waits until nothing of the run is left. When it is killed is
drawn from the seed and the cycle's number:

    uniform   at a random moment of the first `window` seconds, or of 1.6 times what the last sessions took to their
              first step, if that is longer: on a busy machine the run would else never get beyond its start
    startup   within the first 15 s
    restore   within 6 s of "groups come back", while a resume reads its rollouts and loads the learner
    step      within 3 s of a new line of metrics.jsonl, before or after its checkpoint is complete
    part      within 0.5 s of an unfinished checkpoint appearing

After every cycle tests/bench/record.py reads the folder, and the cycle says what the run left outside it. One JSON line
a cycle in FOLDER/log.jsonl; started again, it goes on behind the last one. A last session runs two more steps and ends
by itself. Ray leaves the logs of each session in its temporary folder: that is measured, and is no fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from configs.check import load_run
from tests.bench import driven
from tests.bench.driven import Driven
from tests.bench.record import Expected, Promise, look

KINDS: Mapping[str, int] = {"uniform": 50, "startup": 10, "restore": 10, "step": 15, "part": 15}
"""Kind of kill -> weight."""
TRIGGER_S = 300.0
"""A kill that waits for something is done after this long, whatever has happened."""
GONE_S = 60.0
"""Whatever of a run lives this long after its driver has leaked; Ray's node agents have AGENTS_S."""
AGENTS_S = 120.0
AGENTS_EVERY = 10
"""They take a minute, so only one cycle in this many waits for them; the others end them."""
NAME = "kills"
STEPS = 1_000_000


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=driven.ROOT / "configs" / "quickstart.yaml")
    parser.add_argument("--window", type=float, default=70.0, help="seconds; about three steps of the run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    driven.adopt_orphans()
    overrides = [
        *(f"name={NAME}", f"output={out}", "eval=null", "checkpoint.every_steps=1", "telemetry.wandb.mode=offline"),
        *args.overrides,
    ]
    config = load_run(args.config, [*overrides, f"steps={STEPS}"]).config
    expected = Expected(
        quotas={name: source.groups_per_step for name, source in config.sources.items()},
        max_staleness=config.scheduler.staleness,
        every_steps=1,
    )
    log = out / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    before = None
    with contextlib.suppress(Exception):  # the next look tells
        before = look(out / NAME, expected).promise if _started(out / NAME) else None
    for cycle in range(len([x for x in lines if x["kind"] != "finish"]), args.cycles):
        first = [x["first_step_s"] for x in lines if x.get("first_step_s")][-5:]
        window_s = max(args.window, 1.6 * median(first)) if first else args.window
        line, before = _cycle(cycle, args, out, overrides, expected, before, window_s)
        _write(log, line)
        lines.append(line)
    if not any(x["kind"] == "finish" for x in lines):
        line = _finish(args, out, overrides, expected, before)
        _write(log, line)
        lines.append(line)
    summary = _summary(lines)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1), flush=True)
    raise SystemExit(1 if summary["faults"] else 0)


def _write(log: Path, line: Mapping[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def _started(run_dir: Path) -> bool:
    """Whether there is something to resume."""
    return any((run_dir / name).is_file() for name in ("config.yaml", "status.json", "metrics.jsonl"))


def _cycle(
    number: int,
    args: argparse.Namespace,
    out: Path,
    overrides: list[str],
    expected: Expected,
    before: Promise | None,
    window_s: float,
) -> tuple[dict[str, Any], Promise | None]:
    """One start, one kill, one look."""
    draw = random.Random(f"{args.seed}/{number}")
    kind = draw.choices(list(KINDS), weights=list(KINDS.values()))[0]
    run_dir = out / NAME
    resume = _started(run_dir)
    command = driven.train(args.config, *overrides, f"steps={STEPS}", resume=resume)
    run = Driven(command, console=out / "console" / f"{number:03d}.txt")
    steps = driven.lines(run_dir / "metrics.jsonl")
    hit, first_step_s = _until(kind, run, run_dir, steps, draw, window_s)
    crashed = run.ended
    alive = driven.by_role(driven.descendants())
    run.signal(signal.SIGKILL)
    killed_s = run.age_s
    gone = run.gone(GONE_S, AGENTS_S if number % AGENTS_EVERY == 2 else 0.0)
    leftovers = run.leftovers()
    run.clean()
    faults = []
    if crashed:
        faults.append(f"the driver ended by itself with {run.process.returncode}: {run.text()[-1500:]}")
    if gone.left:
        faults.append(f"{len(gone.left)} processes are left: {[p.command[:80] for p in gone.left[:5]]}")
    if leftovers["shm"]:
        faults.append(f"{leftovers['shm']} segments are left in /dev/shm")
    line: dict[str, Any] = {
        "cycle": number,
        "kind": kind,
        "hit": hit,
        "resume": resume,
        "killed_s": round(killed_s, 2),
        "first_step_s": first_step_s,
        "gone_s": round(gone.took_s, 2),
        "last": gone.last,
        "agents_gone_s": gone.agents_s and round(gone.agents_s, 1),
        "processes": alive,
        "left": len(gone.left),
        "leftovers": leftovers,
    }
    promise = before
    if _started(run_dir):
        try:
            found = look(run_dir, expected, before)
        except Exception:  # a hundred cycles must not end because a file is damaged in a way nobody thought of
            line["faults"] = [*faults, f"the files cannot be judged: {traceback.format_exc()[-1500:]}"]
            return line, None
        promise = found.promise
        faults += found.faults
        line |= {
            "step": found.steps,
            "checkpoint": found.promise.step,
            "new_steps": found.steps - steps,
            "groups": found.groups,
            "trained": found.trained,
            "in_ledger": found.living,
            "grades_kept": found.kept_grades,
            "age": [found.age_min, found.age_max],
            "mib": round(_size(run_dir) / 2**20, 1),
        }
    line["faults"] = faults
    line["time_s"] = round(time.time(), 1)
    return line, promise


def _until(
    kind: str, run: Driven, run_dir: Path, steps: int, draw: random.Random, window_s: float
) -> tuple[bool, float | None]:
    """Returns at the moment of the kill: whether what it waited for has come, and when the first new step had."""
    first_step_s: float | None = None
    stale = {path: _changed(path) for path in _parts(run_dir)}
    at_s = draw.uniform(2.0, window_s) if kind == "uniform" else draw.uniform(0.5, 15.0)
    wanted = draw.choice((1, 1, 2))
    after_s = draw.uniform(0.0, {"step": 3.0, "part": 0.5, "restore": 6.0}.get(kind, 0.0))

    def come() -> bool:
        match kind:
            case "step":
                return driven.lines(run_dir / "metrics.jsonl") - steps >= wanted
            case "part":  # not that of an earlier kill
                return any(_changed(path) not in (0, stale.get(path)) for path in _parts(run_dir))
            case "restore":
                return "groups come back" in run.text() or driven.lines(run_dir / "metrics.jsonl") > steps
        return run.age_s >= at_s

    while not come():
        if first_step_s is None and driven.lines(run_dir / "metrics.jsonl") > steps:
            first_step_s = round(run.age_s, 1)
        if run.ended or run.age_s > TRIGGER_S:
            return False, first_step_s
        time.sleep(0.005 if kind == "part" else 0.02)
    time.sleep(after_s)
    if first_step_s is None and driven.lines(run_dir / "metrics.jsonl") > steps:
        first_step_s = round(run.age_s, 1)
    return True, first_step_s


def _parts(run_dir: Path) -> list[Path]:
    """Unfinished checkpoints."""
    return list((run_dir / "checkpoints").glob(".step-*.part"))


def _changed(path: Path) -> int:
    """When the folder was made or written to; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return path.stat().st_ctime_ns
    return 0


def _size(folder: Path) -> int:
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file())


def _finish(
    args: argparse.Namespace, out: Path, overrides: list[str], expected: Expected, before: Promise | None
) -> dict[str, Any]:
    """After all kills the run still trains, and ends."""
    run_dir = out / NAME
    steps = (before.step if before else 0) + 2
    command = driven.train(args.config, *overrides, f"steps={steps}", resume=_started(run_dir))
    run = Driven(command, console=out / "console" / "finish.txt")
    driven.wait_for(lambda: run.ended, 600.0, 0.2)
    hung = not run.ended
    if hung:
        run.signal(signal.SIGKILL)
    gone = run.gone(GONE_S)
    leftovers = run.leftovers()
    run.clean()
    found = look(run_dir, expected, before, at_rest=not hung)
    faults = list(found.faults)
    if hung or run.process.returncode != 0:
        faults.append(f"the last session ended with {run.process.returncode}: {run.text()[-1500:]}")
    if found.steps != steps:
        faults.append(f"the run ended after {found.steps} steps, not {steps}")
    if gone.left:
        faults.append(f"{len(gone.left)} processes are left: {[p.command[:80] for p in gone.left[:5]]}")
    return {
        "cycle": args.cycles,
        "kind": "finish",
        "hit": not hung,
        "resume": True,
        "gone_s": round(gone.took_s, 2),
        "left": len(gone.left),
        "leftovers": leftovers,
        "step": found.steps,
        "checkpoint": found.promise.step,
        "groups": found.groups,
        "trained": found.trained,
        "age": [found.age_min, found.age_max],
        "mib": round(_size(run_dir) / 2**20, 1),
        "faults": faults,
        "time_s": round(time.time(), 1),
    }


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    kills = [x for x in lines if x["kind"] != "finish"]
    gone = [x["gone_s"] for x in kills]
    first = [x["first_step_s"] for x in kills if x["first_step_s"] is not None]
    last = lines[-1]
    return {
        "kills": len(kills),
        "by_kind": {kind: sum(x["kind"] == kind for x in kills) for kind in KINDS},
        "hit": sum(x["hit"] for x in kills),
        "with_faults": [x["cycle"] for x in lines if x["faults"]],
        "faults": sorted({f[:200] for x in lines for f in x["faults"]}),
        "steps": last.get("step"),
        "groups": last.get("groups"),
        "trained": last.get("trained"),
        "grades_kept": sum(x.get("grades_kept", 0) for x in kills),
        "gone_s": {"median": median(gone), "max": max(gone)} if gone else None,
        "agents_gone_s": [x["agents_gone_s"] for x in kills if x.get("agents_gone_s") is not None],
        "first_step_s": {"median": median(first), "max": max(first)} if first else None,
        "left_processes": sum(x["left"] for x in lines),
        "leftovers": {k: sum(x["leftovers"].get(k, 0) for x in lines) for x in lines for k in x["leftovers"]},
        "run_mib": last.get("mib"),
    }


if __name__ == "__main__":
    main()
