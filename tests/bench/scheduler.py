"""The scheduler at full scale under the virtual clock: its cost, its step time against the ideal, and its fairness.

    python -m tests.bench.scheduler [--trace configs/traces/published.yaml] [--only cost,overlap,...] [KEY=VALUE ...]

    cost      CPU time a trajectory and memory at the trace's own size; the driver's alone, without and with what a run
              writes down (metrics, spans, status, the ledger's file)
    overlap   step time over the ideal bound, and against grading after collection on the same pools
    alpha     M6.2's alpha 0, .5 and 1 at a fifth of the size: step time, uneven collection, swings of the slots
    shares    20 steps at a tenth of the size: each source's trained share, and the bias towards short rollouts
    growth    50 steps at a tenth of the size: memory late against early
    linear    CPU time a trajectory at a tenth, at the trace's size, and with --large at ten times of it

Every simulation has a process of its own. CPU times count the simulated parts too, and no Ray: they are those of the
scheduler, ledger, mixer, crediting and audit records; those of the driver alone are over pools that answer at once, in
real time. No test runs this: it measures time.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from configs.load import load
from configs.trace_schema import TraceConfig
from orchestrator.bench.driver import cost as driver_cost
from orchestrator.bench.figures import Figure
from orchestrator.simulation.figures import Simulation, ideal
from orchestrator.simulation.run import Schedule, simulate

CONSOLE = Console(width=140)
DRIVER_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What the command line asks for."""

    file: Path
    overrides: Sequence[str]
    large: bool

    def run(
        self, *changes: str, schedule: Schedule = "overlap", scale: float = 1.0, sampled: bool = False
    ) -> Simulation:
        """One simulation in a fresh process."""
        trace = load(TraceConfig, self.file, [*self.overrides, *changes]).config
        if scale != 1.0:
            trace = trace.scaled(scale)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            return process.submit(simulate, trace, schedule=schedule, sampled=sampled).result()

    def driver(self, *, recorded: bool) -> Figure:
        """CPU of a trajectory of the driver alone, at the trace's size, in a fresh process."""
        trace = load(TraceConfig, self.file, self.overrides).config
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            size = (trace.groups_per_step, trace.group_size)
            return process.submit(driver_cost, *size, DRIVER_STEPS, recorded=recorded).result()


def cost(bench: Bench) -> None:
    run = bench.run("steps=5", "warmup_steps=2")
    show("cost at full size", [("", run)], ["cpu", "rss", "trajectories"])
    for recorded in (False, True):
        found = bench.driver(recorded=recorded)
        CONSOLE.print(
            f"driver: {found.name}: {found.median:.3f} ms ({min(found.values):.3f} to {max(found.values):.3f})"
        )


def overlap(bench: Bench) -> None:
    runs = [(s, bench.run(schedule=s)) for s in ("overlap", "sequential")]
    show(
        "overlap against grading after collection",
        runs,
        ["step", "ideal", "stock", "rollout", "grading", "learning", "stale"],
    )
    CONSOLE.print(f"overlap is {runs[1][1].step_s / runs[0][1].step_s:.2f} times as fast as sequential")


def alpha(bench: Bench) -> None:
    runs = [(f"alpha {a}", bench.run(f"scheduler.alpha={a}", scale=0.2, sampled=True)) for a in (0, 0.5, 1)]
    show(
        "alpha (M6.2), a fifth of the size", runs, ["step", "ideal", "stock", "imbalance", "swing", "stale", "dropped"]
    )


def shares(bench: Bench) -> None:
    run = bench.run("steps=20", scale=0.1)
    table = Table(title="shares over 20 steps, a tenth of the size", title_justify="left")
    for name in ("source", "acceptance", "target %", "trained %", "off by (points)", "dispatched %", "length bias %"):
        table.add_column(name, justify="right")
    for name, source in run.trace.sources.items():
        target, trained = 100 * run.target_share[name], 100 * run.trained_share[name]
        table.add_row(
            name,
            f"{source.acceptance:g}",
            f"{target:.2f}",
            f"{trained:.2f}",
            f"{trained - target:+.2f}",
            f"{100 * run.dispatched_share[name]:.2f}",
            f"{100 * run.length_bias(name):+.1f} ± {100 * run.length_bias_error(name):.1f}",
        )
    CONSOLE.print(table)


def growth(bench: Bench) -> None:
    run = bench.run("steps=50", scale=0.1)
    early, late = ([s.rss_mib for s in run.steps[low:high]] for low, high in ((10, 20), (40, 50)))
    CONSOLE.print(
        f"memory over 50 steps, a tenth of the size: median {median(early):.1f} MiB in steps 11-20, {median(late):.1f} "
        f"MiB in steps 41-50"
    )


def linear(bench: Bench) -> None:
    scales = [0.1, 1.0, 10.0] if bench.large else [0.1, 1.0]
    runs = [(f"x {s:g}", bench.run("steps=3", "warmup_steps=1", scale=s)) for s in scales]
    show("cost by size", runs, ["cpu", "rss", "trajectories"])


FIGURES: dict[str, tuple[str, Callable[[Simulation], str]]] = {
    "step": ("step, min", lambda r: f"{r.step_s / 60:.2f}"),
    "ideal": ("step / ideal", lambda r: f"{r.step_s / ideal(r.trace).bound_s:.3f}"),
    "stock": ("stock, steps", lambda r: "{:.2f} to {:.2f}".format(*r.stock)),
    "rollout": ("rollout busy", lambda r: f"{r.occupancy('rollout'):.1%}"),
    "grading": ("graders busy", lambda r: f"{r.occupancy('grading'):.1%}"),
    "learning": ("learner busy", lambda r: f"{r.occupancy('learning'):.1%}"),
    "stale": ("oldest token, steps", lambda r: str(max(r.staleness))),
    "dropped": ("groups dropped", lambda r: str(r.ended["dropped_stale"])),
    "imbalance": ("imbalance", lambda r: f"{r.imbalance:.1%}"),
    "swing": ("swing of slots", lambda r: f"{r.swing:.2%}"),
    "cpu": ("CPU a trajectory, ms", lambda r: f"{r.cpu_ms:.3f}"),
    "rss": ("memory, MiB", lambda r: f"{r.rss_mib:.0f}"),
    "trajectories": (
        "trajectories a step",
        lambda r: f"{sum(s.trajectories for s in r.measured) / len(r.measured):,.0f}",
    ),
}


def show(title: str, runs: Sequence[tuple[str, Simulation]], figures: Sequence[str]) -> None:
    """One row a run."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for figure in figures:
        table.add_column(FIGURES[figure][0], justify="right")
    for name, run in runs:
        table.add_row(name, *(FIGURES[figure][1](run) for figure in figures))
    CONSOLE.print(table)


PARTS = {"cost": cost, "overlap": overlap, "alpha": alpha, "shares": shares, "growth": growth, "linear": linear}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=Path("configs/traces/published.yaml"))
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--large", action="store_true", help="ten times the size too: minutes of CPU time, gigabytes")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    bench = Bench(file=given.trace, overrides=given.overrides, large=given.large)
    for name in given.only.split(","):
        PARTS[name](bench)


if __name__ == "__main__":
    main()
