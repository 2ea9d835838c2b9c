"""The page about several runs: arms and seeds, bands, costs and differences by hand; it stays one safe file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluations import simple
from graded_run import record_of
from html_page import Page
from run_folder import make_run
from scripted import run_config
from stored_groups import stored_group

from configs.schema import RunConfig
from grader.stored import write_archive
from infra.errors import StorageError
from orchestrator.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, band_chart, heat_map, stacked_bars
from orchestrator.cost import StepCost, at_most, compare, step_costs
from orchestrator.evaluation import write_evaluation
from orchestrator.metrics import pool_units
from orchestrator.report_compare import (
    band,
    config_differences,
    heldout_table,
    names_of,
    read_run,
    runs_of,
    write_comparison,
)


def make(folder: Path, passes: list[int] | None = None, **changes: Any) -> Path:
    """A run of one step, like every other run of these tests, with one graded group and a held-out evaluation."""
    group = stored_group()
    make_run(folder, groups=[record_of(group)])
    write_archive(folder / "archive", group)
    config = run_config(name=folder.name, **changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    if passes is not None:
        write_evaluation(folder / "evaluations" / "after.json", simple(folder.name, passes, t1=1))
    return folder


def test_arms_seeds_differences_and_groups_are_on_one_page(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / "base-s0", [1, 2, 0]),
        make(tmp_path / "base-s1", [1, 1, 0], seed=1),
        make(tmp_path / "other-s0", [3, 3, 0], algorithm={"group_size": 4, "lambda_max": 1.2}),
        make(tmp_path / "other-s1", [3, 3, 0], algorithm={"group_size": 4, "lambda_max": 1.2}, seed=1),
    ]
    page = Page(write_comparison(runs, tmp_path / "page.html"))
    assert "2 arms, 4 runs" in page.text and "base (2)" in page.text
    assert "66.7 [" in page.text and "+38.9 [" in page.text, "12 of 18 against 5 of 18"
    assert "algorithm.lambda_max" in page.text and "scheduler.max_staleness" not in page.text
    assert f"base-s0/{stored_group().group_id}" in page.text and "view" in {
        v for k, v in page.attributes if k == "class"
    }
    assert "script" not in page.tags and "link" not in page.tags
    assert not any(v and v.startswith(("http", "//")) for _, v in page.attributes if v)


def test_hostile_names_and_values_stay_text(tmp_path: Path) -> None:
    run = make(tmp_path / "a-s0")
    lines = json.loads((run / "groups.jsonl").read_text())
    lines["group_id"] = lines["task_id"] = "<script>alert(1)</script>\u202e"
    lines["fallback_reason"], lines["graded"] = "<img src=x>", False
    (run / "groups.jsonl").write_text(json.dumps(lines) + "\n")
    text = write_comparison([run, make(tmp_path / "b-s0")], tmp_path / "page.html").read_text()
    assert "<script" not in text and "<img" not in text and "\u202e" not in text
    Page(tmp_path / "page.html")


def test_an_experiment_stands_for_its_cells_and_no_run_is_an_error(tmp_path: Path) -> None:
    make(tmp_path / "exp" / "a-s0")
    make(tmp_path / "exp" / "a-s1")
    make(tmp_path / "exp" / "a-s1.20261130-120000")
    for name in ("base-s10", "base-s9", "left-over-s0"):
        make(tmp_path / "exp" / name)
    spec = tmp_path / "exp" / "experiment.yaml"
    spec.write_text("name: exp\nreference: base\narms: {a: {}, base: {}}\n")
    names = [p.name for p in runs_of([tmp_path / "exp"])]
    assert names == ["base-s9", "base-s10", "a-s0", "a-s1", "left-over-s0"]
    spec.write_text("name: exp\n")
    with pytest.raises(StorageError, match=r"experiment\.yaml: cannot be read .*name the runs one by one"):
        runs_of([tmp_path / "exp"])
    with pytest.raises(StorageError, match="not the folder of a run"):
        runs_of([tmp_path])
    (tmp_path / "exp" / "a-s0" / "config.yaml").write_text("name: [")
    with pytest.raises(StorageError, match=r"config\.yaml: cannot be read"):
        read_run(tmp_path / "exp" / "a-s0", "a-s0")


def test_a_cell_has_its_evaluation_beside_it(tmp_path: Path) -> None:
    cell = make(tmp_path / "exp" / "a-s0")
    assert read_run(cell, "a-s0").evaluation is None
    write_evaluation(tmp_path / "exp" / "evaluations" / "a-s0.json", simple("a-s0", [1]))
    found = read_run(cell, "a-s0")
    assert found.evaluation is not None and found.evaluation.label == "a-s0" and (found.arm, found.seed) == ("a", 0)


def test_runs_are_themselves_once_and_told_apart_by_their_folders(tmp_path: Path) -> None:
    one, other = make(tmp_path / "x" / "a-s0", [1, 1]), make(tmp_path / "y" / "a-s0", [3, 3])
    assert runs_of([one, tmp_path / "x" / ".." / "x" / "a-s0"]) == [tmp_path / "x" / ".." / "x" / "a-s0"]
    assert names_of([one]) == ["a-s0"] and names_of([one, other]) == ["x/a-s0", "y/a-s0"]
    page = Page(write_comparison([one, other, one], tmp_path / "page.html"))
    assert "2 arms, 2 runs" in page.text, "not two seeds of one arm"
    group_id = stored_group().group_id
    assert f"x/a-s0/{group_id}" in page.text and f"y/a-s0/{group_id}" in page.text


def test_held_out_differences_are_paired_by_seed_not_by_place(tmp_path: Path) -> None:
    """a has seeds 0, 1, 2, b has 2 and 1: a passes one of three more in each of these, and far fewer in seed 0."""
    passes = {"a-s0": [0] * 4, "a-s1": [1] * 4, "a-s2": [3] * 4, "b-s2": [2] * 4, "b-s1": [0] * 4}
    arms: dict[str, list[Any]] = {}
    for name, counts in passes.items():
        run = read_run(make(tmp_path / name, counts), name)
        arms.setdefault(run.arm, []).append(run)
    table = heldout_table({"b": arms["b"], "a": arms["a"]})
    assert table is not None and table.rows[1] == ("less b", ("", "+33.3 [+33.3, +33.3] points"))
    lonely = heldout_table({"b": arms["b"], "a": arms["a"][:1]})
    assert lonely is not None and lonely.rows[1] == (lonely.less, ("", "-")), "no seed in common"
    single = heldout_table({"b": arms["b"][:1], "a": arms["a"][1:2]})
    assert single is not None and single.rows[1][1][1].startswith("-33.3"), "one run each: by task"
    short = read_run(make(tmp_path / "c", [1]), "c")
    none = heldout_table({"a": arms["a"], "c": [short]})
    assert none is not None and not none.rows and "evaluated on other tasks" in none.note
    assert (
        "evaluated on other tasks" in write_comparison([tmp_path / "a-s0", tmp_path / "c"], tmp_path / "x").read_text()
    )


def test_configurations_differ_by_key(tmp_path: Path) -> None:
    """Also keys of a section that the first arm has not, and seeds of an arm in one cell."""
    plain = {"algorithm": {"mode": "outcome", "group_size": 4}, "grader": None}
    judge = {"backend": {"type": "vllm", "engine": {"model": "judge"}}}
    arms = {
        "outcome": [read_run(make(tmp_path / f"o-s{i}", seed=i, **plain), f"o-s{i}") for i in (0, 1)],
        "group": [read_run(make(tmp_path / "g-s0", grader=judge), "g-s0")],
        "each": [read_run(make(tmp_path / "e-s0", grader={**judge, "scope": "candidate"}), "e-s0")],
    }
    assert config_differences(arms) == [
        ("algorithm.mode", ("outcome", "redistribute", "redistribute")),
        ("grader", ("-", "a section", "a section")),
        ("grader.scope", ("-", "group", "candidate")),
        ("seed", ("0, 1", "0", "0")),
    ]


def test_a_band_goes_from_the_least_to_the_most_of_those_that_are_there() -> None:
    assert band([{1: 0.2, 2: 0.4}, {1: 0.6}]) == [(1.0, pytest.approx(0.4), 0.2, 0.6), (2.0, 0.4, 0.4, 0.4)]
    chart = band_chart("t", {"x": [(0.0, 0.5, 0.0, 1.0), (4.0, 0.5, 0.0, 1.0)]})
    assert chart is not None
    left, right, top, bottom = LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM
    assert chart.shapes[0].area == (
        f"M{left:.1f} {top:.1f} L{right:.1f} {top:.1f} L{right:.1f} {bottom:.1f} L{left:.1f} {bottom:.1f} Z"
    )
    assert band_chart("t", {"x": []}) is None


@pytest.mark.parametrize(
    ("top", "labels"),
    [
        (0.9, ["0", "0.5"]),
        (8_000.0, ["0", "2000", "4000", "6000", "8000"]),
        (410_000.0, ["0", "200k", "400k"]),
        (5.1e6, ["0", "2M", "4M"]),
    ],
)
def test_numbers_at_an_axis_are_short(top: float, labels: list[str]) -> None:
    chart = stacked_bars("t", {"x": {1: top}})
    assert chart is not None and [tick.label for tick in chart.y_ticks] == labels


def test_a_heat_map_shades_shares_of_a_step() -> None:
    chart = heat_map("t", {1: [(1.0, 3.0), (2.0, 1.0)], 2: [(2.0, 5.0)]}, rows=2)
    assert chart is not None
    assert [round(m.weight, 2) for m in chart.shapes[0].marks] == [0.75, 0.25, 1.0]
    assert chart.shapes[0].marks[0].y > chart.shapes[0].marks[1].y, "larger values stand higher"
    assert heat_map("t", {}) is None


def cost(step: int, tokens: float, compute: float, rate: float, each: float = 50.0) -> StepCost:
    return StepCost(
        step=step, wall_s=10.0 * step, trajectories=10 * step, tokens=tokens, busy={"rollout": compute, "grader": 0.0,
        "learner": 0.0}, cost_usd=0.0, pass_rate=rate, step_tokens=each, queue_s=1.0, fallback_rate=0.0,
    )  # fmt: skip


def test_equal_steps_tokens_and_compute_by_hand() -> None:
    slow = [cost(i, 100.0 * i, 10.0 * i, 0.1 * i, 100.0) for i in range(1, 5)]
    quick = [cost(i, 50.0 * i, 20.0 * i, 0.2 * i, 50.0) for i in range(1, 6)]
    found = compare({"slow": {0: slow}, "quick": {0: quick}}, "slow")
    # Four steps in common; then slow has 400 tokens and 40 s, quick 200 tokens and 80 s.
    assert found["slow"]["steps"] == found["quick"]["steps"] == 4.0
    assert found["slow"]["steps_at_equal_tokens"] == 2.0 and found["quick"]["steps_at_equal_tokens"] == 4.0
    assert found["quick"]["steps_at_equal_compute"] == 2.0 and found["slow"]["steps_at_equal_compute"] == 4.0
    assert found["slow"]["pass_rate_at_equal_tokens"] == pytest.approx((0.1 + 0.2) / 2)
    assert found["quick"]["pass_rate_at_equal_compute"] == pytest.approx((0.2 + 0.4) / 2)
    assert found["quick"]["tokens_saved"] == pytest.approx(0.5) and found["slow"]["tokens_saved"] == 0.0
    assert at_most(slow, 99.0, "tokens") is None


def test_costs_are_of_the_seeds_that_all_arms_have_and_of_runs_with_a_step() -> None:
    """Seed 1 has other tasks: an arm that lacks it must not be held against a mean over both."""
    arm = {seed: [cost(1, 100.0 + 100.0 * seed, 1.0, 0.1 + seed, 50.0 + seed)] for seed in (0, 1)}
    found = compare({"both": arm, "one": {0: arm[0], 1: []}, "none": {0: []}}, "absent")
    assert sorted(found) == ["both", "one"] and found["both"] == found["one"]
    assert found["both"]["seeds"] == 1.0 and found["both"]["tokens"] == 100.0 and found["both"]["pass_rate"] == 0.1
    assert found["both"]["tokens_saved"] is None, "the reference is not there, and nothing else stands for it"
    apart = compare({"a": {0: arm[0]}, "b": {1: arm[1]}}, "a")
    assert apart["b"]["seeds"] == 1.0 and apart["b"]["tokens_saved"] == pytest.approx(1.0 - 51.0 / 50.0)
    assert compare({"a": {0: []}}, "a") == {}
    dear = {0: arm[0], 1: [cost(1, 900.0, 1.0, 0.9)]}
    found = compare({"cheap": arm, "dear": dear}, "cheap")
    assert found["dear"]["steps_at_equal_tokens"] is found["dear"]["pass_rate_at_equal_tokens"] is None
    assert found["dear"]["pass_rate_at_equal_compute"] == pytest.approx((0.1 + 0.9) / 2)


def test_canaries_cost_what_graders_cost_and_a_step_takes_its_own_part_of_a_span(tmp_path: Path) -> None:
    run = make(tmp_path / "a", grader={"backend": {"type": "vllm", "engine": {"model": "judge", "threads": 1}}})
    metrics = [{"step": i, "time_s": 1000.0 + 10 * i, "time/step_s": 10.0} for i in (1, 2)]
    metrics.append({"step": 3, "time_s": 1020.0})
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    spans = [("grade", 2.0, 4.0), ("canary", 3.0, 6.0), ("canary", 8.0, 13.0), ("rollout", 5.0, 25.0)]
    lines = [{"anchor": {"unix_s": 1000.0, "monotonic_s": 0.0}}]
    lines += [{"name": name, "start_s": start, "end_s": end} for name, start, end in spans]
    (run / "spans.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = RunConfig.model_validate(yaml.safe_load((run / "config.yaml").read_text()))
    units = pool_units(config)
    costs = step_costs(run, config)
    assert [c.busy["grader"] / units["grader"] for c in costs] == [4.0 + 2.0, 6.0 + 3.0, 9.0]
    assert [c.busy["rollout"] / units["rollout"] for c in costs] == [5.0, 15.0, 15.0] and costs[2].wall_s == 20.0


def test_costs_of_a_run_are_read_from_its_files(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    metrics = json.loads((run / "metrics.jsonl").read_text())
    (only,) = step_costs(run, RunConfig.model_validate(yaml.safe_load((run / "config.yaml").read_text())))
    count = sum(metrics["histograms"]["trajectories/response_tokens"]["counts"])
    assert only.trajectories == count
    assert only.tokens == pytest.approx(count * metrics["trajectories/response_tokens_mean"])
    assert only.wall_s == pytest.approx(metrics["time/step_s"]) and only.busy["learner"] > 0.0
    assert only.compute_s == pytest.approx(sum(only.busy.values()))
