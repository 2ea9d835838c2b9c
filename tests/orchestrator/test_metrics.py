from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import jsonschema
import pytest
from run_folder import STATS, facts, group, records, reply, trajectory

from configs.schema import EndpointGraderBackend, EngineConfig, GraderConfig, LearnerConfig, RunConfig
from infra.spans import Span
from orchestrator.metrics import pool_units, step_metrics

ROOT = Path(__file__).parents[2]


def documented() -> set[str]:
    """First cells of the tables of docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))


def test_each_emitted_name_is_documented_and_each_documented_name_is_emitted() -> None:
    metrics = step_metrics(facts())
    names = {*metrics.scalars, *metrics.histograms}
    general = {re.sub(r"/(minirepo|arith)(?=/|$)", "/{source}", n) for n in names}
    general = {re.sub(r"^(grading/fallback_rate)/timeout$", r"\1/{reason}", n) for n in general}
    general = {re.sub(r"^(infra/failures)/\w+$", r"\1/{class}", n) for n in general}
    # Of the run around the scheduler: tests/e2e/test_training.py has them.
    around = {name for name in documented() if name.startswith(("eval/", "pool/", "restarts/", "storage/"))}
    assert general | around == documented()


def test_the_fixture_is_a_valid_audit_trail_and_both_copies_of_the_schema_agree() -> None:
    shipped = json.loads((ROOT / "orchestrator" / "groups.schema.json").read_text(encoding="utf-8"))
    copy = json.loads((ROOT / "tests" / "data" / "groups.schema.json").read_text(encoding="utf-8"))
    assert shipped == copy
    for record in records():
        jsonschema.validate(record, shipped)


def test_redistribution_follows_the_graded_trained_groups() -> None:
    metrics = step_metrics(facts())
    got = {k.removeprefix("redistribution/"): v for k, v in metrics.scalars.items() if k.startswith("redistribution/")}
    assert got == pytest.approx(
        {
            "lambda_mean": (5 / 3 + 40 / 37) / 2,
            "lambda_p50": (5 / 3 + 40 / 37) / 2,
            "lambda_p95": 40 / 37 + 0.95 * (5 / 3 - 40 / 37),
            "lambda_capped_rate": 0.5,
            "factor_mean": (1.0 + 0.2 + 1.0 + 0.85) / 4,
            # The capped group's failing side went from -.5 to -.475, the other one's stayed.
            "failing_shift_mean": 0.0125,
        }
    )
    assert metrics.histograms["redistribution/lambda"] == [5 / 3, 40 / 37]
    assert sorted(metrics.histograms["redistribution/factor"]) == [0.2, 0.85, 1.0, 1.0]
    assert len(metrics.histograms["redistribution/advantage"]) == 4 + 4 + 2 + 2


def test_grading_counts_every_group_that_was_asked_about() -> None:
    scalars = step_metrics(facts()).scalars
    # Asked: capped, exact, fallback, hacked.
    assert scalars["grading/success_rate"] == 0.75
    assert scalars["grading/fallback_rate"] == scalars["grading/fallback_rate/timeout"] == 0.25
    # Graded passes: T1, T3, T1, T2; a hack no longer passes.
    assert scalars["grading/tier1_share"] == 0.5
    assert scalars["grading/tier2_share"] == scalars["grading/tier3_share"] == 0.25
    assert scalars["grading/hacks"] == 1.0
    assert scalars["grading/hack_rate"] == 1 / 5
    # Queue 1, 0, 0 s and run 3, 5, 1 s; linear interpolation between order statistics.
    assert scalars["grading/queue_s_p50"] == 0.0
    assert scalars["grading/queue_s_p95"] == pytest.approx(0.9)
    assert scalars["grading/run_s_p50"] == 3.0
    assert scalars["grading/run_s_p95"] == pytest.approx(4.8)
    # One of three answers came from a second grader; it ran three checks for half a dollar.
    assert scalars["grading/resubmitted_rate"] == pytest.approx(1 / 3)
    assert scalars["grading/turns_mean"] == 1.0
    assert (scalars["grading/prompt_tokens_mean"], scalars["grading/completion_tokens_mean"]) == (1000.0, 80.0)
    assert scalars["grading/checks_mean"] == 1.0
    assert scalars["grading/cost_usd"] == 0.5
    assert scalars["grading/cost_usd_mean"] == pytest.approx(0.5 / 3)


def test_a_grader_that_was_lost_has_no_latency_and_no_work() -> None:
    lost = {**records()[2], "fallback_reason": "worker_lost", "grader": reply(0.0, 90.0, attempt=1, turns=0)}
    scalars = step_metrics(facts(records=[records()[0], lost])).scalars
    assert scalars["grading/run_s_p95"] == 3.0, "only what a grader that answered took"
    assert scalars["grading/turns_mean"] == 1.0
    assert scalars["grading/resubmitted_rate"] == 0.5
    assert scalars["grading/fallback_rate/worker_lost"] == 0.5


def test_canaries_take_the_graders_time() -> None:
    busy = [Span(name="canary", start_s=100.0, end_s=103.0), Span(name="grade", start_s=102.0, end_s=104.0)]
    scalars = step_metrics(facts(spans=busy)).scalars
    assert scalars["time/grading_s"] == 4.0
    assert scalars["cost/grader_share"] == 1.0
    assert scalars["overlap/graded_groups"] == 1.0, "a canary is no group of the run"


def test_groups_and_masks_are_counted_over_all_that_ended() -> None:
    scalars = step_metrics(facts()).scalars
    assert scalars["groups/trained"] == 4.0
    skipped = {k.rpartition("/")[2]: v for k, v in scalars.items() if k.startswith("groups/skipped/")}
    assert skipped == {"all_pass": 1.0, "all_fail": 1.0, "broken_task": 0.0, "quarantined": 0.0, "too_few_valid": 1.0}
    # 19 trajectories, 2 of them masked.
    assert scalars["infra/mask_rate"] == pytest.approx(2 / 19)
    assert scalars["infra/mask_rate/sandbox"] == scalars["infra/mask_rate/wall"] == pytest.approx(1 / 19)
    assert scalars["infra/mask_rate/engine"] == scalars["infra/mask_rate/verifier"] == 0.0
    assert scalars["infra/retries"] == 2.0
    failures = {k.rpartition("/")[2]: v for k, v in scalars.items() if k.startswith("infra/failures/")}
    assert failures == {"sandbox": 1 + 2, "wall": 1}, "masked and sampled again; a grader's time limit is no failure"
    # 17 valid ones: 2 + 2 + 1 + 0 + 2 + 1 + 1 passed.
    assert scalars["trajectories/pass_rate"] == pytest.approx(9 / 17)
    assert scalars["pass_rate/arith"] == scalars["reward/arith"] == 0.5
    assert scalars["pass_rate/minirepo"] == pytest.approx(8 / 15)
    assert scalars["mixer/trained/minirepo"] == 3.0
    assert scalars["mixer/quota/minirepo"] == 3.0
    assert scalars["mixer/arith/acceptance"] == 0.9


def test_staleness_is_counted_from_the_oldest_token() -> None:
    metrics = step_metrics(facts())
    # Step 3 trains version 2: versions (2), (1, 2) and (0, 1) are 0, 1 and 2 steps old; 12 trained trajectories.
    assert metrics.scalars["staleness/max"] == 2.0
    assert metrics.scalars["staleness/mean"] == pytest.approx((1 + 2) / 12)


def test_each_second_of_a_step_is_given_to_one_thing() -> None:
    scalars = step_metrics(facts()).scalars
    assert {k: scalars[f"time/{k}_s"] for k in ("learning", "publish", "checkpoint", "rollout", "grading", "idle")} == {
        "learning": 1.0,
        "publish": 0.5,
        "checkpoint": 0.25,
        "rollout": 6.0,
        "grading": 1.5,
        "idle": 0.75,
    }
    assert scalars["time/step_s"] == 10.0
    assert scalars["overlap/share"] == pytest.approx(1.0 / 2.5)
    assert scalars["overlap/graded_groups"] == scalars["overlap/overlapped_groups"] == 1.0
    # Active 6 s on 1 unit, 2.5 s on 1, 1.5 s on 2.
    assert scalars["cost/rollout_share"] == pytest.approx(6 / 11.5)
    assert scalars["cost/grader_share"] == pytest.approx(2.5 / 11.5)
    assert scalars["cost/learner_share"] == pytest.approx(3 / 11.5)


def test_a_learner_step_beside_rollouts_is_learning_time() -> None:
    busy = [Span(name="rollout", start_s=100.0, end_s=110.0), Span(name="learn", start_s=104.0, end_s=106.0)]
    scalars = step_metrics(facts(spans=busy)).scalars
    assert (scalars["time/rollout_s"], scalars["time/learning_s"], scalars["time/idle_s"]) == (8.0, 2.0, 0.0)


def test_what_has_no_data_has_no_key() -> None:
    empty = step_metrics(facts(records=[], spans=[], stats={}, quotas={}, supply={}, grader={}, window=(5.0, 5.0)))
    assert empty.scalars == {}
    assert empty.histograms == {}


def test_uncapped_modes_and_ungraded_runs_have_no_cap_rate() -> None:
    ungraded = group("a", [trajectory("a/0", True, advantage=0.5), trajectory("a/1", False, advantage=-0.5)])
    scalars = step_metrics(facts(records=[ungraded])).scalars
    assert not [name for name in scalars if name.startswith(("redistribution/", "grading/"))]
    exact = {**records()[1], "mode": "redistribute_exact", "lambda_max": None}
    scalars = step_metrics(facts(records=[exact])).scalars
    assert scalars["redistribution/lambda_mean"] == pytest.approx(40 / 37)
    assert "redistribution/lambda_capped_rate" not in scalars


def test_learner_values_that_are_none_are_left_out() -> None:
    stats = asdict(replace(STATS, logprob_gap_mean=None, logprob_gap_max=None, skipped=True))
    scalars = step_metrics(facts(stats=stats)).scalars
    assert not [name for name in scalars if "logprob_gap" in name]
    assert scalars["learner/skipped"] == 1.0


def test_pool_units_count_threads_on_cpus_and_gpus_on_gpus() -> None:
    config = RunConfig(
        name="r",
        steps=1,
        sources={},
        engine=EngineConfig(model="m", device="cuda", replicas=4, tensor_parallel_size=2, threads=9),
        learner=LearnerConfig(model="m", world_size=2, threads=3),
        grader=GraderConfig(backend=EndpointGraderBackend(type="endpoint", base_url="http://x", model="g")),
    )
    assert pool_units(config) == {"rollout": 8.0, "learner": 6.0}


def test_what_bounded_the_step_is_a_metric_and_only_where_the_pools_are_known() -> None:
    """Of ten seconds two rollouts ran for one, one of them for five; the grader was alone for 1.5, with a queue .4."""
    scalars = step_metrics(facts()).scalars
    got = {name.removeprefix("bottleneck/"): v for name, v in scalars.items() if name.startswith("bottleneck/")}
    assert got == pytest.approx(
        {
            "rollout": 0.1,
            "rollout_tail": 0.5,
            "free_slots": 1.0,
            "grader": 0.04,
            "queued_groups": 1.0,
            "grader_tail": 0.11,
            "learner": 0.1,
            "publish": 0.05,
            "checkpoint": 0.025,
            "idle": 0.075,
        }
    )
    assert (scalars["pool/rollout_slots"], scalars["pool/grader_slots"]) == (2.0, 1.0)
    assert not any(name.startswith("bottleneck/") for name in step_metrics(facts(slots={})).scalars)
