"""The simulator: draws, simulated parts, and the production scheduler over them in virtual time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from configs.errors import ConfigError
from configs.load import load
from configs.schema import RubricConfig
from configs.trace_schema import TraceConfig
from envs.task import Split, TaskKind
from grader.exchange import GradeRequest, accept, base_state_of
from infra.pool import ActorLost
from orchestrator.cli import app
from orchestrator.simulation.clock import run_virtual
from orchestrator.simulation.figures import Simulation, ideal
from orchestrator.simulation.load import Load, SimulatedSource
from orchestrator.simulation.parts import SimulatedEngines, SimulatedGraders, SimulatedLearner, SimulatedRollouts
from orchestrator.simulation.run import simulate
from orchestrator.simulation.workclock import WorkClock

PUBLISHED = Path(__file__).parents[2] / "configs" / "traces" / "published.yaml"


def small(**changes: Any) -> TraceConfig:
    """Two sources, 12 groups of 4 a step; sections are replaced by keyword."""
    base: dict[str, Any] = {
        "name": "small",
        "steps": 6,
        "warmup_steps": 2,
        "groups_per_step": 12,
        "group_size": 4,
        "sources": {
            "code": {"kind": "code", "share_percent": 75, "time_min": 20, "acceptance": 0.8},
            "chat": {"kind": "general", "share_percent": 25, "time_min": 5, "acceptance": 0.6},
        },
        "rollout": {"slots": 64},
        "grading": {"slots": 8, "time_s": 300},
        "learner": {"tokens_per_s": 8000, "publish_s": 5},
        "scheduler": {"max_inflight_groups": 64, "max_staleness": 3},
    }
    return TraceConfig.model_validate({**base, **changes})


# ---- the trace ------------------------------------------------------------------------------------------------------


def test_the_published_trace_has_the_published_step() -> None:
    trace = load(TraceConfig, PUBLISHED).config
    quotas = trace.quotas()
    assert sum(quotas.values()) == 1568 and 1568 * trace.group_size == 25_088  # M6.5
    assert {n: (s.time_min, s.acceptance) for n, s in trace.sources.items()} == {  # M6.3
        "chat": (16.4, 0.641),
        "visual": (12.1, 1.0),
        "general": (14.2, 0.615),
        "cyber": (50.7, 0.89),
        "code-1": (24.1, 0.995),
        "code-2": (37.2, 0.71),
    }
    assert all(abs(quotas[n] - 15.68 * s.share_percent) < 1.0 for n, s in trace.sources.items())
    assert trace.grading is not None and trace.grading.time_s == 600  # M2.7
    assert trace.scheduler.max_staleness == 4  # M6.4
    assert ideal(trace).bottleneck == "rollout"


def test_errors_name_line_key_value_and_remedy(tmp_path: Path) -> None:
    file = tmp_path / "trace.yaml"
    file.write_text(
        PUBLISHED.read_text().replace("acceptance: 0.641", "acceptance: 1.5").replace("slots: 288", "slot: 1")
    )
    with pytest.raises(ConfigError) as e:
        load(TraceConfig, file)
    text = str(e.value)
    line = 1 + next(i for i, t in enumerate(file.read_text().splitlines()) if "acceptance: 1.5" in t)
    assert f"{file}:{line}: sources.chat.acceptance = 1.5: must be" in text
    assert "grading.slot = 1: unknown key; did you mean grading.slots?" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sources.chat.share_percent=8", "share_percent sum to 101; make them sum to 100"),
        ("warmup_steps=16", "raise steps"),
        ("groups_per_step=5", "leaves no group to"),
    ],
)
def test_impossible_traces_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(TraceConfig, PUBLISHED, [change])


def test_a_scaled_trace_has_the_same_bound() -> None:
    trace = load(TraceConfig, PUBLISHED).config
    assert ideal(trace.scaled(0.1)).bound_s == pytest.approx(ideal(trace).bound_s, rel=0.02)
    assert trace.scaled(10).groups_per_step == 15_680


def test_the_ideal_bound_by_hand() -> None:
    bound = ideal(small())
    # code: 9 / .8 groups x 4 x 1200 s, chat: 3 / .6 x 4 x 300 s, over 64 slots; publishing holds all of them up
    assert bound.rollout_s == pytest.approx((9 / 0.8 * 4 * 1200 + 3 / 0.6 * 4 * 300) / 64 + 5)
    assert bound.grading_s == pytest.approx(9 * 300 / 8)
    assert bound.learning_s == pytest.approx((9 * 4 * 1200 + 3 * 4 * 300) * 20 / 8000 + 5)


# ---- draws ----------------------------------------------------------------------------------------------------------


def test_draws_have_the_trace_s_means_and_depend_on_the_seed_alone() -> None:
    trace = small()
    loads = Load(trace), Load(trace), Load(trace.model_copy(update={"seed": 1}))
    groups = [[one.group("code", f"code-{i}") for i in range(3000)] for one in loads]
    assert groups[0] == groups[1] != groups[2]
    times_s = [t for g in groups[0] for t in g.times_s]
    assert fmean(times_s) == pytest.approx(1200.0, rel=0.03)
    assert fmean(0 < sum(g.passed) < 4 for g in groups[0]) == pytest.approx(0.8, abs=0.03)
    between = fmean((fmean(g.times_s) - 1200.0) ** 2 for g in groups[0])
    within = fmean((t - 1200.0) ** 2 for t in times_s)
    assert between > 0.5 * within, "a long task is long for all of its trajectories"


def test_a_lost_trajectory_is_drawn_anew() -> None:
    one = Load(small(rollout={"slots": 64, "lost_share": 0.5}))
    draws = [one.group("code", f"code-{i}") for i in range(500)]
    first = [one.attempt(g, "code", f"code-{i}/0.0") for i, g in enumerate(draws)]
    again = [one.attempt(g, "code", f"code-{i}/0.1") for i, g in enumerate(draws)]
    assert fmean(a.lost for a in first) == pytest.approx(0.5, abs=0.1)
    assert fmean(a.lost for a in again) == pytest.approx(0.5, abs=0.1)
    assert all(a.time_s != b.time_s for a, b in zip(first, again, strict=True))


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_publishing_holds_every_rollout_up_and_gives_later_tokens_the_new_version() -> None:
    trace = small(learner={"tokens_per_s": 1000, "publish_s": 100})

    async def work() -> tuple[float, Any, float]:
        loop = asyncio.get_running_loop()
        engines = SimulatedEngines(WorkClock())
        one = Load(trace)
        pool = SimulatedRollouts(trace, one, engines)
        task = SimulatedSource("code", TaskKind.CODE).task(Split.TRAIN, 0)
        call = asyncio.create_task(pool.call("rollout", task, "code-0/0.0", "code-0", num_returns=3))
        await asyncio.sleep(1.0)
        assert pool.occupancy() == (1, 64)
        await SimulatedLearner(trace).publish(engines, 7)
        trajectory, refs = await call
        assert len(refs) == 2
        return loop.time(), trajectory, one.group("code", "code-0").times_s[0]

    end_s, trajectory, time_s = run_virtual(work())
    assert end_s == pytest.approx(time_s + 100.0)
    assert trajectory.wall_s == time_s and trajectory.policy_versions == tuple(range(8))


def test_a_pool_runs_no_more_than_its_slots() -> None:
    trace = small(rollout={"slots": 2, "spread": 0})

    async def work() -> tuple[float, int]:
        engines = SimulatedEngines(WorkClock())
        pool = SimulatedRollouts(trace, Load(trace), engines)
        task = SimulatedSource("code", TaskKind.CODE).task(Split.TRAIN, 0)
        calls = [pool.call("rollout", task, f"code-0/{i}.0", "code-0", num_returns=3) for i in range(4)]
        await asyncio.gather(*calls)
        return asyncio.get_running_loop().time(), pool.waiting

    assert run_virtual(work()) == (pytest.approx(2 * 1200.0), 0)


def grade_request(trace: TraceConfig, index: int, attempt: int = 0) -> GradeRequest:
    task = SimulatedSource("code", TaskKind.CODE).task(Split.TRAIN, index)

    async def rollouts() -> list[Any]:
        pool = SimulatedRollouts(trace, Load(trace), SimulatedEngines(WorkClock()))
        ids = [f"code-{index}/{slot}.0" for slot in range(4)]
        calls = [pool.call("rollout", task, i, f"code-{index}", num_returns=3) for i in ids]
        return [trajectory for trajectory, _ in await asyncio.gather(*calls)]

    return GradeRequest(
        group_id=f"code-{index}",
        task=task,
        base_state=base_state_of(task),
        trajectories=tuple(run_virtual(rollouts())),
        order_seed=index,
        attempt=attempt,
    )


def test_simulated_grades_are_ones_that_the_driver_accepts() -> None:
    trace = small()
    requests = [grade_request(trace, index) for index in range(5)]

    async def work() -> list[Any]:
        pool = SimulatedGraders(trace, Load(trace), RubricConfig())
        return await asyncio.gather(*(pool.call("grade", request) for request in requests))

    for request, reply in zip(requests, run_virtual(work()), strict=True):
        assert accept(request, reply) is reply and reply.grade is not None, reply.detail


def test_graders_time_out_fail_and_are_lost() -> None:
    request = grade_request(small(), 0)

    def grade(**changes: Any) -> Any:
        trace = small(grading={"slots": 1, "time_s": 300, "spread": 0, **changes})

        async def work() -> Any:
            reply = await SimulatedGraders(trace, Load(trace), RubricConfig()).call("grade", request)
            return reply.fallback_reason, asyncio.get_running_loop().time()

        return run_virtual(work())

    assert grade() == (None, pytest.approx(300.0))
    assert grade(timeout_s=60) == ("timeout", pytest.approx(60.0))
    assert grade(invalid_share=0.999999)[0] == "schema"
    with pytest.raises(ActorLost):
        grade(lost_share=0.999999)


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def overlap() -> Simulation:
    return simulate(small(rollout={"slots": 64, "lost_share": 0.02}))


def test_a_simulated_run_trains_its_quotas(overlap: Simulation) -> None:
    assert [s.number for s in overlap.steps] == [1, 2, 3, 4, 5, 6]
    assert all(s.trained == {"code": 9, "chat": 3} for s in overlap.steps)
    assert overlap.trained_share == overlap.target_share == {"code": 0.75, "chat": 0.25}
    assert max(overlap.staleness) <= 3, "M6.4"
    assert any(s.retries for s in overlap.steps)


def test_no_step_beats_the_ideal_for_long_and_pools_are_never_overfull(overlap: Simulation) -> None:
    assert overlap.step_s > 0.8 * ideal(overlap.trace).bound_s
    assert 0.5 < overlap.occupancy("rollout") <= 1.0
    assert 0.0 < overlap.occupancy("grading") <= 1.0 and 0.0 < overlap.occupancy("learning") <= 1.0
    assert all(sum(s.rolling.values()) <= 64 and sum(s.grading.values()) <= 8 for s in overlap.samples)


def test_the_same_seed_gives_the_same_run(overlap: Simulation) -> None:
    def plain(run: Simulation) -> Any:
        return [replace(s, cpu_s=0.0, rss_mib=0.0) for s in run.steps], run.samples

    assert plain(simulate(overlap.trace)) == plain(overlap)


def test_grading_after_collection_is_slower_on_the_same_pools(overlap: Simulation) -> None:
    sequential = simulate(overlap.trace, schedule="sequential")
    assert sequential.step_s > 1.2 * overlap.step_s
    busy = [(sum(s.rolling.values()), sum(s.grading.values())) for s in sequential.samples]
    assert any(graded for _, graded in busy)


@pytest.mark.parametrize(
    ("change", "oldest"),
    [({"async": False}, 0), ({"max_staleness": 1}, 1), ({"max_staleness": 2, "stale": "wait"}, 2)],
)
def test_no_token_older_than_allowed_is_trained(change: dict[str, Any], oldest: int) -> None:
    """M6.4, with rollouts that take longer than a step."""
    scheduler = {"max_inflight_groups": 64, **change}
    run = simulate(small(rollout={"slots": 64, "spread": 0.8}, scheduler=scheduler))
    assert max(run.staleness) <= oldest
    if change.get("stale") == "wait":
        assert run.ended["dropped_stale"] == 0


def test_without_graders_nothing_is_graded() -> None:
    run = simulate(small(grading=None, steps=3, warmup_steps=1))
    assert len(run.steps) == 3 and run.occupancy("grading") == 0.0


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    import yaml

    file = tmp_path / "trace.yaml"
    file.write_text(yaml.safe_dump(small(steps=3, warmup_steps=1).model_dump(mode="json", exclude={"scheduler"})))
    arguments = [
        "simulate",
        str(file),
        "rollout.slots=48",
        "--compare",
        "overlap,sequential",
        "--output",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "overlap: step 3:" in result.output and "step time / ideal bound" in result.output
    assert "times as fast as sequential" in result.output
    for schedule in ("overlap", "sequential"):
        page = (tmp_path / f"{schedule}.html").read_text(encoding="utf-8")
        assert "Rollout slots by source" in page and "<script src=" not in page, "opens without a network"
        assert (tmp_path / f"{schedule}.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "simulation.json").read_text(encoding="utf-8"))
    assert [r["schedule"] for r in results] == ["overlap", "sequential"] and results[0]["steps"] == 3


def test_the_command_warns_of_a_bound_that_leaves_pools_idle(tmp_path: Path) -> None:
    few = ["scheduler={max_inflight_groups: 300}", "steps=1", "warmup_steps=0", "--scale", "0.02"]
    result = CliRunner().invoke(app, ["simulate", str(PUBLISHED), *few, "--output", str(tmp_path)])
    said = " ".join(result.output.split())
    assert "warning: scheduler.max_inflight_groups = 6: may leave pools idle: 410 rollout slots" in said


def test_an_unknown_schedule_is_one_message() -> None:
    result = CliRunner().invoke(app, ["simulate", str(PUBLISHED), "--compare", "fast"])
    assert isinstance(result.exception, ConfigError) and "choose from overlap, sequential" in str(result.exception)
