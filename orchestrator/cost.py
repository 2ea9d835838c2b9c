"""What a run has spent, step by step, and where runs stand after equal steps, equal sampled tokens and equal compute.

Pure but for reading run folders. Compute is in busy resource-seconds, as `cost/*_share` counts them: the time in which
a pool was active times its GPUs, or CPU threads. What grades cost at an endpoint is in US dollars beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from configs.schema import RunConfig
from infra.spans import GRADE, LEARN, PUBLISH, ROLLOUT, clipped, length, merged
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
    names = {"rollout": (ROLLOUT,), "grader": (GRADE,), "learner": (LEARN, PUBLISH)}
    out: list[StepCost] = []
    wall_s = tokens = usd = 0.0
    count = 0
    busy = dict.fromkeys(POOLS, 0.0)
    for m in metrics:
        window = (m["time_s"] - m["time/step_s"], m["time_s"])
        wall_s += m["time/step_s"]
        for pool, kinds in names.items():
            active = merged([i for kind in kinds for i in clipped(spans, kind, window)])
            busy[pool] += length(active) * units.get(pool, 0.0)
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


def compare(arms: Mapping[str, Sequence[Sequence[StepCost]]], reference: str) -> dict[str, dict[str, float | None]]:
    """Arm -> figures, means over its runs. `arms`: arm -> one list of costs for each seed, none of them empty.

    Equal steps: the fewest that any run has. Equal tokens and equal compute: the least that any run had spent by then.
    """
    steps = min(costs[-1].step for runs in arms.values() for costs in runs)
    ends = {arm: [at_step(costs, steps) for costs in runs] for arm, runs in arms.items()}
    tokens = min(end.tokens for all_of in ends.values() for end in all_of)
    compute_s = min(end.compute_s for all_of in ends.values() for end in all_of)
    found: dict[str, dict[str, float | None]] = {}
    for arm, runs in arms.items():
        row: dict[str, float | None] = {"steps": float(steps)}
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
            reached = [at_most(costs, budget, of) for costs in runs]
            row[f"steps_at_equal_{name}"] = _mean([None if c is None else float(c.step) for c in reached])
            rates = [
                None if c is None else recent(costs, c.step, "pass_rate")
                for costs, c in zip(runs, reached, strict=True)
            ]
            row[f"pass_rate_at_equal_{name}"] = _mean(rates)
        found[arm] = row
    for row in found.values():
        mine, theirs = row["tokens_per_trajectory"], found[reference]["tokens_per_trajectory"]
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
