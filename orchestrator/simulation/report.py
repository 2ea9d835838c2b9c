"""What `gagar simulate` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.simulation.figures import Ideal, SimulatedStep, Simulation, ideal

POOLS = ("rollout", "grading", "learning")
DROPPED = "dropped_stale"


def step_line(step: SimulatedStep, before_s: float) -> str:
    """One line for a finished step."""
    skipped = sum(count for outcome, count in step.ended.items() if outcome.startswith("skipped"))
    return (
        f"step {step.number}: {minutes(step.end_s - before_s)}, {sum(step.trained.values())} groups trained, "
        f"{skipped} skipped, {step.ended.get(DROPPED, 0)} dropped as stale, {step.retries} trajectories sampled again, "
        f"{step.fallbacks} gradings fell back"
    )


def print_report(console: Console, runs: Sequence[Simulation]) -> None:
    """One column a run: several schedules, or values of alpha, of one trace."""
    bound = ideal(runs[0].trace)
    console.print(f"ideal bound: {_bound_text(bound)}")
    console.print(_overview(runs, bound))
    for run in runs:
        console.print(_sources(run))
    if len(runs) > 1:
        console.print(compared(runs))


def compared(runs: Sequence[Simulation]) -> str:
    """The first run against the others."""
    first = runs[0]
    return "; ".join(
        f"{first.schedule} is {other.step_s / first.step_s:.2f} times as fast as {other.schedule}" for other in runs[1:]
    )


def _bound_text(bound: Ideal) -> str:
    parts = ", ".join(
        f"{name} {minutes(value)}"
        for name, value in zip(POOLS, (bound.rollout_s, bound.grading_s, bound.learning_s), strict=True)
    )
    return f"{minutes(bound.bound_s)} a step, set by {bound.bottleneck} ({parts})"


def _overview(runs: Sequence[Simulation], bound: Ideal) -> Table:
    trace = runs[0].trace
    title = (
        f"{trace.name}: steps {trace.warmup_steps + 1} to {trace.steps}, {trace.groups_per_step} x {trace.group_size}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.schedule, justify="right")

    def row(name: str, cells: Sequence[str]) -> None:
        table.add_row(name, *cells)

    row("step time", [minutes(r.step_s) for r in runs])
    row("step time / ideal bound", [f"{r.step_s / bound.bound_s:.3f}" for r in runs])
    for pool in POOLS:
        if pool != "grading" or trace.grading is not None:
            row(
                f"{pool} slots busy" if pool != "learning" else "learner busy",
                [_percent(r.occupancy(pool)) for r in runs],
            )
    row("groups in stock, in steps (before, after)", ["{:.2f}, {:.2f}".format(*r.stock) for r in runs])
    row("staleness of trained trajectories", [_staleness(r) for r in runs])
    row("groups dropped as stale", [str(r.ended[DROPPED]) for r in runs])
    row("groups skipped", [str(sum(n for o, n in r.ended.items() if o.startswith("skipped"))) for r in runs])
    row("gradings that fell back", [str(sum(s.fallbacks for s in r.steps)) for r in runs])
    row("trajectories sampled again", [str(sum(s.retries for s in r.steps)) for r in runs])
    row("collection imbalance", [_percent(r.imbalance) for r in runs])
    row("swing of the rollout slots", [_percent(r.swing) for r in runs])
    row("driver CPU a trajectory", [f"{r.cpu_ms:.3f} ms" for r in runs])
    row("driver memory", [f"{r.rss_mib:.0f} MiB" for r in runs])
    return table


def _sources(run: Simulation) -> Table:
    table = Table(title=f"{run.schedule}: shares of groups by source", title_justify="left")
    for name in ("source", "target", "trained", "off by", "dispatched", "length bias"):
        table.add_column(name, justify="left" if name == "source" else "right")
    target, trained, dispatched = run.target_share, run.trained_share, run.dispatched_share
    for name in run.trace.sources:
        table.add_row(
            name,
            _percent(target[name]),
            _percent(trained[name]),
            f"{100 * (trained[name] - target[name]):+.2f}",
            _percent(dispatched[name]),
            f"{100 * run.length_bias(name):+.1f} ± {100 * run.length_bias_error(name):.1f} %",
        )
    return table


def summary(run: Simulation) -> dict[str, Any]:
    """The same as plain data, for simulation.json."""
    bound = ideal(run.trace)
    return {
        "schedule": run.schedule,
        "steps": len(run.steps),
        "warmup_steps": run.trace.warmup_steps,
        "step_s": run.step_s,
        "step_s_each": [b.end_s - a for a, b in zip([0.0, *(s.end_s for s in run.steps)], run.steps, strict=False)],
        "ideal": {
            "rollout_s": bound.rollout_s,
            "grading_s": bound.grading_s,
            "learning_s": bound.learning_s,
            "bound_s": bound.bound_s,
        },
        "step_over_ideal": run.step_s / bound.bound_s,
        "occupancy": {pool: run.occupancy(pool) for pool in POOLS},
        "target_share": run.target_share,
        "trained_share": run.trained_share,
        "dispatched_share": run.dispatched_share,
        "length_bias": {name: run.length_bias(name) for name in run.trace.sources},
        "staleness": {str(k): v for k, v in sorted(run.staleness.items())},
        "groups": dict(run.ended),
        "stock": run.stock,
        "imbalance": run.imbalance,
        "swing": run.swing,
        "driver_cpu_ms": run.cpu_ms,
        "driver_rss_mib": run.rss_mib,
    }


def minutes(seconds: float) -> str:
    """Short: seconds below two minutes."""
    return f"{seconds:.1f} s" if seconds < 120.0 else f"{seconds / 60.0:.1f} min"


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"


def _staleness(run: Simulation) -> str:
    counts = run.staleness
    return ", ".join(f"{steps}: {_percent(count / counts.total())}" for steps, count in sorted(counts.items()))
