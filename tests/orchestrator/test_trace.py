"""The trace of a run against the rules of the trace-event format, and against what the run did (method M7)."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from run_folder import group, trajectory
from typer.testing import CliRunner

from infra.errors import StorageError
from orchestrator.cli import app
from orchestrator.trace import write_trace

UNIX_S = 5_000.0
"""The first session's clock began then; its monotonic clock said 100."""


def span(name: str, start_s: float, end_s: float, **attrs: Any) -> dict[str, Any]:
    return {"name": name, "start_s": start_s, "end_s": end_s, **attrs}


def rollout(group_id: str, slot: int, start_s: float, end_s: float) -> dict[str, Any]:
    return span("rollout", start_s, end_s, group_id=group_id, source="code", trajectory_id=f"{group_id}/{slot}.0")


def timed(id: str, wall_s: float, start_s: float, verify_s: float) -> dict[str, Any]:
    times = {"wall_s": wall_s, "sandbox_start_s": start_s, "verify_s": verify_s, "engine_s": 1.0, "sandbox_s": start_s}
    return {**trajectory(id, True), **times}


def make(run_dir: Path) -> None:
    """Two groups of two; `a` waits, is graded and trained in step 1; `b` is ungraded and trained in step 2, after a
    crash: the second session began 1000 s later, on a clock that says 7."""
    rows = [
        {"anchor": {"monotonic_s": 100.0, "unix_s": UNIX_S, "pid": 1}},
        rollout("a", 0, 100.0, 104.0),
        rollout("a", 1, 100.0, 106.0),
        span("grade_queue", 106.0, 107.0, group_id="a"),
        rollout("b", 0, 104.0, 112.0),
        span("grade", 107.0, 110.0, group_id="a"),
        span("canary", 108.0, 109.0, group_id="known"),
        span("learn", 110.0, 114.0, step=1),
        span("publish", 114.0, 115.0, step=1),
        {"anchor": {"monotonic_s": 7.0, "unix_s": UNIX_S + 1000.0, "pid": 2}},
        rollout("b", 1, 8.0, 9.0),
        span("learn", 10.0, 11.0, step=2),
        span("checkpoint", 11.0, 12.0, step=2),
    ]
    groups = [
        group("a", [timed("a/0.0", 3.5, 0.5, 1.0), timed("a/1.0", 5.0, 0.5, 1.0)], step=1),
        group("b", [timed("b/0.0", 90.0, 60.0, 60.0), trajectory("b/1.0", None)], step=2),
    ]
    parts = {f"learner/{name}_s": 0.5 for name in ("pack", "forward", "backward", "optimizer")}
    metrics = [
        {"step": 1, "time_s": UNIX_S + 15.0, "time/step_s": 15.0, **parts},
        {"step": 2, "time_s": UNIX_S + 1005.0, "time/step_s": 5.0},
    ]
    (run_dir / "config.yaml").write_text("name: x\n")
    for name, lines in (("spans", rows), ("groups", groups), ("metrics", metrics)):
        (run_dir / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def check_format(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules of the trace-event format that viewers depend on; returns the events."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[int, str] = defaultdict(str)
    for event in events:
        assert event["ph"] in "XMistfC" and isinstance(event["name"], str)
        assert all(type(event[key]) is int for key in ("ts", "pid", "tid")) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "stf":
            arrows[event["id"]] += event["ph"]
            inside = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in inside), "an arrow belongs to a slice before it"
        elif event["ph"] == "i":
            assert event["s"] in "gpt"
        elif event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values())
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    for row in slices.values():
        open_until: list[int] = []
        for start, end in row:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "slices of a row nest or follow each other"
            open_until.append(end)
    assert all(chain in ("sf", "stf") for chain in arrows.values())
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(slices) <= named
    assert {e["pid"] for e in events} == {e["pid"] for e in events if e["name"] == "process_name"}
    return events


def test_a_trace_keeps_the_rules_of_the_format_and_shows_every_stage(tmp_path: Path) -> None:
    make(tmp_path)
    path, count = write_trace(tmp_path)
    assert path == tmp_path / "trace.json"
    events = check_format(json.loads(path.read_text()))
    assert count == len(events)
    pools = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(pools.values()) == ["rollout", "waiting for a grader", "grader", "training loop"]
    shown = [(pools[e["pid"]], e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    outer = [s for s in shown if s[2] not in ("sandbox start", "turns", "verify") and "micro" not in s[2]]
    assert outer == [
        ("rollout", 2, "a/1.0", 0.0, 6.0),
        ("rollout", 1, "a/0.0", 0.0, 4.0),
        ("rollout", 1, "b/0.0", 4.0, 8.0),  # the row that has become free
        ("waiting for a grader", 1, "a", 6.0, 1.0),
        ("grader", 1, "a", 7.0, 3.0),
        ("grader", 2, "known", 8.0, 1.0),
        ("training loop", 1, "learn 1", 10.0, 4.0),
        ("training loop", 1, "publish 1", 14.0, 1.0),
        ("rollout", 1, "b/1.0", 1001.0, 1.0),
        ("training loop", 1, "learn 2", 1003.0, 1.0),
        ("training loop", 1, "checkpoint 2", 1004.0, 1.0),
    ]
    instants = [(e["name"], e["ts"] / 1e6) for e in events if e["ph"] == "i"]
    assert instants == [("step 1 done", 15.0), ("session 2: resumed", 1000.0), ("step 2 done", 1005.0)]


def test_parts_of_a_rollout_and_of_a_learner_step_lie_inside_it(tmp_path: Path) -> None:
    make(tmp_path)
    events = check_format(json.loads(write_trace(tmp_path)[0].read_text()))
    inside = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert [i for i in inside if i[1] < 4.0][1:] == [
        ("sandbox start", 0.5, 0.5),  # the worker had it for 3.5 of 4 s
        ("turns", 1.0, 2.0),
        ("verify", 3.0, 1.0),
    ]
    assert [i[0].split()[0] for i in inside if "micro" in i[0]] == ["pack", "forward", "backward", "optimizer"]


def test_arrows_lead_from_a_groups_last_rollout_to_its_step(tmp_path: Path) -> None:
    make(tmp_path)
    events = check_format(json.loads(write_trace(tmp_path)[0].read_text()))
    arrows: dict[int, list[tuple[str, float]]] = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            arrows[e["id"]].append((e["ph"], e["ts"] / 1e6))
    graded, ungraded = arrows.values()
    assert graded == [("s", 5.999999), ("t", 7.0), ("f", 10.0)]
    assert ungraded == [("s", 1001.999999), ("f", 1003.0)]


def test_the_last_steps_alone_and_a_compressed_file(tmp_path: Path) -> None:
    make(tmp_path)
    output = tmp_path / "t.json.gz"
    assert CliRunner().invoke(app, ["trace", str(tmp_path), "--output", str(output), "--steps", "1"]).exit_code == 0
    events = check_format(json.loads(gzip.decompress(output.read_bytes())))
    assert [e["name"] for e in events if e["ph"] == "X" and "/" not in e["name"]] == ["learn 2", "checkpoint 2"]


def test_a_run_without_spans_and_a_folder_that_is_none_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not the folder of a run"):
        write_trace(tmp_path)
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(StorageError, match="holds no spans yet"):
        write_trace(tmp_path)
    make(tmp_path)
    with pytest.raises(StorageError, match="cannot be written"):
        write_trace(tmp_path, tmp_path / "absent" / "trace.json")
