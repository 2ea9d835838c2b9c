"""`report.html` of a run: one page that opens without a network, made from the files of the run folder alone.

Much of what it shows was written by the policy or the grader's model. Every value is escaped by the template engine,
and the page's own policy forbids scripts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from infra.errors import StorageError
from infra.spans import CHECKPOINT, GRADE, LEARN, PUBLISH, QUEUE, ROLLOUT
from infra.unseen import visible
from orchestrator.archive import read_archived
from orchestrator.bottleneck import CAUSES, verdict
from orchestrator.browse import group_lists, to_show
from orchestrator.charts import Chart, heat_map, line_chart, stacked_bars, timeline
from orchestrator.group_view import SCORES, GroupView, group_view
from orchestrator.progress import summary_rows
from orchestrator.runfiles import (
    ARCHIVE,
    CONFIG,
    EVAL,
    GROUPS,
    METRICS,
    QUARANTINE,
    SPANS,
    read_jsonl,
    read_spans,
    require_run,
)

MAX_GROUPS = 200
"""Groups listed, the newest first; all of them are in groups.jsonl."""
MAX_PAGE_CHARS = 20_000_000
"""Size of the groups shown in full, about."""
TIMELINE_STEPS = 3
TIMELINE_S = 120.0
"""Length of the timeline of a run that has not finished a step."""

Row = Mapping[str, Any]


def write_report(run_dir: Path, path: Path | None = None) -> Path:
    """Write a page about one run, `report.html` in its folder by default, and return its path. The run may be
    unfinished.

    Raises:
        StorageError: the folder is not a run, its files are damaged, or the report cannot be written.
    """
    require_run(run_dir)
    metrics = read_jsonl(run_dir / METRICS)
    groups = read_jsonl(run_dir / GROUPS)
    evals = read_jsonl(run_dir / EVAL)
    config = run_dir / CONFIG
    lists = group_lists(groups)
    chosen = to_show(lists)
    views = _views(run_dir, chosen)
    page = render_page(
        "report.html.j2",
        name=run_dir.absolute().name,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        steps=len(metrics),
        summary=summary_rows(metrics, evals, {}),
        charts=[c for c in step_charts(metrics) if c is not None],
        bound=verdict(metrics),
        timelines=[c for c in (bounds(metrics), occupancy(run_dir, metrics)) if c is not None],
        evals=evals,
        scalars=first_and_last(metrics),
        quarantine=read_jsonl(run_dir / QUARANTINE),
        lists=lists,
        anchors={record["group_id"]: view.anchor for record, view in zip(chosen, views, strict=False)},
        views=views,
        hidden=len({e.record["group_id"] for one in lists for e in one.entries}) - len(views),
        folder=run_dir,
        groups=[group_row(g) for g in reversed(groups[-MAX_GROUPS:])],
        groups_total=len(groups),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
    )
    return write_page(path or run_dir / "report.html", page)


def write_group_page(path: Path, view: GroupView) -> Path:
    """Write a page of one group and return its path.

    Raises:
        StorageError: it cannot be written.
    """
    return write_page(path, render_page("group.html.j2", g=view))


def render_page(template: str, **values: Any) -> str:
    """A page from a template; every value is escaped, and invisible characters are spelled out."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    return environment.get_template(template).render(**values)


def _finalize(value: Any) -> Any:
    return visible(value) if type(value) is str else value  # what a macro made is a subclass of str, and done


def write_page(path: Path, page: str) -> Path:
    """Write a page under its name only when all of it is there.

    Raises:
        StorageError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(page, encoding="utf-8", errors="replace")
        part.replace(path)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space or choose another place") from e
    return path


def _views(run_dir: Path, records: Sequence[Row]) -> list[GroupView]:
    """Groups in full, as many as a page can hold; one whose archived file is damaged is shown without it."""
    views: list[GroupView] = []
    size = 0
    for i, record in enumerate(records):
        stored, note = None, ""
        try:
            stored = read_archived(run_dir / ARCHIVE, record)
        except StorageError as e:
            note = visible(str(e))
        view = group_view(record, stored, anchor=f"g{i}", note=note)
        size += page_size(view)
        if size > MAX_PAGE_CHARS and views:
            break
        views.append(view)
    return views


def page_size(view: GroupView) -> int:
    """About how many characters of the page a group takes."""
    lines = sum(len(line.text) + 90 for c in view.candidates for line in (*c.patch, *c.log))
    return lines + sum(len(t.action) + len(t.observation) + 120 for c in view.candidates for t in c.turn_views)


def step_charts(metrics: Sequence[Row]) -> list[Chart | None]:
    """Everything that is drawn over optimiser steps."""
    lambdas = {
        "mean": _line(metrics, "redistribution/lambda_mean"),
        "p95": _line(metrics, "redistribution/lambda_p95"),
    }
    shares = {
        "cap rate": _line(metrics, "redistribution/lambda_capped_rate"),
        "grader success": _line(metrics, "grading/success_rate"),
        "grading beside rollouts": _line(metrics, "overlap/share"),
    }
    ends = ["groups/trained", *_names(metrics, "groups/skipped/"), "groups/dropped_stale", "groups/failed"]
    time_parts = {key: f"time/{key}_s" for key in ("rollout", "grading", "learning", "publish", "checkpoint", "idle")}
    gap = {
        "mean": _line(metrics, "learner/logprob_gap_mean"),
        "max": _line(metrics, "learner/logprob_gap_max"),
    }
    return [
        line_chart("Pass rate by source", _lines(metrics, "pass_rate/"), low=0.0, high=1.0),
        line_chart("Reward by source", _lines(metrics, "reward/")),
        stacked_bars("Tiers of graded passes", {f"T{i}": _bars(metrics, f"grading/tier{i}_share") for i in (1, 2, 3)}),
        line_chart("Lambda before the cap", _some(lambdas)),
        heat_map("Lambda of graded groups, step by step", spread(metrics, "redistribution/lambda"), low=1.0),
        line_chart(
            "Change of the failing side's advantage",
            _some({"mean": _line(metrics, "redistribution/failing_shift_mean")}),
        ),
        line_chart("Shares", _some(shares), low=0.0, high=1.0),
        stacked_bars("Groups by end", {n.removeprefix("groups/"): _bars(metrics, n) for n in ends}),
        stacked_bars("Where the time of a step went, seconds", {k: _bars(metrics, n) for k, n in time_parts.items()}),
        line_chart("Entropy, nats", _some({"entropy": _line(metrics, "learner/entropy")})),
        line_chart("Learner and engine log-probability gap", _some(gap)),
        line_chart("Turns a trajectory", _some({"mean": _line(metrics, "trajectories/turns_mean")})),
        line_chart(
            "Generated tokens a trajectory", _some({"mean": _line(metrics, "trajectories/response_tokens_mean")})
        ),
    ]


def spread(metrics: Sequence[Row], name: str) -> dict[int, list[tuple[float, float]]]:
    """(middle of a bin, how many) of a histogram, by step."""
    found: dict[int, list[tuple[float, float]]] = {}
    for m in metrics:
        if (histogram := (m.get("histograms") or {}).get(name)) is not None:
            edges = histogram["edges"]
            middles = [(low + high) / 2 for low, high in pairwise(edges)]
            found[int(m["step"])] = list(zip(middles, map(float, histogram["counts"]), strict=True))
    return found


def bounds(metrics: Sequence[Row]) -> Chart | None:
    """What was critical, by step."""
    shares = {cause: _bars(metrics, f"bottleneck/{cause}") for cause in CAUSES}
    return stacked_bars("What bounded a step, share of it", {cause: bars for cause, bars in shares.items() if bars})


def occupancy(run_dir: Path, metrics: Sequence[Row]) -> Chart | None:
    """What ran beside what in the last steps, from spans.jsonl."""
    spans = read_spans(run_dir / SPANS)
    if not spans:
        return None
    recent = [m for m in metrics[-TIMELINE_STEPS:] if m.get("time/step_s") is not None]
    if recent:
        end = recent[-1]["time_s"]
        start = recent[0]["time_s"] - recent[0]["time/step_s"]
        first, last = recent[0]["step"], recent[-1]["step"]
        title = f"What ran when, step {last}" if first == last else f"What ran when, steps {first} to {last}"
    else:
        end = max(s.end_s for s in spans)
        start = max(end - TIMELINE_S, min(s.start_s for s in spans))
        title = f"What ran when, last {end - start:.0f} s"
    return timeline(title, spans, (ROLLOUT, QUEUE, GRADE, LEARN, PUBLISH, CHECKPOINT), (start, end))


def group_row(record: Row) -> dict[str, Any]:
    """One group for the table: its record, and for each trajectory also the advantage by outcome alone."""
    valid = [t["reward"] for t in record["trajectories"] if t["valid"] and t["reward"] is not None]
    mean = fmean(valid) if valid else 0.0
    rows = []
    for t in record["trajectories"]:
        scores, flags = t.get("scores"), t.get("flags") or {}
        rows.append(
            {
                **t,
                "before": t["reward"] - mean if t["valid"] and t["reward"] is not None else None,
                "scores": " ".join(str(scores.get(k, "?")) for k in SCORES) if scores else "",
                "flags": ", ".join(k for k, v in flags.items() if v),
                "versions": ", ".join(map(str, t["policy_versions"])),
                "patch": t.get("patch") or "",
            }
        )
    grader = record.get("grader")
    return {
        **record,
        "rows": rows,
        "passes": sum(bool(t["passed"]) for t in record["trajectories"] if t["valid"]),
        "verdict": json.dumps(grader, indent=1, ensure_ascii=False) if grader else "",
    }


def first_and_last(metrics: Sequence[Row]) -> list[tuple[str, float | None, float | None]]:
    """(name, first value, last value) of every scalar of the run."""
    names = sorted({n for m in metrics for n in m} - {"step", "time_s", "histograms"})
    out = []
    for name in names:
        values = [m[name] for m in metrics if name in m]
        out.append((name, values[0], values[-1]))
    return out


def _names(metrics: Sequence[Row], prefix: str) -> list[str]:
    return sorted({name for m in metrics for name in m if name.startswith(prefix)})


def _line(metrics: Sequence[Row], name: str) -> list[tuple[float, float]]:
    return [(float(m["step"]), float(m[name])) for m in metrics if m.get(name) is not None]


def _bars(metrics: Sequence[Row], name: str) -> dict[int, float]:
    return {int(m["step"]): float(m[name]) for m in metrics if m.get(name) is not None}


def _lines(metrics: Sequence[Row], prefix: str) -> dict[str, list[tuple[float, float]]]:
    return _some({name.removeprefix(prefix): _line(metrics, name) for name in _names(metrics, prefix)})


def _some(series: Mapping[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: points for name, points in series.items() if points}
