"""`gagar show group RUN ID`: one group in the terminal, or as a page of its own."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from infra.errors import StorageError
from orchestrator.archive import read_archived
from orchestrator.candidate_page import LineView
from orchestrator.group_view import CandidateView, GroupView, group_view
from orchestrator.runfiles import ARCHIVE, GROUPS, read_jsonl, require_run

COLUMN = 56
"""Least width of a candidate's column; as many stand side by side as fit."""
_TIER = {"T1": "green", "T2": "yellow", "T3": "red"}
_LINE = {
    "add": ("+", "green"),
    "remove": ("-", "red"),
    "context": (" ", ""),
    "file": (" ", "bold"),
    "gap": (" ", "dim"),
}


def show_group(run_dir: Path, group_id: str, html: Path | None = None, *, console: Console | None = None) -> None:
    """Print a group of a run, or write its page to `html`.

    Raises:
        StorageError: no run, no such group, a damaged file, or a page that cannot be written.
    """
    console = console or Console()
    view = load_group(run_dir, group_id)
    if html is None:
        for part in render(view, console.width):
            console.print(part)
        return
    from orchestrator.report import write_group_page

    console.print(Text(f"wrote {write_group_page(html, view)}"), soft_wrap=True)


def load_group(run_dir: Path, group_id: str) -> GroupView:
    """The view of one group of a run.

    Raises:
        StorageError: as `show_group`.
    """
    require_run(run_dir)
    records = {r["group_id"]: r for r in read_jsonl(run_dir / GROUPS)}
    if group_id not in records:
        raise StorageError(f"{run_dir}: no group {group_id!r} has ended there; {_near(group_id, list(records))}")
    return group_view(records[group_id], read_archived(run_dir / ARCHIVE, records[group_id]))


def _near(group_id: str, known: Sequence[str]) -> str:
    if not known:
        return f"its {GROUPS} is empty"
    close = difflib.get_close_matches(group_id, known, n=3) or list(known[-3:])
    return f"try {', '.join(close)}; all are in its {GROUPS}"


def render(view: GroupView, width: int) -> Iterator[RenderableType]:
    """What the terminal shows, part by part."""
    yield Text.assemble((view.group_id, "bold"), f"  {_head(view)}")
    if view.grader:
        yield Text("grader: " + ", ".join(f"{name} {value}" for name, value in view.grader), style="dim")
    if view.fallback_reason:
        yield Text(f"fallback: {view.fallback_reason}" + (f" ({view.detail})" if view.detail else ""), style="red")
    if view.note:
        yield Text(view.note, style="yellow")
    if view.statement:
        yield Panel(Text(view.statement), title="task", title_align="left")
    yield _table(view)
    side = max(width // COLUMN, 1)
    passing = view.passing
    for start in range(0, len(passing), side):
        grid = Table.grid(expand=True, padding=(0, 1))
        row = passing[start : start + side]
        for _ in range(min(side, len(passing))):
            grid.add_column(ratio=1)
        grid.add_row(*(_candidate(c) for c in row))
        yield grid
    for check in view.checks:
        code = "stopped at its time limit" if check.exit_code is None else f"exit {check.exit_code}"
        yield Text(f"run:{check.number} on {check.candidate}: {check.command} ({code})")
    if view.fallback_reason and view.verdict:
        yield Panel(Text(view.verdict), title="the verdict as the model returned it", title_align="left")


def _head(view: GroupView) -> str:
    step = "" if view.step is None else f" at step {view.step}"
    text = f"{view.outcome}{step}, task {view.task_id}, mode {view.mode}"
    if view.lam is None:
        return text
    cap = f", capped at {view.lambda_max:g}" if view.capped and view.lambda_max is not None else ", not capped"
    return f"{text}, lambda {view.lam:.3f}{cap if view.lambda_max is not None else ''}"


def _table(view: GroupView) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("candidate", "trajectory", "status", "result"):
        table.add_column(name)
    for name in ("tier", "factor", "before", "after", "turns", "tokens"):
        table.add_column(name, justify="right")
    for c in view.candidates:
        table.add_row(
            Text(c.label or "-"),
            Text(c.trajectory_id),
            Text(c.status),
            _result(c),
            Text(c.tier or "-", style=_TIER.get(c.tier or "", "")),
            "-" if c.factor is None else f"{c.factor:.3g}",
            _signed(c.before),
            _signed(c.after),
            str(c.turns),
            str(c.response_tokens),
        )
    return table


def _result(c: CandidateView) -> Text:
    if not c.valid:
        return Text("masked", style="dim")
    if c.hack:
        return Text("hack", style="red")
    return Text("passed", style="green") if c.passed else Text("failed", style="dim")


def _candidate(c: CandidateView) -> Panel:
    """One passing candidate: scores and reasons, evidence with the cited line, patch."""
    parts: list[RenderableType] = []
    if c.scores:
        scores = Table.grid(padding=(0, 1))
        for s in c.scores:
            style = "red" if s.value <= 2 else "green" if s.value >= 4 else "yellow"
            scores.add_row(Text(s.name, style="dim"), Text(str(s.value), style=style), Text(s.reason))
        parts.append(scores)
    if c.flags:
        parts.append(Text(c.flags, style="red"))
    for e in c.evidence:
        parts.append(Text.assemble((e.text, "cyan"), f"  {e.quote}"))
    if c.patch:
        parts += [Text(""), *map(_line, c.patch)]
    if c.patch_note:
        parts.append(Text(c.patch_note, style="dim"))
    title = Text(c.label or c.trajectory_id)
    if c.tier:
        title.append(f" {c.tier}", style=_TIER.get(c.tier, ""))
    if c.hack:
        title.append(" hack", style="red")
    title.append(f"  {_signed(c.before)} -> {_signed(c.after)}", style="dim")
    return Panel(Group(*parts), title=title, title_align="left")


def _line(line: LineView) -> Text:
    sign, style = _LINE.get(line.kind, ("", ""))
    number = "" if line.number is None else str(line.number)
    mark = "cyan" if line.cited else "dim"
    return Text.assemble((f"{number:>5} ", mark), (f"{sign} {line.text}", style))


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"
