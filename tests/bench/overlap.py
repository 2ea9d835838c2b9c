"""Wall time of a step of the real quickstart with overlap against without, in interleaved runs of the same seeds.

    python -m tests.bench.overlap [--rounds 2] [--steps 6] [--arms overlap,turns] [--output FOLDER] [KEY=VALUE ...]

    overlap     the configuration as it is: asynchronous, groups are graded while others roll out and the learner steps
    on-policy   scheduler.asynchronous false: groups are graded while others roll out; nothing rolls out during a step
    turns       also scheduler.overlap false: rollouts, then grading, then the learner, as a synchronous pipeline

A round runs every arm once (A B, then A B again) with the round's number as seed. The first step of a run is left out:
pools warm up in it, and with overlap it also fills what later steps live off. With overlap the last `max_staleness`
steps do not roll out for steps that will not come, so their steps are shorter than those of a long run: they are left
out too. `ratio` is the median over the rounds of median step against median step of the same seed. No test runs this:
it measures time, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
CONSOLE = Console(width=140)
LAST = 2
"""Steps at the end that are left out: max_staleness of the quickstart."""
ARMS: Mapping[str, Sequence[str]] = {
    "overlap": (),
    "on-policy": ("scheduler={max_inflight_groups: 12, asynchronous: false}",),
    "turns": ("scheduler={max_inflight_groups: 12, asynchronous: false, overlap: false}",),
}
PARTS = ("rollout", "grading", "learning", "publish", "idle")


def run(arm: str, seed: int, steps: int, output: Path, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """One training; the metrics of the steps that count."""
    name = f"{arm}-{seed}"
    command = [
        *(sys.executable, "-m", "orchestrator.cli", "train", str(ROOT / "configs" / "quickstart.yaml")),
        *(f"name={name}", f"output={output}", f"steps={steps}", f"seed={seed}", "eval=null"),
        *(f"checkpoint.every_steps={steps}", "telemetry.wandb.mode=disabled", *ARMS[arm], *overrides),
    ]
    with (output / f"{name}.log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}; see {log.name}")
    lines = (output / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][1 : steps - LAST]


def step_s(measured: Sequence[Mapping[str, Any]]) -> float:
    """Median wall time of a step."""
    return median(float(m["time/step_s"]) for m in measured)


def summary(rounds: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]) -> None:
    """The arms side by side, and how much longer each takes than the first."""
    first = next(iter(rounds[0]))
    table = Table(title="one step of the quickstart, wall time", title_justify="left")
    for column in (
        "arm",
        "steps",
        "step s, median",
        "min",
        "max",
        *(f"{p} s" for p in PARTS),
        "overlap share",
        "ratio",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm in rounds[0]:
        steps = [m for r in rounds for m in r[arm]]
        times = [float(m["time/step_s"]) for m in steps]
        shares = [float(m["overlap/share"]) for m in steps if "overlap/share" in m]
        ratios = [step_s(r[arm]) / step_s(r[first]) for r in rounds]
        table.add_row(
            arm,
            str(len(steps)),
            *(f"{value:.1f}" for value in (median(times), min(times), max(times))),
            *(f"{fmean(float(m.get(f'time/{p}_s', 0.0)) for m in steps):.1f}" for p in PARTS),
            f"{fmean(shares):.0%}" if shares else "-",
            f"{median(ratios):.2f} ({', '.join(f'{r:.2f}' for r in ratios)})",
        )
    CONSOLE.print(table)
    CONSOLE.print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs at the end")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--arms", default="overlap,turns", help="the first is what the others are held against")
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    arms = args.arms.split(",")
    if not set(arms) <= set(ARMS) or args.steps < LAST + 2 or args.rounds < 1:
        parser.error(f"arms are {', '.join(ARMS)}; at least {LAST + 2} steps and one round")
    output = args.output or Path(tempfile.mkdtemp(prefix="gagar-overlap-"))
    output.mkdir(parents=True, exist_ok=True)
    rounds: list[dict[str, list[dict[str, Any]]]] = []
    for seed in range(args.rounds):
        rounds.append({})
        for arm in arms:
            rounds[-1][arm] = run(arm, seed, args.steps, output, args.overrides)
            CONSOLE.print(f"seed {seed}, {arm}: {step_s(rounds[-1][arm]):.1f} s a step")
    summary(rounds)
    CONSOLE.print(f"runs and logs: {output}")


if __name__ == "__main__":
    main()
