"""Makes audit records and run folders whose figures are easy to work out by hand."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import ArithSource, GraderConfig, MinirepoSource, OversamplingConfig, WandbConfig
from envs.task import ExactAnswer, Split, Task, TaskKind
from grader.verdict import FallbackReason
from infra.spans import Span
from infra.telemetry import Telemetry
from learner.group import StepStats
from orchestrator.admission import Admission
from orchestrator.alarms import GraderWatch
from orchestrator.masking import MaskWatch
from orchestrator.metrics import Metrics, StepFacts, step_metrics
from orchestrator.mixer import Mixer
from rollout.trajectory import Status
from rollout.worker import lost_trajectory

SCORES = {"approach": 5, "precision": 5, "minimality": 4, "side_effects": 5, "consistency": 4}

STATS = StepStats(
    loss=0.1,
    grad_norm=0.5,
    lr=1e-4,
    skipped=False,
    entropy=0.7,
    ratio_mean=1.01,
    ratio_masked_share=0.0,
    logprob_gap_mean=1e-4,
    logprob_gap_max=1e-3,
    tokens=4000,
    response_tokens=1200,
    sequences=12,
    microbatches=2,
    row_fill=0.9,
    rank_balance=1.0,
    padded_factor=1.4,
    step_s=1.0,
    pack_s=0.1,
    forward_s=0.3,
    backward_s=0.4,
    optimizer_s=0.1,
)


def trajectory(
    id: str,
    passed: bool | None,
    *,
    advantage: float | None = None,
    factor: float | None = None,
    tier: str | None = None,
    hack: bool = False,
    status: str = "submitted",
    turns: int = 4,
    tokens: int = 100,
    versions: tuple[int, ...] = (2,),
) -> dict[str, Any]:
    """One trajectory of a record; `passed` None means masked. A hack passed the verifier and was then corrected."""
    valid = passed is not None
    reward = float(passed) if passed is not None else None
    return {
        "id": id,
        "status": status,
        "valid": valid,
        "passed": passed,
        "outcome_reward": 1.0 if hack else reward,
        "reward": reward,
        "hack": hack,
        "tier": tier,
        "scores": SCORES if tier else None,
        "flags": None,
        "tie": 0 if factor is not None else None,
        "factor": factor,
        "advantage": advantage,
        "turns": turns,
        "response_tokens": tokens,
        "policy_versions": list(versions) if valid else [],
        "payload_sha256": "0" * 64 if valid else None,
    }


def group(group_id: str, trajectories: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """One line of groups.jsonl: an ungraded group that was trained at step 3, but for `changes`."""
    return {
        "group_id": group_id,
        "task_id": f"task-{group_id}",
        "source": "minirepo",
        "step": 3,
        "mode": "outcome",
        "outcome": "trained",
        "graded": False,
        "fallback_reason": None,
        "lambda": None,
        "lambda_max": None,
        "capped": False,
        "grader": None,
        "rollout_s": 10.0,
        "ready_latency_s": 2.0,
        "trajectories": trajectories,
        **changes,
    }


def reply(queue_s: float, run_s: float, **changes: Any) -> dict[str, Any]:
    return {
        "model": "grader",
        "queue_s": queue_s,
        "run_s": run_s,
        "turns": 1,
        "prompt_tokens": 1000,
        "completion_tokens": 80,
        "order_seed": 7,
        "attempt": 0,
        "verdict": None,
        "checks": [],
        "cost_usd": 0.0,
        **changes,
    }


def checks(count: int) -> list[dict[str, Any]]:
    one = {"candidate": "C1", "command": "python3 -m unittest -q", "exit_code": 0}
    return [{"number": n, **one} for n in range(1, count + 1)]


def records() -> list[dict[str, Any]]:
    """The groups that ended in step 3.

    capped: p = 1/2, f = 1 and 0.2, so lambda = 1 / 0.6 = 5/3, cut to 3/2. B = .75 .15 -.5 -.5, mean -.025.
    exact: p = 1/2, f = 1 and 0.85, lambda = 1 / 0.925 = 40/37; A = 20/37 and 17/37 on the passes.
    """
    graded = {"graded": True, "mode": "redistribute", "lambda_max": 1.5}
    masked = [trajectory("broken/0", None, status="infra_sandbox"), trajectory("broken/1", None, status="infra_wall")]
    return [
        group(
            "capped",
            [
                trajectory("capped/0", True, tier="T1", factor=1.0, advantage=0.775, turns=2, tokens=50),
                trajectory("capped/1", True, tier="T3", factor=0.2, advantage=0.175, versions=(1, 2)),
                trajectory("capped/2", False, advantage=-0.475),
                trajectory("capped/3", False, advantage=-0.475, turns=6, tokens=250),
            ],
            **graded,
            **{"lambda": 5 / 3, "capped": True, "grader": reply(1.0, 3.0), "ready_latency_s": 4.0},
        ),
        group(
            "exact",
            [
                trajectory("exact/0", True, tier="T1", factor=1.0, advantage=20 / 37),
                trajectory("exact/1", True, tier="T2", factor=0.85, advantage=17 / 37),
                trajectory("exact/2", False, advantage=-0.5),
                trajectory("exact/3", False, advantage=-0.5),
            ],
            **graded,
            **{"lambda": 40 / 37, "grader": reply(0.0, 5.0, attempt=1, cost_usd=0.5, checks=checks(3))},
        ),
        group(
            "fallback",
            [
                trajectory("fallback/0", True, advantage=0.5, versions=(0, 1)),
                trajectory("fallback/1", False, advantage=-0.5),
            ],
            fallback_reason="timeout",
        ),
        group(
            "hacked",
            [trajectory("hacked/0", False, tier="T3", hack=True, advantage=0.0), trajectory("hacked/1", False)],
            outcome="skipped_all_fail",
            step=None,
            grader=reply(0.0, 1.0),
        ),
        group("easy", [trajectory("easy/0", True), trajectory("easy/1", True)], outcome="skipped_all_pass", step=None),
        group("broken", [*masked, trajectory("broken/2", True)], outcome="skipped_too_few_valid", step=None),
        group(
            "sum",
            [trajectory("sum/0", True, advantage=0.5, turns=1), trajectory("sum/1", False, advantage=-0.5, turns=1)],
            source="arith",
        ),
    ]


def spans(start_s: float) -> list[Span]:
    """Ten seconds: rollouts 0-6, one grade 5-7.5 (another group waits for it from 7 to 7.4), learning 8-9, publishing
    9-9.5, a checkpoint 9.5-9.75."""
    times = [
        ("rollout", 0.0, 4.0, "other"),
        ("rollout", 3.0, 6.0, "other"),
        ("grade", 5.0, 7.5, "capped"),
        ("grade_queue", 7.0, 7.4, "exact"),
        ("learn", 8.0, 9.0, ""),
        ("publish", 9.0, 9.5, ""),
        ("checkpoint", 9.5, 9.75, ""),
    ]
    return [
        Span(name=name, start_s=start_s + a, end_s=start_s + b, attrs={"group_id": g} if g else {})
        for name, a, b, g in times
    ]


def canary_line(
    agreement: float | None, tau_b: float | None, reason: str | None = None, number: int = 0
) -> dict[str, Any]:
    """What a line of canaries.jsonl says about the grader."""
    return {"canary": number, "tier_agreement": agreement, "kendall_tau_b": tau_b, "fallback_reason": reason}


def watched() -> dict[str, float]:
    """The graders' figures after four groups, one of them lost, and three canaries, one of them without a verdict."""
    backend = {"type": "vllm", "engine": {"model": "unused"}}
    watch = GraderWatch(GraderConfig.model_validate({"backend": backend}))
    for reason in (None, None, FallbackReason.SCHEMA, FallbackReason.WORKER_LOST):
        watch.group(reason)
    for line in (canary_line(1.0, 0.5), canary_line(0.5, None), canary_line(None, None, "timeout")):
        watch.canary(line)
    return {**watch.scalars(), "canary/graded": 3.0}


def supply() -> dict[str, float]:
    """The mixer's and the admission's figures after one group of minirepo was accepted and trained on."""
    sources = {
        "minirepo": MinirepoSource(type="minirepo", groups_per_step=3, prior_acceptance=0.5),
        "arith": ArithSource(type="arith", groups_per_step=1, prior_acceptance=0.9),
    }
    mixer = Mixer(sources, alpha=0.5, oversampling=OversamplingConfig())
    mixer.take_index("minirepo")
    mixer.sources["minirepo"].accepted_total = mixer.sources["minirepo"].trained_total = 1
    admission = Admission(sources, group_size=4, longest_tokens=1000, kv_tokens_per_engine=100_000)
    rolling = {"minirepo": 4, "arith": 0}
    watch = MaskWatch(["minirepo"], above=0.5, window=64)
    task = Task(
        task_id="t",
        source="minirepo",
        kind=TaskKind.SINGLE_TURN,
        split=Split.TRAIN,
        statement="",
        files={},
        verifier=ExactAnswer(answer=""),
    )
    watch.attempt(lost_trajectory(task, "g/0.0", "g", Status.INFRA_WORKER, "gone", 0.0))
    quarantined = {"infra/quarantined_tasks": 0.0}
    return {**mixer.scalars(rolling), **admission.scalars(rolling), **dict(watch.scalars()), **quarantined}


def facts(**changes: Any) -> StepFacts:
    """Everything known of step 3; the window is 100 s to 110 s."""
    given: dict[str, Any] = {
        "records": records(),
        "retries": {"infra_sandbox": 2},
        "stats": asdict(STATS),
        "window": (100.0, 110.0),
        "spans": spans(100.0),
        "quotas": {"minirepo": 3, "arith": 1},
        "supply": supply(),
        "grader": watched(),
        "pool_units": {"rollout": 1.0, "grader": 1.0, "learner": 2.0},
        "slots": {"rollout": 2, "grader": 1},
    }
    return StepFacts(**{**given, **changes})


def make_run(run_dir: Path, *, groups: list[dict[str, Any]] | None = None) -> Metrics:
    """A run folder of one finished step, written by the project's own telemetry."""
    telemetry = Telemetry(run_dir, wandb=WandbConfig(mode="disabled"), config={})
    metrics = step_metrics(facts())
    for span in spans(time.monotonic() - 10.0):
        telemetry.record_span(span.name, span.start_s, span.end_s, **span.attrs)
    telemetry.log_step(3, metrics.scalars, metrics.histograms)
    telemetry.close()
    lines = [json.dumps(r) for r in (records() if groups is None else groups)]
    (run_dir / "groups.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    evals = [evaluation("before", 0, 0.4), evaluation("after", 3, 0.55)]
    (run_dir / "eval.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in evals), encoding="utf-8")
    (run_dir / "config.yaml").write_text("name: demo\nsteps: 3\n", encoding="utf-8")
    return metrics


def evaluation(label: str, step: int, pass_rate: float | None) -> dict[str, Any]:
    """A line of eval.jsonl."""
    return {
        "label": label,
        "step": step,
        "source": "minirepo",
        "tasks": 60,
        "samples": 3,
        "pass_rate": pass_rate,
        "masked": 0,
        "turns_mean": 4.0,
        "response_tokens_mean": 100.0,
        "pass_rate_by": {"boundary": 0.5},
    }
