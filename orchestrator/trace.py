"""A run's spans as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing.

    one process row a pool, and under it one thread row a slot: rows are filled so that no two spans of one collide
    slices inside a slice     a rollout's sandbox start and verification; a learner step's packing, passes, optimiser
    arrows                    a group's last rollout -> its grading -> the step that trained on it
    counters                  rollouts, gradings and waiting groups at a time
    instants                  the end of every optimiser step; the start of every session of a resumed run

Everything comes from spans.jsonl, groups.jsonl and metrics.jsonl. Pure but for `write_trace`.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from infra.errors import StorageError
from infra.spans import CANARY, CHECKPOINT, GRADE, LEARN, PUBLISH, QUEUE, ROLLOUT, Span
from learner.phases import BACKWARD, FORWARD, OPTIMIZER, PACK
from orchestrator.runfiles import GROUPS, METRICS, SPANS, read_jsonl, read_sessions, read_spans, require_run

POOLS = (("rollout", (ROLLOUT,)), ("waiting for a grader", (QUEUE,)), ("grader", (GRADE, CANARY)))
TRAINING = "training loop"
BIG_EVENTS = 200_000
"""A larger trace is written compressed; both viewers open it as it is."""
LEARNER_PARTS = (PACK, FORWARD, BACKWARD, OPTIMIZER)

Event = dict[str, Any]
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A span and where it is drawn."""

    span: Span
    pid: int
    tid: int


def write_trace(run_dir: Path, output: Path | None = None, *, steps: int | None = None) -> tuple[Path, int]:
    """Write the trace of a run, running or ended; returns the file and how many events it has.

    `output` defaults to trace.json in the run folder; with the suffix .gz, or if it would be big, it is compressed.
    `steps`: only the last so many.

    Raises:
        StorageError: no run, no spans in it, damaged files, or the trace cannot be written.
    """
    require_run(run_dir)
    spans = read_spans(run_dir / SPANS)
    if not spans:
        raise StorageError(f"{run_dir}: {SPANS} holds no spans yet; wait for the first rollout to end")
    metrics = read_jsonl(run_dir / METRICS)
    if steps is not None and (begin_s := _begin(metrics, steps)) is not None:
        spans = [s for s in spans if s.end_s > begin_s]
    events = trace_events(spans, read_jsonl(run_dir / GROUPS), metrics, read_sessions(run_dir / SPANS))
    path = output or run_dir / ("trace.json.gz" if len(events) > BIG_EVENTS else "trace.json")
    part = path.with_name(f".{path.name}.part")
    try:
        with cast(IO[str], (gzip.open if path.suffix == ".gz" else open)(part, "wt", encoding="utf-8")) as file:
            file.writelines(_lines(events, run_dir.name))
        part.replace(path)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space or choose another --output") from e
    return path, len(events)


def _begin(metrics: Sequence[Row], steps: int) -> float | None:
    """When the last `steps` steps began, Unix seconds."""
    rows = [m for m in metrics[-steps:] if m.get("time/step_s") is not None]
    return rows[0]["time_s"] - rows[0]["time/step_s"] if rows else None


def _lines(events: Sequence[Event], name: str) -> Iterator[str]:
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps({"run": name})}, "traceEvents": [\n'
    for i, event in enumerate(events):
        yield json.dumps(event) + (",\n" if i + 1 < len(events) else "\n")
    yield "]}\n"


def trace_events(
    spans: Sequence[Span], groups: Sequence[Row], metrics: Sequence[Row], sessions: Sequence[float]
) -> list[Event]:
    """Events of the trace-event format, by time. Spans and `sessions` (their starts) are in Unix seconds; the trace
    counts microseconds from the first span."""
    origin_s = min(s.start_s for s in spans)
    last_s = max(s.end_s for s in spans)
    clock = _Clock(origin_s)
    placed, names = _place(spans)
    trajectories = {t["id"]: t for g in groups for t in g["trajectories"]}
    by_step = {m["step"]: m for m in metrics}
    timed: list[Event] = []
    for p in placed:
        timed.append(clock.slice(p, _title(p.span), p.span.start_s, p.span.end_s, dict(p.span.attrs)))
        timed += _inner(clock, p, trajectories, by_step)
    timed += _arrows(clock, placed, {g["group_id"]: g.get("step") for g in groups})
    timed += _counters(clock, spans)
    pid = max((p.pid for p in placed if p.span.name in (LEARN, PUBLISH, CHECKPOINT)), default=len(POOLS) + 1)
    for m in metrics:
        if origin_s <= m["time_s"] <= last_s + 1.0:
            timed.append(clock.instant(pid, f"step {m['step']} done", m["time_s"]))
    for number, start_s in enumerate(sessions[1:], 2):
        if origin_s <= start_s <= last_s:
            timed.append(clock.instant(pid, f"session {number}: resumed", start_s))
    # At one moment a slice comes before those inside it, and what starts an arrow before what ends one.
    timed.sort(key=lambda e: (e["ts"], -e.get("dur", 0), "stf".find(e["ph"])))
    return [*names, *timed]


@dataclass(frozen=True, slots=True)
class _Clock:
    """Makes events; Unix seconds in, microseconds since the origin out."""

    origin_s: float

    def us(self, time_s: float) -> int:
        return round((time_s - self.origin_s) * 1e6)  # whole, so that what ends together does so exactly

    def slice(self, at: Placed, name: str, start_s: float, end_s: float, args: Mapping[str, Any]) -> Event:
        start = self.us(start_s)
        event = {"ph": "X", "name": name, "cat": at.span.name, "pid": at.pid, "tid": at.tid}
        return {**event, "ts": start, "dur": max(self.us(end_s) - start, 0), "args": dict(args)}

    def instant(self, pid: int, name: str, time_s: float) -> Event:
        return {"ph": "i", "s": "g", "name": name, "cat": "step", "pid": pid, "tid": 0, "ts": max(self.us(time_s), 0)}

    def arrow(self, phase: str, at: Placed, arrow_id: int, time_s: float) -> Event:
        event = {"ph": phase, "id": arrow_id, "name": "group", "cat": "group", "pid": at.pid, "tid": at.tid}
        # A moment before the end: an arrow belongs to the slice around it.
        ts = max(self.us(time_s) - 1, self.us(at.span.start_s)) if phase == "s" else self.us(time_s)
        return {**event, "ts": ts, **({"bp": "e"} if phase == "f" else {})}


# ---- rows -----------------------------------------------------------------------------------------------------------


def _place(spans: Sequence[Span]) -> tuple[list[Placed], list[Event]]:
    """Every span with its rows, and the events that name those. What no pool claims is the training loop's."""
    claimed = {name for _, names in POOLS for name in names}
    rest = tuple(sorted({s.name for s in spans} - claimed))
    placed: list[Placed] = []
    names: list[Event] = []
    for pid, (title, kinds) in enumerate((*POOLS, (TRAINING, rest)), 1):
        mine = sorted((s for s in spans if s.name in kinds), key=lambda s: (s.start_s, s.end_s))
        if not mine:
            continue
        names.append(_name("process_name", pid, 0, {"name": title}))
        names.append(_name("process_sort_index", pid, 0, {"sort_index": pid}))
        rows = _rows(mine)
        placed += (Placed(span=span, pid=pid, tid=row) for span, row in zip(mine, rows, strict=True))
        names += (_name("thread_name", pid, row, {"name": f"{title} {row}"}) for row in sorted(set(rows)))
    return placed, names


def _rows(spans: Sequence[Span]) -> list[int]:
    """The row of each span, from 1: the lowest one that is free when it starts. Spans are in order of their starts."""
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    rows: list[int] = []
    for span in spans:
        while busy and busy[0][0] <= span.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy) + 1
        heapq.heappush(busy, (span.end_s, row))
        rows.append(row)
    return rows


def _name(kind: str, pid: int, tid: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": dict(args)}


def _title(span: Span) -> str:
    attrs = span.attrs
    if "step" in attrs:
        return f"{span.name} {attrs['step']}"
    return str(attrs.get("trajectory_id") or attrs.get("group_id") or span.name)


# ---- what is inside a slice -----------------------------------------------------------------------------------------


def _inner(clock: _Clock, at: Placed, trajectories: Mapping[str, Row], metrics: Mapping[int, Row]) -> Iterator[Event]:
    """Parts of a span that other files know of. They are cut to it, so that slices nest."""
    span = at.span
    if span.name == ROLLOUT and (t := trajectories.get(str(span.attrs.get("trajectory_id")))) is not None:
        # The worker's own time ended with the span; what comes before it is the way there.
        start_s = max(span.end_s - t.get("wall_s", 0.0), span.start_s)
        verify_s = min(t.get("verify_s", 0.0), span.end_s - start_s)
        sandbox_end_s = min(start_s + t.get("sandbox_start_s", 0.0), span.end_s - verify_s)
        about = {"status": t["status"], "turns": t["turns"], "tokens": t["response_tokens"]}
        if sandbox_end_s > start_s:
            yield clock.slice(at, "sandbox start", start_s, sandbox_end_s, {})
        if span.end_s - verify_s > sandbox_end_s:
            times = {key: t[key] for key in ("engine_s", "sandbox_s") if key in t}
            yield clock.slice(at, "turns", sandbox_end_s, span.end_s - verify_s, {**about, **times})
        if verify_s > 0.0:
            yield clock.slice(at, "verify", span.end_s - verify_s, span.end_s, {"passed": t["passed"]})
    elif span.name == LEARN and (m := metrics.get(int(span.attrs.get("step", -1)))) is not None:
        at_s = span.start_s
        for part in LEARNER_PARTS:
            part_s = min(m.get(f"learner/{part}_s") or 0.0, span.end_s - at_s)
            if part_s > 0.0:
                yield clock.slice(at, f"{part} (sum over micro-batches)", at_s, at_s + part_s, {})
                at_s += part_s


def _arrows(clock: _Clock, placed: Iterable[Placed], steps: Mapping[str, int | None]) -> Iterator[Event]:
    """last rollout -> grading -> learner step, for every group that has at least two of them in the trace."""
    rollouts: dict[str, Placed] = {}
    grades: dict[str, Placed] = {}
    learns: dict[int, Placed] = {}
    for p in placed:
        group_id = str(p.span.attrs.get("group_id"))
        if p.span.name == ROLLOUT and p.span.end_s >= (rollouts[group_id].span.end_s if group_id in rollouts else 0.0):
            rollouts[group_id] = p
        elif p.span.name == GRADE:
            grades[group_id] = p
        elif p.span.name == LEARN:
            learns[int(p.span.attrs["step"])] = p
    for number, group_id in enumerate({**rollouts, **grades}, 1):
        step = steps.get(group_id)
        learn = None if step is None else learns.get(step)
        chain = [p for p in (rollouts.get(group_id), grades.get(group_id), learn) if p is not None]
        times = [p.span.end_s for p in chain[:1]] + [p.span.start_s for p in chain[1:]]
        if len(chain) < 2 or times != sorted(times):
            continue
        for i, (p, time_s) in enumerate(zip(chain, times, strict=True)):
            phase = "s" if i == 0 else "f" if i == len(chain) - 1 else "t"
            yield clock.arrow(phase, p, number, time_s)


def _counters(clock: _Clock, spans: Sequence[Span]) -> Iterator[Event]:
    """How many ran at a time, by pool."""
    for pid, (title, kinds) in enumerate(POOLS, 1):
        edges = sorted(e for s in spans if s.name in kinds for e in ((s.start_s, 1), (s.end_s, -1)))
        count = 0
        for i, (time_s, change) in enumerate(edges):
            count += change
            if i + 1 == len(edges) or edges[i + 1][0] > time_s:
                event = {"ph": "C", "name": title, "pid": pid, "tid": 0, "ts": clock.us(time_s)}
                yield {**event, "args": {"at once": count}}
