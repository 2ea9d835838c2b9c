from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folder import group, make_run, records, trajectory

from infra.errors import StorageError
from infra.spans import Span
from orchestrator.charts import line_chart, stacked_bars, timeline
from orchestrator.report import group_row, write_report
from orchestrator.runfiles import read_jsonl, read_spans

VOID = {"meta", "line", "br", "path", "circle", "rect"}


class Page(HTMLParser):
    """Collects tags, attributes and text; fails on a tag that is not closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_shows_the_run_and_needs_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    page = Page(path)
    for part in (
        "40.0% -> 55.0% (+15.0 points)",
        "Pass rate by source",
        "Tiers of graded passes",
        "Groups by end",
        "skipped/all_fail",
        "Where the time of a step went",
        "What ran when, step 3",
        "lambda 1.67",
        "capped at 1.5",
        "fallback: timeout",
        "+0.775",
        "name: demo",
    ):
        assert part in page.text
    assert "svg" in page.tags
    assert not [a for a in page.attributes if a[0] in ("src", "href", "onload", "onerror", "onclick")]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\ud800"
    member = {**trajectory("g/0", True, advantage=0.5), "patch": evil, "status": evil}
    record = group(evil, [member], grader={"verdict": evil, "model": evil}, fallback_reason=evil)
    make_run(tmp_path, groups=[record])
    (tmp_path / "config.yaml").write_text(f"name: '{evil[:-1]}'\n")
    page = Page(write_report(tmp_path))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "<script>alert(1)</script>" in page.text


def test_a_group_shows_what_the_grade_changed() -> None:
    row = group_row(records()[0])
    assert [t["before"] for t in row["rows"]] == [0.5, 0.5, -0.5, -0.5]
    assert [t["advantage"] for t in row["rows"]] == [0.775, 0.175, -0.475, -0.475]
    assert row["passes"] == 2
    assert row["rows"][0]["scores"] == "5 5 4 5 4"
    masked = group_row(records()[5])
    assert [t["before"] for t in masked["rows"]] == [None, None, 0.0]


def test_a_run_that_has_barely_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert "No step has finished yet." in Page(write_report(tmp_path)).text


def test_a_killed_run_has_a_report(tmp_path: Path) -> None:
    make_run(tmp_path)
    for name in ("metrics.jsonl", "groups.jsonl", "spans.jsonl", "eval.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "torn')
    assert "1 optimiser steps, 7 groups." in Page(write_report(tmp_path)).text


def test_spans_without_a_finished_step_are_drawn(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    assert "What ran when, last 10 s" in Page(write_report(tmp_path)).text


def test_a_folder_that_is_no_run_and_damaged_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not the folder of a run"):
        write_report(tmp_path)
    make_run(tmp_path)
    text = (tmp_path / "groups.jsonl").read_text()
    (tmp_path / "groups.jsonl").write_text("oops\n" + text)
    with pytest.raises(StorageError, match=r"groups.jsonl:1: not JSON"):
        write_report(tmp_path)


def test_spans_of_two_sessions_come_on_one_axis(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    rows = [
        {"anchor": {"monotonic_s": 100.0, "unix_s": 5000.0, "pid": 1}},
        {"name": "learn", "start_s": 101.0, "end_s": 102.0, "step": 1},
        {"anchor": {"monotonic_s": 7.0, "unix_s": 6000.0, "pid": 2}},
        {"name": "learn", "start_s": 8.0, "end_s": 10.0, "step": 2},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert [(s.start_s, s.end_s, dict(s.attrs)) for s in read_spans(path)] == [
        (5001.0, 5002.0, {"step": 1}),
        (6001.0, 6003.0, {"step": 2}),
    ]
    assert read_jsonl(tmp_path / "absent.jsonl") == []


# ---- charts: the drawing area reaches from x 72 to 550 and from y 10 (top) to 186 -----------------------------------


def test_a_line_spans_the_drawing_area() -> None:
    chart = line_chart("t", {"a": [(1, 0.0), (3, 1.0)]}, low=0.0, high=1.0)
    assert chart is not None
    assert chart.shapes[0].path == "M72.0 186.0 L550.0 10.0"
    assert [t.label for t in chart.x_ticks] == ["1", "2", "3"]
    assert chart.y_ticks[0].label == "0"
    assert chart.y_ticks[-1].label == "1"


def test_one_point_and_equal_values_can_be_drawn() -> None:
    chart = line_chart("t", {"a": [(5, 0.0)]})
    assert chart is not None
    assert chart.shapes[0].path == "M311.0 186.0"
    assert line_chart("t", {"a": []}) is None


def test_stacked_parts_stand_on_each_other() -> None:
    chart = stacked_bars("t", {"a": {1: 1.0, 2: 3.0}, "b": {1: 3.0}})
    assert chart is not None
    a, b = chart.shapes
    # The scale is 4 units on 176: a of step 1 is the lowest quarter, b the rest.
    assert (a.marks[0].y, a.marks[0].height) == (142.0, 44.0)
    assert (b.marks[0].y, b.marks[0].height) == (10.0, 132.0)
    assert len(b.marks) == 1
    assert stacked_bars("t", {"a": {}}) is None


def test_the_timeline_counts_what_ran_at_once() -> None:
    spans = [Span(name="rollout", start_s=0.0, end_s=10.0), Span(name="rollout", start_s=5.0, end_s=20.0)]
    chart = timeline("t", spans, ("rollout", "grade"), (0.0, 20.0))
    assert chart is not None
    assert [s.name for s in chart.shapes] == ["rollout (up to 2 at once)"]
    assert [t.label for t in chart.y_ticks] == ["rollout", "grade"]
    assert timeline("t", spans, ("rollout",), (30.0, 40.0)) is None
