from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graded_run import fallback, hack, record_of, write_run
from html_page import Page
from run_folder import group, make_run, records, trajectory
from stored_groups import CLEAN, HARDCODED, stored_group, task, transcript

from grader.stored import StoredGroup, archive_path
from infra.errors import StorageError
from infra.spans import Span
from orchestrator.browse import EXTREMES, MAX_VIEWS, group_lists, to_show
from orchestrator.charts import line_chart, stacked_bars, timeline
from orchestrator.report import group_row, write_report
from orchestrator.runfiles import read_jsonl, read_spans
from rollout.trajectory import Turn


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
    assert page.external() == []


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


# ---- graded groups ---------------------------------------------------------------------------------------------------


def graded(group_id: str, first: str, second: str, **options: Any) -> tuple[StoredGroup, dict[str, Any]]:
    """Two passes and a failure; a clean patch is T1 (f 1), a hard-coded one T2 (f .85)."""
    stored = stored_group(group_id, patches={"0.0": (True, first), "1.0": (True, second), "2.0": (False, "")})
    return stored, record_of(stored, **options)


def graded_groups() -> list[tuple[StoredGroup, dict[str, Any]]]:
    return [
        graded("good", CLEAN, CLEAN),
        graded("mixed", CLEAN, HARDCODED),
        graded("poor", HARDCODED, HARDCODED),
        graded("fell", CLEAN, HARDCODED, change=fallback),
        graded("hacked", CLEAN, HARDCODED, change=hack("1.0", "turn:2")),
    ]


def test_graded_groups_are_listed_by_what_is_worth_a_look() -> None:
    """Mean f: good 1, hacked 1 (the hack has none), mixed .925, poor .85; only mixed has passes of different f."""
    lists = {
        one.title: [e.record["group_id"] for e in one.entries] for one in group_lists([r for _, r in graded_groups()])
    }
    assert lists == {
        "Best": ["good", "hacked"],
        "Worst": ["poor", "mixed"],
        "Contested": ["mixed"],
        "Hacks": ["hacked"],
        "Fallbacks": ["fell"],
    }
    assert group_lists(records()[4:]) == []


def test_all_hacks_and_fallbacks_are_listed_and_a_page_shows_a_bounded_number() -> None:
    _, record = graded("fell", CLEAN, CLEAN, change=fallback)
    many = [{**record, "group_id": f"fell-{i}"} for i in range(MAX_VIEWS + 30)]
    _, good = graded("good", CLEAN, HARDCODED)
    goods = [{**good, "group_id": f"good-{i}"} for i in range(3 * EXTREMES)]
    lists = {one.title: one.entries for one in group_lists([*many, *goods])}
    assert len(lists["Fallbacks"]) == MAX_VIEWS + 30
    assert [len(lists[title]) for title in ("Best", "Worst", "Contested")] == [EXTREMES] * 3
    shown = [r["group_id"] for r in to_show(group_lists([*many, *goods]))]
    assert len(shown) == len(set(shown)) == MAX_VIEWS


def test_a_graded_group_is_shown_side_by_side_with_links_to_its_evidence(tmp_path: Path) -> None:
    write_run(tmp_path, graded_groups())
    page = Page(write_report(tmp_path))
    assert page.external() == []
    assert len(page.ids) == len(set(page.ids))
    for part in (
        "Graded groups",
        "Contested",
        "total([1, 2]) returns -3",
        "Fallback: not_json",
        "(no JSON)",
        "3 changed lines",
    ):
        assert part in page.text
    places = {link: page.text_at(link) for link in page.links()}
    assert sum(text.startswith("back to the lists") for text in places.values()) == 5
    assert "2submit" in places.values(), "the hack's citation of a turn leads to that turn"


def test_groups_without_an_archive_or_with_a_damaged_one_are_still_listed(tmp_path: Path) -> None:
    write_run(tmp_path, graded_groups())
    archive_path(tmp_path / "archive", "good").write_bytes(b"no gzip")
    archive_path(tmp_path / "archive", "poor").unlink()
    page = Page(write_report(tmp_path))
    assert "good.json.gz: cannot be read" in page.text
    assert page.text.count("This group is not archived") == 1


def test_hostile_groups_stay_text(tmp_path: Path) -> None:
    evil = "</pre></div><script>alert(1)</script><a href=http://x>\x1b[2J\u202e\ud800"
    patch = CLEAN.replace("result += item", evil).replace("shop/core.py", 'shop/"onload="x')
    stored = stored_group("g1", task=task(statement=evil), patches={"0.0": (True, patch), "2.0": (False, evil)})
    stored = replace(
        stored,
        transcripts=tuple(
            transcript(t.trajectory_id, t.patch, test_log=evil, turns=(turn_of(evil),)) for t in stored.transcripts
        ),
    )
    record = record_of(stored)
    record["grader"].update(
        detail=evil,
        verdict=evil,
        model=evil,
        reasons={"g1/0.0": [evil] * 5},
        evidence={"g1/0.0": [evil, "turn:1", "turn:99", "run:1", "log:x"]},
        checks=[{"number": 1, "candidate": evil, "command": evil, "exit_code": None}],
    )
    write_run(tmp_path, [(stored, {**record, "fallback_reason": evil})])
    page = Page(write_report(tmp_path))
    assert page.external() == []
    assert not {"script", "img", "iframe", "form"} & set(page.tags)
    assert "\x1b" not in page.text and "\u202e" not in page.text
    assert page.text.count("<script>alert(1)</script>") > 10


def turn_of(text: str) -> Turn:
    return Turn(action=text, observation=text, exit_code=1, duration_s=0.0, response_tokens=1)


def test_a_page_stays_small_enough_to_open(tmp_path: Path) -> None:
    huge = "".join(f"+line {i} {'x' * 200}\n" for i in range(3000))
    patch = f"diff --git a/x.py b/x.py\nnew file mode 100644\n--- /dev/null\n+++ b/x.py\n@@ -0,0 +1,3000 @@\n{huge}"
    long = "y" * 100_000
    stored = stored_group("g1", patches={"0.0": (True, patch), "2.0": (False, "")})
    stored = replace(stored, transcripts=tuple(replace(t, turns=(turn_of(long),) * 500) for t in stored.transcripts))
    write_run(tmp_path, [(stored, record_of(stored))])
    assert write_report(tmp_path).stat().st_size < 2_000_000


def test_a_run_that_has_barely_begun_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert "No step has finished yet." in Page(write_report(tmp_path)).text


def test_a_killed_run_has_a_report(tmp_path: Path) -> None:
    make_run(tmp_path)
    for name in ("metrics.jsonl", "groups.jsonl", "spans.jsonl", "eval.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "torn')
    assert "1 optimiser steps, 7 groups." in Page(write_report(tmp_path)).text


def test_the_report_says_what_bounded_the_steps(tmp_path: Path) -> None:
    """Method M7; the figures are those of run_folder.spans."""
    make_run(tmp_path)
    page = Page(write_report(tmp_path))
    assert "the last rollouts bound 50 % of the step" in page.text
    assert "while 1.0 rollout slots were free" in page.text
    assert "What bounded a step, share of it" in page.text
    assert f"gagar trace {tmp_path}" in page.text
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "spans.jsonl").unlink()
    assert "timeline" not in Page(write_report(tmp_path)).ids


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
