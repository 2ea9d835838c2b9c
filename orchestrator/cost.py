"""What a run has spent, step by step, and where runs stand after equal steps, equal sampled tokens and equal compute.

Pure but for reading run folders. Compute is in busy resource-seconds, as `cost/*_share` counts them: the time in which
a pool was active times its GPUs, or CPU threads; graders' canaries count. Graders at an endpoint hold none of these:
what they cost is in US dollars beside it, and equal compute leaves it out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from configs.schema import RunConfig
from infra.spans import CANARY, GRADE, LEARN, PUBLISH, ROLLOUT, Interval, length, merged
from orchestrator.metrics import pool_units
from orchestrator.runfiles import METRICS, SPANS, read_jsonl, read_spans

RECENT_STEPS = 5
"""Steps whose mean stands for where a run is: single steps are noisy."""
POOLS = ("rollout", "grader", "learner")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What had been spent when a step was done; everything but `pass_rate` and what is per trajectory adds up."""

    step: int
    wall_s: float
    trajectories: int
    """Valid trajectories of all groups that ended, trained or not."""
    tokens: float
    """Tokens that the policy generated in them."""
    busy: Mapping[str, float]
    """Pool -> busy resource-seconds."""
    cost_usd: float
    """Of the graders' endpoint."""
    pass_rate: float | None
    """Of the trajectories of this step alone, on training tasks that were not seen before."""
    step_tokens: float | None
    """Mean generated tokens of a trajectory of this step."""
    queue_s: float | None
    """Median wait for a grader in this step."""
    fallback_rate: float | None

    @property
    def compute_s(self) -> float:
        """Busy resource-seconds of all pools."""
        return sum(self.busy.values())


def step_costs(run_dir: Path, config: RunConfig) -> list[StepCost]:
    """Cumulative costs of a run's steps, in order.

    Raises:
        StorageError: a file of the run is damaged.
    """
    metrics, spans, units = read_jsonl(run_dir / METRICS), read_spans(run_dir / SPANS), pool_units(config)
    kinds = {"rollout": (ROLLOUT,), "grader": (GRADE, CANARY), "learner": (LEARN, PUBLISH)}
    active = {p: merged([(s.start_s, s.end_s) for s in spans if s.name in names]) for p, names in kinds.items()}
    out: list[StepCost] = []
    wall_s = tokens = usd = 0.0
    count = 0
    busy = dict.fromkeys(POOLS, 0.0)
    for m in metrics:
        step_s = m.get("time/step_s") or 0.0
        wall_s += step_s
        for pool in POOLS:
            busy[pool] += _within(active[pool], (m["time_s"] - step_s, m["time_s"])) * units.get(pool, 0.0)
        ended = _count(m, "trajectories/response_tokens")
        count += ended
        mean = m.get("trajectories/response_tokens_mean")
        tokens += ended * (mean or 0.0)
        usd += m.get("grading/cost_usd") or 0.0
        out.append(
            StepCost(
                step=m["step"],
                wall_s=wall_s,
                trajectories=count,
                tokens=tokens,
                busy=dict(busy),
                cost_usd=usd,
                pass_rate=m.get("trajectories/pass_rate"),
                step_tokens=mean,
                queue_s=m.get("grading/queue_s_p50"),
                fallback_rate=m.get("grading/fallback_rate"),
            )
        )
    return out


def _within(active: Sequence[Interval], window: Interval) -> float:
    """Seconds of disjoint intervals, in order, that lie in a window."""
    low, high = window
    first = bisect_right(active, low, key=lambda interval: interval[1])
    last = bisect_left(active, high, key=lambda interval: interval[0])
    return length((max(start, low), min(end, high)) for start, end in active[first:last])


def _count(metrics: Mapping[str, Any], name: str) -> int:
    """Values in a histogram."""
    histogram = (metrics.get("histograms") or {}).get(name)
    return int(sum(histogram["counts"])) if histogram else 0


def at_most(costs: Sequence[StepCost], budget: float, of: str) -> StepCost | None:
    """The last step that kept within a budget of `tokens` or `compute_s`; None if none did."""
    within = [c for c in costs if getattr(c, of) <= budget * (1.0 + 1e-9)]
    return within[-1] if within else None


def recent(costs: Sequence[StepCost], last: int, key: str) -> float | None:
    """Mean of a figure over the RECENT_STEPS steps that end with step `last`."""
    values = [getattr(c, key) for c in costs if last - RECENT_STEPS < c.step <= last and getattr(c, key) is not None]
    return fmean(values) if values else None


def compare(
    arms: Mapping[str, Mapping[int | None, Sequence[StepCost]]], reference: str
) -> dict[str, dict[str, float | None]]:
    """Arm -> figures, means over its seeds. `arms`: arm -> seed -> costs; a run without a step, and an arm without any
    other, is left out. Seeds have other tasks, so only those are held against each other that all arms have; where
    there are none, each arm has its own.

    Equal steps: the fewest that any run has. Equal tokens and equal compute: the least that any run had spent by then.
    What an arm saves is None where the reference is not there; where it stands at an equal budget, if a seed of it had
    not finished a step by then.
    """
    begun = {arm: {seed: costs for seed, costs in seeds.items() if costs} for arm, seeds in arms.items()}
    begun = {arm: seeds for arm, seeds in begun.items() if seeds}
    if not begun:
        return {}
    shared = set.intersection(*(set(seeds) for seeds in begun.values()))
    return _compare(
        {arm: [costs for seed, costs in seeds.items() if not shared or seed in shared] for arm, seeds in begun.items()},
        reference,
    )


def _compare(arms: Mapping[str, Sequence[Sequence[StepCost]]], reference: str) -> dict[str, dict[str, float | None]]:
    steps = min(costs[-1].step for runs in arms.values() for costs in runs)
    ends = {arm: [at_step(costs, steps) for costs in runs] for arm, runs in arms.items()}
    tokens = min(end.tokens for all_of in ends.values() for end in all_of)
    compute_s = min(end.compute_s for all_of in ends.values() for end in all_of)
    found: dict[str, dict[str, float | None]] = {}
    for arm, runs in arms.items():
        row: dict[str, float | None] = {"seeds": float(len(runs)), "steps": float(steps)}
        row["wall_s"] = fmean(end.wall_s for end in ends[arm])
        row["trajectories"] = fmean(end.trajectories for end in ends[arm])
        row["tokens"] = fmean(end.tokens for end in ends[arm])
        row["compute_s"] = fmean(end.compute_s for end in ends[arm])
        for pool in POOLS:
            row[f"{pool}_s"] = fmean(end.busy[pool] for end in ends[arm])
        row["grader_share"] = row["grader_s"] / row["compute_s"] if row["compute_s"] and row["grader_s"] else 0.0
        row["cost_usd"] = fmean(end.cost_usd for end in ends[arm])
        row["queue_s"] = _mean([_over(costs, steps, "queue_s") for costs in runs])
        row["fallback_rate"] = _mean([_over(costs, steps, "fallback_rate") for costs in runs])
        row["tokens_per_trajectory"] = _mean([recent(costs, steps, "step_tokens") for costs in runs])
        row["pass_rate"] = _mean([recent(costs, steps, "pass_rate") for costs in runs])
        for name, budget, of in (("tokens", tokens, "tokens"), ("compute", compute_s, "compute_s")):
            reached = [(costs, c) for costs in runs if (c := at_most(costs, budget, of)) is not None]
            whole = len(reached) == len(runs)  # a mean over the seeds that were cheap enough would favour the arm
            row[f"steps_at_equal_{name}"] = _mean([float(c.step) for _, c in reached]) if whole else None
            rates = [recent(costs, c.step, "pass_rate") for costs, c in reached]
            row[f"pass_rate_at_equal_{name}"] = _mean(rates) if whole else None
        found[arm] = row
    theirs = found.get(reference, {}).get("tokens_per_trajectory")
    for row in found.values():
        mine = row["tokens_per_trajectory"]
        row["tokens_saved"] = 1.0 - mine / theirs if mine is not None and theirs else None
    return found


def at_step(costs: Sequence[StepCost], step: int) -> StepCost:
    """What had been spent after a step that the run has reached."""
    return next(c for c in reversed(costs) if c.step <= step)


def _over(costs: Sequence[StepCost], steps: int, key: str) -> float | None:
    """Mean of a figure over the first steps."""
    values = [getattr(c, key) for c in costs if c.step <= steps and getattr(c, key) is not None]
    return fmean(values) if values else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None
