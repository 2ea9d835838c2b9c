"""What a person sees of a run: live progress, stall messages, the table at the end.

Nothing here has a thread or a clock of its own to wait on: the scheduler's loop calls `update`, which draws at most
once an interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from infra.scrub import scrub
from orchestrator.bottleneck import shares_of, shares_text, verdict

LIVE_INTERVAL_S = 0.5

Activity = Literal["starting", "waiting", "learning", "publishing", "checkpointing", "evaluating", "finished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """Occupancy of one pool."""

    busy: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLoad:
    """Groups of one task source by state."""

    quota: int
    """B_i: groups wanted in every batch."""
    rolling: int
    grading: int
    """At the graders: queued and running."""
    ready: int
    """Waiting for the batch of the next step."""
    trained: int
    """Since the start of the run, like `skipped`."""
    skipped: int
    """Ended in any way but training: all pass, all fail, masked away, stale, failed."""
    reward: float | None
    """Mean reward in the last step in which groups of this source ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSnapshot:
    """Where a run stands."""

    step: int
    """Optimiser steps done."""
    total_steps: int
    activity: Activity
    """What the training loop itself does."""
    activity_s: float
    """Since when it does that, seconds ago."""
    pools: Mapping[str, PoolLoad]
    """By name: `rollout`, and `grader` where there is one."""
    sources: Mapping[str, SourceLoad]
    living: int
    """Groups that roll out, are graded or are in the running step."""
    max_living: int
    """The in-flight limit on them."""
    oldest_rollout_s: float | None
    """Age of the oldest running trajectory."""
    oldest_grading_s: float | None
    """Age of the oldest group at the graders."""
    cap_rate: float | None
    """Share of graded groups in the last step whose lambda was capped."""
    alarms: tuple[str, ...] = ()
    """Names of the alarms on the graders that are on."""
    paused: Mapping[str, str] = field(default_factory=dict)
    """Why the run holds still: reason -> what is wrong and what helps (pause.py)."""


class Progress:
    """Draws snapshots: a live display on a terminal, one plain line every `interval_s` seconds elsewhere."""

    def __init__(
        self,
        total_steps: int,
        interval_s: float,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console()
        self._total_steps = total_steps
        self._clock = clock
        self._started_s = clock()
        self._interval_s = LIVE_INTERVAL_S if self.console.is_terminal else interval_s
        self._drawn_s: float | None = None
        self._live: Live | None = None

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Show the state, unless the last one is younger than the interval."""
        now = self._clock()
        if self._drawn_s is not None and now - self._drawn_s < self._interval_s:
            return
        self._drawn_s = now
        if not self.console.is_terminal:
            self._print(progress_line(snapshot, now - self._started_s))
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(render(snapshot, now - self._started_s), refresh=True)

    def event(self, text: str) -> None:
        """Print one line that stays, such as "policy engine ready 21 s", with the time since the start."""
        self._print(f"[{clock_text(self._clock() - self._started_s)}] {text}")

    def close(self) -> None:
        """Take the live display away; events stay."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        self.console.print(Text(scrub(line)), soft_wrap=True)


def clock_text(seconds: float) -> str:
    """0:07, 12:34 or 1:02:03."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def progress_line(snapshot: ProgressSnapshot, elapsed_s: float) -> str:
    """The plain form of a snapshot."""
    parts = [f"[{clock_text(elapsed_s)}] step {snapshot.step}/{snapshot.total_steps} {snapshot.activity}"]
    if snapshot.paused:
        parts.append(f"PAUSED: {', '.join(snapshot.paused)}")
    parts += [f"{name} {pool.busy}/{pool.slots}" for name, pool in snapshot.pools.items()]
    for name, s in snapshot.sources.items():
        reward = "" if s.reward is None else f", reward {s.reward:.2f}"
        parts.append(
            f"{name}: {s.rolling} rolling, {s.grading} grading, {s.ready}/{s.quota} ready, "
            f"{s.trained} trained, {s.skipped} skipped{reward}"
        )
    if snapshot.cap_rate is not None:
        parts.append(f"cap {snapshot.cap_rate:.0%}")
    if snapshot.alarms:
        parts.append(f"ALARM {', '.join(snapshot.alarms)}")
    return " | ".join(parts)


def render(snapshot: ProgressSnapshot, elapsed_s: float) -> RenderableType:
    """The live form of a snapshot."""
    head = Table.grid(padding=(0, 1))
    head.add_row(
        Text(f"step {snapshot.step}/{snapshot.total_steps}", style="bold"),
        ProgressBar(total=max(snapshot.total_steps, 1), completed=snapshot.step, width=30),
        Text(clock_text(elapsed_s)),
        Text(f"{snapshot.activity} {snapshot.activity_s:.0f} s", style="cyan"),
        Text("" if snapshot.cap_rate is None else f"cap rate {snapshot.cap_rate:.0%}", style="dim"),
        Text(f"PAUSED: {', '.join(snapshot.paused)}" if snapshot.paused else "", style="bold yellow"),
        Text(f"ALARM {', '.join(snapshot.alarms)}" if snapshot.alarms else "", style="bold red"),
    )
    pools = Table.grid(padding=(0, 1))
    for name, pool in snapshot.pools.items():
        pools.add_row(
            Text(name),
            ProgressBar(total=max(pool.slots, 1), completed=pool.busy, width=20),
            Text(f"{pool.busy}/{pool.slots} busy"),
        )
    sources = Table(box=None, pad_edge=False, header_style="dim")
    sources.add_column("source")
    for column in ("rolling", "grading", "ready", "trained", "skipped", "reward"):
        sources.add_column(column, justify="right")
    for name, s in snapshot.sources.items():
        reward = "-" if s.reward is None else f"{s.reward:.2f}"
        row = (s.rolling, s.grading, f"{s.ready}/{s.quota}", s.trained, s.skipped, reward)
        sources.add_row(escape(name), *map(str, row))
    return Group(head, pools, sources)


def stall_message(snapshot: ProgressSnapshot, waited_s: float) -> str:
    """Says which queue waits for whom, when nothing has moved for `waited_s` seconds."""
    return f"no progress for {waited_s:.0f} s: " + "; ".join(_stall_parts(snapshot))


def _stall_parts(snapshot: ProgressSnapshot) -> Iterator[str]:
    for reason, message in snapshot.paused.items():
        yield f"paused: {reason} ({message})"
    if snapshot.activity != "waiting":
        yield f"the training loop has been {snapshot.activity} since {snapshot.activity_s:.0f} s"
    short = {name: s for name, s in snapshot.sources.items() if s.ready < s.quota}
    if snapshot.activity == "waiting":
        if short:
            missing = ", ".join(f"{name} groups ({s.ready} of {s.quota} ready)" for name, s in short.items())
            yield f"training waits for {missing}"
        else:
            yield "the batch is complete, but training has not started on it"
    grading = sum(s.grading for s in snapshot.sources.values())
    if grading and (pool := snapshot.pools.get("grader")) is not None:
        yield (
            f"{_groups(grading)} at the graders ({pool.busy} of {pool.slots} slots busy"
            f"{_since(snapshot.oldest_grading_s)})"
        )
    rolling = sum(s.rolling for s in snapshot.sources.values())
    rollout = snapshot.pools.get("rollout")
    if rolling:
        busy = f"{rollout.busy} of {rollout.slots} slots busy" if rollout else "no rollout pool"
        yield f"{_groups(rolling)} rolling out ({busy}{_since(snapshot.oldest_rollout_s)})"
    elif rollout is not None:
        yield "rollout pool idle" if rollout.busy == 0 else f"rollout pool busy with {rollout.busy} other tasks"
    dry = [name for name, s in short.items() if s.rolling + s.grading == 0]
    if dry and snapshot.activity == "waiting":
        full = snapshot.living >= snapshot.max_living
        why = "the in-flight limit is reached" if full else "the mixer admits none"
        yield f"no {' or '.join(dry)} group is under way ({snapshot.living} of {snapshot.max_living} in flight; {why})"


def _groups(count: int) -> str:
    return "1 group is" if count == 1 else f"{count} groups are"


def _since(age_s: float | None) -> str:
    return "" if age_s is None else f", the oldest since {age_s:.0f} s"


def end_table(
    metrics: Sequence[Mapping[str, Any]],
    evals: Sequence[Mapping[str, Any]],
    phases_s: Mapping[str, float] | None = None,
) -> Table:
    """What a run came to.

    `metrics` are lines of metrics.jsonl, `evals` lines of eval.jsonl, `phases_s` seconds spent outside the steps, such
    as {"start-up": 41.0}. Rows without data are left out.
    """
    table = Table(title="Run", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary_rows(metrics, evals, phases_s or {}):
        table.add_row(escape(name), escape(value))
    return table


def summary_rows(
    metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], phases_s: Mapping[str, float]
) -> list[tuple[str, str]]:
    """The end table as text."""
    rows: list[tuple[str, str]] = []
    for source in sorted({e["source"] for e in evals}):
        rows += _heldout([e for e in evals if e["source"] == source])
    if tier1 := _series(metrics, "grading/tier1_share"):
        (first_step, first), (last_step, last) = tier1[0], tier1[-1]
        rows.append(("T1 share of graded passes", f"{first:.0%} (step {first_step}) -> {last:.0%} (step {last_step})"))
    if capped := _series(metrics, "redistribution/lambda_capped_rate"):
        rows.append(("Cap rate, mean over steps", f"{fmean(v for _, v in capped):.1%}"))
    if overlap := _series(metrics, "overlap/share"):
        beside = sum(v > 0 for _, v in overlap)
        share = fmean(v for _, v in overlap)
        rows.append(("Grading beside rollouts", f"{share:.0%} of grading time, in {beside} of {len(metrics)} steps"))
    rows += _where_time_went(metrics, phases_s)
    if (found := verdict(metrics)) is not None:
        rows.append(("Bottleneck", f"{found.sentence} ({found.evidence}); {shares_text(shares_of(metrics))}"))
    return rows


def _heldout(evals: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    rates = {e["label"]: e for e in evals if e["pass_rate"] is not None}
    before, after = rates.get("before"), rates.get("after")
    shown = [f"{e['pass_rate']:.1%}" for e in (before, after) if e is not None]
    if not shown:
        return
    change = f" ({100 * (after['pass_rate'] - before['pass_rate']):+.1f} points)" if before and after else ""
    one = after or before
    assert one is not None
    which = " -> ".join(shown) if before and after else f"{one['label']} training: {shown[0]}"
    yield (
        f"Held-out pass rate, {one['source']}",
        f"{which}{change}, avg@{one['samples']} over {one['tasks']} tasks",
    )


def _where_time_went(metrics: Sequence[Mapping[str, Any]], phases_s: Mapping[str, float]) -> list[tuple[str, str]]:
    parts = dict(phases_s)
    for key in ("rollout", "grading", "learning", "publish", "checkpoint", "idle"):
        if seconds := _series(metrics, f"time/{key}_s"):
            parts[key] = sum(v for _, v in seconds)
    total = sum(parts.values())
    if total <= 0.0:
        return []
    shown = ", ".join(f"{name} {s:.0f} s ({s / total:.0%})" for name, s in parts.items() if s >= 0.5)
    return [("Where the time went", f"{shown}; {total:.0f} s in all")]


def _series(metrics: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of the steps that have a finite value."""
    return [(m["step"], m[name]) for m in metrics if m.get(name) is not None]
