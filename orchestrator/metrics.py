"""What is watched at every optimiser step (M7). Pure; docs/metrics.md explains each name.

A quantity that has no data in a step has no key: a zero always means zero.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from configs.schema import EngineConfig, LearnerConfig, RunConfig, VllmGraderBackend
from grader.verdict import FallbackReason
from infra.spans import (
    CANARY,
    CHECKPOINT,
    GRADE,
    LEARN,
    PUBLISH,
    ROLLOUT,
    Interval,
    Span,
    clipped,
    length,
    merged,
    overlap_share,
    without,
)
from orchestrator.bottleneck import critical
from rollout.trajectory import Status

Record = Mapping[str, Any]
"""One line of groups.jsonl (orchestrator/groups.schema.json)."""

SKIPS = ("all_pass", "all_fail", "broken_task", "quarantined", "too_few_valid")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """All that is known of one step: from the end of the step before to the end of this one."""

    records: Sequence[Record]
    """Audit records of every group that ended in the step, in whatever way."""
    retries: Mapping[str, int]
    """Trajectories sampled again, by the status of the lost one."""
    stats: Mapping[str, Any]
    """The learner's StepStats as a dict; what is None is left out."""
    window: Interval
    """The step on the clock of the spans, seconds."""
    spans: Sequence[Span]
    """Spans that touch the window."""
    quotas: Mapping[str, int]
    """B_i by source."""
    supply: Mapping[str, float]
    """The mixer's and the admission's figures by metric name."""
    grader: Mapping[str, float]
    """Rolling figures of the graders by metric name (orchestrator/alarms.py); empty where nothing is graded."""
    pool_units: Mapping[str, float]
    """GPUs, or CPU threads, that each of `rollout`, `grader` and `learner` holds; see `pool_units`."""
    slots: Mapping[str, int] = field(default_factory=dict)
    """Slots of `rollout` and `grader`; of a pool that changed its size in the step the fewest. Empty: unknown."""


@dataclass(slots=True)
class Metrics:
    """Names as in docs/metrics.md."""

    scalars: dict[str, float]
    histograms: dict[str, list[float]]

    def mean(self, name: str, values: Sequence[float]) -> None:
        if values:
            self.scalars[name] = fmean(values)

    def share(self, name: str, part: int, whole: int) -> None:
        if whole:
            self.scalars[name] = part / whole

    def percentiles(self, name: str, values: Sequence[float]) -> None:
        if values:
            self.scalars[f"{name}_p50"], self.scalars[f"{name}_p95"] = np.percentile(values, [50, 95]).tolist()

    def histogram(self, name: str, values: Sequence[float]) -> None:
        if values:
            self.histograms[name] = list(values)


def step_metrics(facts: StepFacts) -> Metrics:
    """Scalars and histograms of one step."""
    out = Metrics({}, {})
    _redistribution(out, facts.records)
    _grading(out, facts.records)
    out.scalars.update(facts.grader)
    _groups(out, facts)
    _trajectories(out, facts)
    _sources(out, facts)
    _staleness(out, facts.records)
    out.scalars.update((f"learner/{key}", float(value)) for key, value in facts.stats.items() if value is not None)
    _overlap(out, facts)
    _time(out, facts)
    _bottleneck(out, facts)
    return out


def pool_units(config: RunConfig) -> dict[str, float]:
    """GPUs of each pool, or CPU threads where it runs on CPUs; a grader behind an endpoint has no entry."""
    units = {"rollout": _engine_units(config.engine), "learner": _learner_units(config.learner)}
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        units["grader"] = _engine_units(config.grader.backend.engine)
    return units


def _engine_units(config: EngineConfig) -> float:
    return float(config.replicas * (config.tensor_parallel_size if config.device == "cuda" else config.threads))


def _learner_units(config: LearnerConfig) -> float:
    return float(config.world_size * (1 if config.device == "cuda" else config.threads))


def _valid(record: Record) -> list[Mapping[str, Any]]:
    return [t for t in record["trajectories"] if t["valid"]]


def _trained(records: Iterable[Record]) -> list[Record]:
    return [r for r in records if r["outcome"] == "trained"]


def _redistribution(out: Metrics, records: Sequence[Record]) -> None:
    """Graded groups that were trained on."""
    graded = [r for r in _trained(records) if r["graded"]]
    lambdas = [float(r["lambda"]) for r in graded if r["lambda"] is not None]
    out.mean("redistribution/lambda_mean", lambdas)
    out.percentiles("redistribution/lambda", lambdas)
    out.histogram("redistribution/lambda", lambdas)
    cappable = [r for r in graded if r["lambda_max"] is not None]
    out.share("redistribution/lambda_capped_rate", sum(bool(r["capped"]) for r in cappable), len(cappable))
    factors = [float(t["factor"]) for r in graded for t in _valid(r) if t["factor"] is not None]
    out.mean("redistribution/factor_mean", factors)
    out.histogram("redistribution/factor", factors)
    shifts: list[float] = []
    for record in graded:
        members = _valid(record)
        baseline = fmean(t["reward"] for t in members)
        shifts += [t["advantage"] - (t["reward"] - baseline) for t in members if not t["passed"]]
    out.mean("redistribution/failing_shift_mean", shifts)
    out.histogram("redistribution/advantage", [float(t["advantage"]) for r in _trained(records) for t in _valid(r)])


def _grading(out: Metrics, records: Sequence[Record]) -> None:
    """Every group that a grader was asked about, whatever became of it."""
    asked = [r for r in records if r["graded"] or r["fallback_reason"] is not None or r.get("grader") is not None]
    reasons = Counter(r["fallback_reason"] for r in asked if r["fallback_reason"] is not None)
    fallbacks = sum(reasons.values())
    out.share("grading/success_rate", len(asked) - fallbacks, len(asked))
    out.share("grading/fallback_rate", fallbacks, len(asked))
    for reason, count in reasons.items():
        out.share(f"grading/fallback_rate/{reason}", count, len(asked))
    judged = [t for r in asked if r["fallback_reason"] is None for t in _valid(r)]
    tiers = Counter(t["tier"] for t in judged if t["tier"] is not None and t["passed"])
    for tier in ("1", "2", "3"):
        out.share(f"grading/tier{tier}_share", tiers[f"T{tier}"], sum(tiers.values()))
    hacks = sum(bool(t["hack"]) for t in judged)
    if judged:
        out.scalars["grading/hacks"] = float(hacks)
    out.share("grading/hack_rate", hacks, sum(bool(t["passed"] or t["hack"]) for t in judged))
    replies = [r["grader"] for r in asked if r.get("grader") is not None]
    out.share("grading/resubmitted_rate", sum(bool(g.get("attempt")) for g in replies), len(replies))
    _work(out, [r["grader"] for r in asked if r.get("grader") and r["fallback_reason"] != FallbackReason.WORKER_LOST])


def _work(out: Metrics, answers: Sequence[Mapping[str, Any]]) -> None:
    """What the graders that answered did for a group; of one that was lost nothing is known."""
    for key in ("queue_s", "run_s"):
        out.percentiles(f"grading/{key}", [float(g[key]) for g in answers if g.get(key) is not None])
    for key in ("turns", "prompt_tokens", "completion_tokens", "cost_usd"):
        out.mean(f"grading/{key}_mean", [float(g[key]) for g in answers if g.get(key) is not None])
    out.mean("grading/checks_mean", [float(len(g["checks"])) for g in answers if g.get("checks") is not None])
    if costs := [float(g["cost_usd"]) for g in answers if g.get("cost_usd") is not None]:
        out.scalars["grading/cost_usd"] = sum(costs)


def _groups(out: Metrics, facts: StepFacts) -> None:
    if not facts.records:
        return
    ends = Counter(r["outcome"] for r in facts.records)
    out.scalars["groups/trained"] = float(ends["trained"])
    for reason in SKIPS:
        out.scalars[f"groups/skipped/{reason}"] = float(ends[f"skipped_{reason}"])
    out.scalars["groups/dropped_stale"] = float(ends["dropped_stale"])
    out.scalars["groups/failed"] = float(ends["failed"])
    for key in ("rollout_s", "ready_latency_s"):
        out.percentiles(f"groups/{key}", [float(r[key]) for r in facts.records if r.get(key) is not None])


def _trajectories(out: Metrics, facts: StepFacts) -> None:
    ended = [t for r in facts.records for t in r["trajectories"]]
    if not ended:
        return
    masked = Counter(t["status"] for t in ended if not t["valid"])
    out.share("infra/mask_rate", sum(masked.values()), len(ended))
    for status in Status:
        if status.masked:
            name = status.value.removeprefix("infra_")
            out.share(f"infra/mask_rate/{name}", masked[status.value], len(ended))
    out.scalars["infra/retries"] = float(sum(facts.retries.values()))
    for kind, count in _failures(facts, masked).items():
        out.scalars[f"infra/failures/{kind}"] = float(count)
    valid = [t for t in ended if t["valid"]]
    out.share("trajectories/pass_rate", sum(bool(t["passed"]) for t in valid), len(valid))
    for key in ("turns", "response_tokens"):
        values = [float(t[key]) for t in valid]
        out.mean(f"trajectories/{key}_mean", values)
        out.percentiles(f"trajectories/{key}", values)
        out.histogram(f"trajectories/{key}", values)
    for key, built_in in (("contexts", 1), ("drift", 0)):
        out.mean(f"trajectories/{key}_mean", [float(t.get(key, built_in)) for t in valid])


_GRADERS = {
    FallbackReason.WORKER_LOST: "grader",
    FallbackReason.GRADER_ERROR: "grader",
    FallbackReason.ENGINE_ERROR: "grader",
    FallbackReason.ENDPOINT_LOST: "network",
}
"""Fallbacks for which infrastructure is to blame, and its class."""


def _failures(facts: StepFacts, masked: Mapping[str, int]) -> Counter[str]:
    """By class: attempts at rollouts that were lost, sampled again or not, groups that lost their payloads, and
    gradings that were lost. What was cancelled did not fail."""
    failures: Counter[str] = Counter()
    for lost in (masked, facts.retries):
        for status, count in lost.items():
            if status != Status.INFRA_CANCELLED:
                failures[status.removeprefix("infra_")] += count
    for record in facts.records:
        failures["storage"] += record["outcome"] == "failed"
        if (kind := _GRADERS.get(record["fallback_reason"])) is not None:
            failures[kind] += 1
    return +failures


def _sources(out: Metrics, facts: StepFacts) -> None:
    for source, quota in facts.quotas.items():
        out.scalars[f"mixer/quota/{source}"] = float(quota)
    out.scalars.update(facts.supply)
    ended = [r for r in facts.records if r["outcome"] in ("trained", "dropped_stale")]
    for source in {r["source"] for r in ended}:
        mine = [r for r in ended if r["source"] == source]
        out.share(f"mixer/{source}/stale_share", sum(r["outcome"] == "dropped_stale" for r in mine), len(mine))
        used, all_of = _mean_tokens(_trained(mine)), _mean_tokens(mine)
        if used is not None and all_of:
            out.scalars[f"mixer/{source}/length_bias"] = used / all_of - 1.0
    for source in sorted({r["source"] for r in facts.records}):
        mine = [r for r in facts.records if r["source"] == source]
        out.scalars[f"mixer/trained/{source}"] = float(len(_trained(mine)))
        valid = [t for r in mine for t in _valid(r)]
        out.mean(f"reward/{source}", [float(t["reward"]) for t in valid if t["reward"] is not None])
        out.share(f"pass_rate/{source}", sum(bool(t["passed"]) for t in valid), len(valid))


def _mean_tokens(records: Sequence[Record]) -> float | None:
    """Mean generated tokens of the valid trajectories."""
    tokens = [float(t["response_tokens"]) for r in records for t in _valid(r)]
    return fmean(tokens) if tokens else None


def _staleness(out: Metrics, records: Sequence[Record]) -> None:
    """Optimiser steps between the oldest sampled token of a trajectory and training on it (M6.4).

    Step s trains weights of version s - 1, so tokens of that version have staleness 0.
    """
    values = [
        float(r["step"] - 1 - min(t["policy_versions"]))
        for r in _trained(records)
        for t in _valid(r)
        if t["policy_versions"]
    ]
    out.mean("staleness/mean", values)
    if values:
        out.scalars["staleness/max"] = max(values)
    out.histogram("staleness/steps", values)


def _overlap(out: Metrics, facts: StepFacts) -> None:
    found = overlap_share(facts.spans, facts.window)
    if found.share is not None:
        out.scalars["overlap/share"] = found.share
        out.scalars["overlap/graded_groups"] = float(found.graded_groups)
        out.scalars["overlap/overlapped_groups"] = float(found.overlapped_groups)


def _time(out: Metrics, facts: StepFacts) -> None:
    """The step's wall clock, each second given to one thing, and the busy resource-seconds of each pool."""
    start, end = facts.window
    if end <= start:
        return
    out.scalars["time/step_s"] = end - start
    busy = {
        name: merged(clipped(facts.spans, name, facts.window))
        for name in (LEARN, PUBLISH, CHECKPOINT, ROLLOUT, GRADE, CANARY)
    }
    busy[GRADE] = merged([*busy[GRADE], *busy[CANARY]])
    taken: list[Interval] = []
    for key, name in (
        ("learning", LEARN),
        ("publish", PUBLISH),
        ("checkpoint", CHECKPOINT),
        ("rollout", ROLLOUT),
        ("grading", GRADE),
    ):
        out.scalars[f"time/{key}_s"] = length(without(busy[name], taken))
        taken = merged([*taken, *busy[name]])
    out.scalars["time/idle_s"] = length(without([facts.window], taken))
    seconds = {
        "rollout": length(busy[ROLLOUT]),
        "grader": length(busy[GRADE]),
        "learner": length(merged([*busy[LEARN], *busy[PUBLISH]])),
    }
    cost = {pool: seconds[pool] * units for pool, units in facts.pool_units.items()}
    total = sum(cost.values())
    if total > 0.0:
        for pool, value in cost.items():
            out.scalars[f"cost/{pool}_share"] = value / total


def _bottleneck(out: Metrics, facts: StepFacts) -> None:
    """What was critical in the step (orchestrator/bottleneck.py)."""
    if "rollout" not in facts.slots or facts.window[1] <= facts.window[0]:
        return
    out.scalars.update((f"pool/{name}_slots", float(slots)) for name, slots in facts.slots.items())
    found = critical(facts.spans, facts.window, facts.slots)
    out.scalars.update((f"bottleneck/{cause}", share) for cause, share in found.shares.items())
    if found.shares["grader"]:
        out.scalars["bottleneck/queued_groups"] = found.queued_groups
    if found.shares["rollout_tail"]:
        out.scalars["bottleneck/free_slots"] = found.free_slots
