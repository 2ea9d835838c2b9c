from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from configs.schema import WandbConfig
from infra.errors import StorageError
from infra.sinks import JsonlFile, histogram
from infra.spans import Span, merged, overlap_share, without
from infra.telemetry import Telemetry
from infra.wandb_sink import wandb_mode

OFF = WandbConfig(mode="disabled")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rollout(group_id: str, start_s: float, end_s: float) -> Span:
    return Span(name="rollout", start_s=start_s, end_s=end_s, attrs={"group_id": group_id})


def grade(group_id: str, start_s: float, end_s: float) -> Span:
    return Span(name="grade", start_s=start_s, end_s=end_s, attrs={"group_id": group_id})


# ---- spans ----------------------------------------------------------------------------------------------------------


def test_union_and_difference_of_intervals() -> None:
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 6)]
    assert without([(0, 10)], [(1, 2), (4, 6), (9, 12)]) == [(0, 1), (2, 4), (6, 9)]
    assert without([(0, 1), (2, 3)], [(0, 5)]) == []


def test_grading_overlaps_rollouts_of_others() -> None:
    # Grade 4..8; others roll 0..5 and 7..10: 1 s + 1 s of 4 s.
    found = overlap_share([rollout("b", 0, 5), rollout("c", 7, 10), grade("a", 4, 8)], (0, 10))
    assert (found.grading_s, found.overlapped_s, found.share) == (4, 2, 0.5)
    assert (found.graded_groups, found.overlapped_groups) == (1, 1)


def test_a_groups_own_rollouts_do_not_count() -> None:
    found = overlap_share([rollout("a", 0, 10), grade("a", 4, 8)], (0, 10))
    assert (found.grading_s, found.overlapped_s, found.overlapped_groups) == (4, 0, 0)
    # Together with another group's rollout from 6 on only that one's part counts.
    both = overlap_share([rollout("a", 0, 10), rollout("b", 6, 10), grade("a", 4, 8)], (0, 10))
    assert both.overlapped_s == 2


def test_several_groups_and_rollouts_at_once_count_each_grading_second_once() -> None:
    spans = [rollout("x", 0, 3), rollout("y", 2, 6), grade("a", 1, 5), grade("b", 5, 9), grade("c", 7, 8)]
    found = overlap_share(spans, (0, 10))
    # a: 4 of 4 s; b: 1 of 4 s; c: 0 of 1 s.
    assert (found.grading_s, found.overlapped_s) == (9, 5)
    assert (found.graded_groups, found.overlapped_groups) == (3, 2)


def test_only_the_window_counts_and_no_grading_means_no_share() -> None:
    spans = [rollout("x", 0, 3), grade("a", 1, 5)]
    found = overlap_share(spans, (2, 4))
    assert (found.grading_s, found.overlapped_s) == (2, 1)
    assert overlap_share(spans, (6, 9)).share is None


# ---- files ----------------------------------------------------------------------------------------------------------


def test_take_sees_running_work_and_forgets_what_ended_in_the_window(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, wandb=OFF, config={})
    now = time.monotonic()
    telemetry.record_span("rollout", now - 5.0, now - 4.0, group_id="old")
    telemetry.record_span("rollout", now - 3.0, now - 1.0, group_id="inside")
    telemetry.record_span("rollout", now - 2.0, now + 5.0, group_id="beyond")
    with telemetry.span("grade", group_id="running"):
        first = telemetry.take((now - 3.5, now + 1.0))
    assert [s.attrs["group_id"] for s in first] == ["inside", "beyond", "running"]
    assert first[-1].end_s == now + 1.0
    second = telemetry.take((now + 1.0, now + 10.0))
    assert [s.attrs["group_id"] for s in second] == ["beyond"]
    telemetry.close()


def test_spans_are_written_when_the_body_raises_and_tied_to_the_wall_clock(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, wandb=OFF, config={})
    with pytest.raises(ZeroDivisionError), telemetry.span("learn", step=3):
        raise ZeroDivisionError
    telemetry.close()
    anchor, span = lines(tmp_path / "spans.jsonl")
    assert (span["name"], span["step"]) == ("learn", 3)
    shift = anchor["anchor"]["unix_s"] - anchor["anchor"]["monotonic_s"]
    assert abs(span["end_s"] + shift - time.time()) < 60.0
    assert span["end_s"] >= span["start_s"] >= anchor["anchor"]["monotonic_s"] - 1e-3


def test_a_step_is_on_the_disk_when_log_step_returns(tmp_path: Path) -> None:
    telemetry = Telemetry(tmp_path, wandb=OFF, config={})
    telemetry.log_step(1, {"learner/loss": 0.5, "learner/entropy": float("nan")}, {"redistribution/lambda": [1.0, 1.5]})
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert (row["step"], row["learner/loss"], row["learner/entropy"]) == (1, 0.5, None)
    assert sum(row["histograms"]["redistribution/lambda"]["counts"]) == 2
    telemetry.close()


def test_a_second_session_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        telemetry = Telemetry(tmp_path, wandb=OFF, config={})
        telemetry.log_step(step, {"learner/loss": 0.0})
        telemetry.close()
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert sum("anchor" in row for row in lines(tmp_path / "spans.jsonl")) == 2


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another `output`"):
        Telemetry(tmp_path / "file" / "run", wandb=OFF, config={})


def test_histogram_bins() -> None:
    h = histogram([0.0, 1.0, 10.0, 20.0, float("inf")])
    assert h is not None
    # Twenty bins of width 1: 0 -> bin 0, 1 -> bin 1, 10 -> bin 10, and the maximum belongs to the last one.
    assert [i for i, c in enumerate(h["counts"]) if c] == [0, 1, 10, 19]
    assert (len(h["edges"]), h["edges"][0], h["edges"][-1]) == (21, 0.0, 20.0)
    assert histogram([2.0, 2.0]) == {"edges": [2.0, 2.0], "counts": [2]}
    assert histogram([float("nan")]) is None


# ---- Weights & Biases -----------------------------------------------------------------------------------------------


def test_auto_mode_follows_the_login_without_the_network(tmp_path: Path) -> None:
    auto = WandbConfig()
    assert wandb_mode(auto, environ={}, home=tmp_path) == "offline"
    assert wandb_mode(auto, environ={"WANDB_API_KEY": "k"}, home=tmp_path) == "online"
    assert wandb_mode(auto, environ={"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, home=tmp_path) == "offline"
    assert wandb_mode(WandbConfig(mode="disabled"), environ={"WANDB_API_KEY": "k"}, home=tmp_path) == "disabled"
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine example.org login user password p\n")
    assert wandb_mode(auto, environ={}, home=tmp_path) == "offline"
    netrc.write_text("machine api.wandb.ai login user password p\n")
    assert wandb_mode(auto, environ={}, home=tmp_path) == "online"
    assert wandb_mode(auto, environ={"WANDB_BASE_URL": "https://wandb.example.org"}, home=tmp_path) == "offline"
    elsewhere = tmp_path / "keys"
    elsewhere.write_text("machine wandb.example.org login user password p\n")
    environ = {"WANDB_BASE_URL": "https://wandb.example.org", "NETRC": str(elsewhere)}
    assert wandb_mode(auto, environ=environ, home=tmp_path) == "online"


def test_offline_runs_land_in_the_run_folder_under_one_id(tmp_path: Path) -> None:
    run_dir = tmp_path / "demo"
    for step in (1, 2):
        telemetry = Telemetry(run_dir, wandb=WandbConfig(mode="offline"), config={"seed": 3})
        telemetry.log_step(step, {"learner/loss": 0.25}, {"redistribution/lambda": [1.0, 1.5]})
        telemetry.alert("the graders fall back", "26 of the last 50 groups")
        telemetry.close()
        time.sleep(1.1)  # W&B names its folders by the second
    run_id = (run_dir / "wandb_run_id").read_text().strip()
    files = sorted((run_dir / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(files) == 2
    content = files[0].read_bytes()
    assert b"learner/loss" in content
    assert b"redistribution/lambda_histogram" in content
    assert b"the graders fall back" in content and b"26 of the last 50 groups" in content


def test_a_wandb_failure_is_one_warning_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gagar.telemetry"):
        # W&B refuses a project name with a slash when it starts.
        telemetry = Telemetry(tmp_path, wandb=WandbConfig(mode="offline", project="a/b"), config={})
        for step in range(5):
            telemetry.log_step(step, {"learner/loss": 0.0})
        telemetry.close()
    assert [r.message.partition(" (")[0] for r in caplog.records] == ["Weights & Biases: switched off"]
    assert len(lines(tmp_path / "metrics.jsonl")) == 5


@pytest.mark.parametrize(
    ("held", "kept"),
    [
        (b"", []),
        (b'{"a": 1}\n', [{"a": 1}]),
        (b'{"a": 1}\n{"a": 2, "b', [{"a": 1}]),  # killed while it wrote
        (b'{"a": 1}\n{"a": 2}', [{"a": 1}, {"a": 2}]),
        (b'{"a": 1}\n{"a": "' + b"x" * 200_000, [{"a": 1}]),
        (b'{"a": "\xc3', []),
    ],
)
def test_a_torn_last_line_does_not_spoil_the_next_one(tmp_path: Path, held: bytes, kept: list[dict[str, Any]]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(held)
    file = JsonlFile(path, sync=False)
    file.append({"a": 3})
    file.close()
    assert lines(path) == [*kept, {"a": 3}]
