"""What a simulated run says: step time against the ideal, occupancy, shares, staleness, bias, the driver's cost. Pure
but for the driver's own CPU time and memory."""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from configs.trace_schema import TraceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One optimiser step. Totals count from the start of the run, the rest from the end of the step before."""

    number: int
    end_s: float
    """Virtual time at which its weights were published."""
    trained: Mapping[str, int]
    """Groups by source."""
    ended: Mapping[str, int]
    """Groups by outcome."""
    trajectories: int
    """That ended with their groups, in whatever way."""
    fallbacks: int
    retries: int
    ready: int
    """Groups that wait for a later batch."""
    staleness: Mapping[int, int]
    """Trained trajectories by optimiser steps between their oldest token and their training."""
    trained_time: Mapping[str, tuple[int, float]]
    """Source -> trained trajectories, and the sum of their times in seconds."""
    dispatched: Mapping[str, int]
    """Total of groups by source."""
    rollout_slot_s: Mapping[str, float]
    """Total slot-seconds of the rollout pool by source."""
    grader_slot_s: Mapping[str, float]
    learner_s: float
    """Total of the learner's seconds."""
    cpu_s: float
    """Total CPU time of this process."""
    rss_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One moment."""

    time_s: float
    rolling: Mapping[str, int]
    """Busy slots of the rollout pool by source."""
    grading: Mapping[str, int]
    collected: Mapping[str, float]
    """A_i / B_i by source."""
    learning: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """Seconds that a step needs of each pool if all of its slots were always busy with what is trained."""

    rollout_s: float
    grading_s: float
    learning_s: float

    @property
    def bound_s(self) -> float:
        """No schedule can be faster in the long run."""
        return max(self.rollout_s, self.grading_s, self.learning_s)

    @property
    def bottleneck(self) -> str:
        """The pool that sets the bound."""
        parts = {"rollout": self.rollout_s, "grading": self.grading_s, "learning": self.learning_s}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A run and what it was of."""

    trace: TraceConfig
    schedule: str
    steps: tuple[SimulatedStep, ...]
    samples: tuple[Sample, ...]
    drawn: Mapping[str, tuple[int, float]]
    """Source -> trajectories that were started, lost ones left out, and the sum of their times in seconds."""

    @property
    def measured(self) -> tuple[SimulatedStep, ...]:
        """The steps of the steady state."""
        return self.steps[self.trace.warmup_steps :]

    @property
    def window(self) -> tuple[float, float]:
        """Virtual time of the steady state."""
        before = self.trace.warmup_steps
        return self.steps[before - 1].end_s if before else 0.0, self.steps[-1].end_s

    @property
    def step_s(self) -> float:
        """Mean time of a step in the steady state."""
        low, high = self.window
        return (high - low) / len(self.measured)

    def occupancy(self, pool: str) -> float:
        """Share of the pool's slot-seconds that were used in the steady state: rollout, grading or learning."""
        low, high = self.window
        if pool == "learning":
            return float((self.steps[-1].learner_s - self._before("learner_s", 0.0)) / (high - low))
        name = "rollout_slot_s" if pool == "rollout" else "grader_slot_s"
        slots = self.trace.rollout.slots if pool == "rollout" else self.trace.grading.slots if self.trace.grading else 1
        used = sum(getattr(self.steps[-1], name).values()) - sum(self._before(name, {}).values())
        return float(used / ((high - low) * slots))

    def _before(self, name: str, nothing: Any) -> Any:
        before = self.trace.warmup_steps
        return getattr(self.steps[before - 1], name) if before else nothing

    @property
    def trained_share(self) -> dict[str, float]:
        """Source -> share of all trained groups, over every step."""
        trained = sum((Counter(s.trained) for s in self.steps), Counter[str]())
        return {name: trained[name] / trained.total() for name in self.trace.sources}

    @property
    def target_share(self) -> dict[str, float]:
        """Source -> share of the quotas."""
        return {name: quota / self.trace.groups_per_step for name, quota in self.trace.quotas().items()}

    @property
    def dispatched_share(self) -> dict[str, float]:
        """Source -> share of all groups that were started."""
        dispatched = self.steps[-1].dispatched
        return {name: count / sum(dispatched.values()) for name, count in dispatched.items()}

    def length_bias(self, name: str) -> float:
        """Mean time of a source's trained trajectories in the steady state over that of all that it started, less 1:
        below 0 the ones that finish first are preferred."""
        count = sum(s.trained_time[name][0] for s in self.measured)
        total_s = sum(s.trained_time[name][1] for s in self.measured)
        drawn, drawn_s = self.drawn[name]
        return (total_s / count) / (drawn_s / drawn) - 1.0

    def length_bias_error(self, name: str) -> float:
        """Standard error of `length_bias`: what chance alone does with so many groups."""
        rollout = self.trace.rollout
        common, own = rollout.spread**2 * rollout.task_share, rollout.spread**2 * (1.0 - rollout.task_share)
        variance = math.expm1(common) + math.exp(common) * math.expm1(own) / self.trace.group_size
        return math.sqrt(variance / sum(s.trained[name] for s in self.measured))

    @property
    def staleness(self) -> Counter[int]:
        """Trained trajectories by staleness, over every step."""
        return sum((Counter(s.staleness) for s in self.steps), Counter[int]())

    @property
    def ended(self) -> Counter[str]:
        """Groups by outcome, over every step."""
        return sum((Counter(s.ended) for s in self.steps), Counter[str]())

    @property
    def stock(self) -> tuple[float, float]:
        """Groups that waited for a later batch before and after the steady state, in steps' worth. Where it falls, work
        from before makes the steps look short; where it rises, long."""
        before = self.steps[self.trace.warmup_steps - 1].ready if self.trace.warmup_steps else 0
        return before / self.trace.groups_per_step, self.steps[-1].ready / self.trace.groups_per_step

    @property
    def imbalance(self) -> float:
        """Mean gap between the most and the least collected source, in parts of their quotas (at most 1)."""
        shares = [[min(max(c, 0.0), 1.0) for c in s.collected.values()] for s in self._steady_samples()]
        return fmean(max(s) - min(s) for s in shares) if shares else math.nan

    @property
    def swing(self) -> float:
        """How much the sources' parts of the rollout slots move: root of their summed variances, 1 is all of it."""
        samples = self._steady_samples()
        if not samples:
            return math.nan
        slots = self.trace.rollout.slots
        return math.sqrt(sum(pstdev(s.rolling[n] / slots for s in samples) ** 2 for n in self.trace.sources))

    def _steady_samples(self) -> list[Sample]:
        low, high = self.window
        return [s for s in self.samples if low <= s.time_s <= high]

    @property
    def cpu_ms(self) -> float:
        """CPU time of the driver for one trajectory in the steady state, the simulation's own included."""
        used_s = self.steps[-1].cpu_s - (
            self.steps[self.trace.warmup_steps - 1].cpu_s if self.trace.warmup_steps else 0
        )
        return 1000.0 * used_s / sum(s.trajectories for s in self.measured)

    @property
    def rss_mib(self) -> float:
        """The most memory at the end of a step."""
        return max(s.rss_mib for s in self.steps)


def ideal(trace: TraceConfig) -> Ideal:
    """From the trace's means: what a step needs for the groups that it trains, and for those it must skip."""
    quotas, learner = trace.quotas(), trace.learner
    lost = trace.rollout.lost_share
    attempts = sum(lost**k for k in range(trace.rollout.infra_retries + 1))
    per_attempt = 1.0 - lost / 2.0  # a lost one holds its slot for half of its time
    slot_s = 0.0
    tokens = 0.0
    for name, source in trace.sources.items():
        time_s = 60.0 * source.time_min
        slot_s += quotas[name] / source.acceptance * trace.group_size * time_s * attempts * per_attempt
        tokens += quotas[name] * trace.group_size * time_s * source.tokens_per_s
    grading_s = 0.0
    if trace.grading is not None:
        lost = trace.grading.lost_share
        code = sum(quota for name, quota in quotas.items() if trace.sources[name].kind == "code")
        grading_s = code * trace.grading.time_s * (1.0 + lost) * (1.0 - lost / 2.0) / trace.grading.slots
    return Ideal(
        rollout_s=slot_s / trace.rollout.slots + learner.publish_s,
        grading_s=grading_s,
        learning_s=learner.fixed_s + tokens / learner.tokens_per_s + learner.publish_s,
    )


def step_figures(
    *,
    number: int,
    end_s: float,
    records: Sequence[Mapping[str, Any]],
    retries: int,
    ready: int,
    rollout_slot_s: Mapping[str, float],
    grader_slot_s: Mapping[str, float],
    learner_s: float,
    dispatched: Mapping[str, int],
) -> SimulatedStep:
    """From the audit records of the groups that ended in a step."""
    staleness = Counter[int]()
    times: dict[str, tuple[int, float]] = dict.fromkeys(dispatched, (0, 0.0))
    trained = Counter[str]()
    for record in records:
        if record["outcome"] != "trained":
            continue
        trained[record["source"]] += 1
        count, total_s = times[record["source"]]
        for t in record["trajectories"]:
            if t["valid"]:
                count, total_s = count + 1, total_s + t["wall_s"]
                staleness[record["step"] - 1 - t["policy_versions"][0]] += 1
        times[record["source"]] = (count, total_s)
    return SimulatedStep(
        number=number,
        end_s=end_s,
        trained=trained,
        ended=Counter(r["outcome"] for r in records),
        trajectories=sum(len(r["trajectories"]) for r in records),
        fallbacks=sum(r["fallback_reason"] is not None for r in records),
        retries=retries,
        ready=ready,
        staleness=staleness,
        trained_time=times,
        dispatched=dict(dispatched),
        rollout_slot_s=rollout_slot_s,
        grader_slot_s=grader_slot_s,
        learner_s=learner_s,
        cpu_s=time.process_time(),
        rss_mib=_rss_mib(),
    )


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20
