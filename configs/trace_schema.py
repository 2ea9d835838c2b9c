"""A trace: the load and the pools that `gagar simulate` puts the scheduler under.

Like `configs.schema`: unknown keys are errors, every number says its unit, checks across keys are pure.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.schema import (
    Float,
    Int,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    RunConfig,
    SchedulerConfig,
    Section,
)

Size = Annotated[Int, Field(ge=2)]
Share = Annotated[Float, Field(ge=0.0, lt=1.0)]
Spread = Annotated[Float, Field(ge=0.0, le=2.0)]
_TYPES = {"code": "minirepo", "general": "files", "single_turn": "arith"}
"""Kind of a simulated source -> the type of source that has this kind in a run's configuration."""


class TraceSource(Section):
    """One source of the mix."""

    kind: Literal["code", "general", "single_turn"]
    """Only code groups are graded."""
    share_percent: PositiveFloat
    """Share of the groups of a step, in percent; all sources together give 100."""
    time_min: PositiveFloat
    """Mean time that one trajectory holds its slot, in minutes."""
    acceptance: Annotated[Float, Field(gt=0.0, le=1.0)] = 1.0
    """Probability that a group is mixed (some pass, some fail), so that it can be trained on."""
    tokens_per_s: PositiveFloat = 20.0
    """Tokens that a trajectory grows by in a second of its time."""
    prior_acceptance: Annotated[Float, Field(gt=0.0, le=1.0)] | None = None
    """What the scheduler believes at the start; null: the true acceptance."""
    prior_time_min: PositiveFloat | None = None
    """What the scheduler believes at the start; null: the true time_min."""


class TraceRollout(Section):
    """The rollout pool. Times are lognormal."""

    slots: PositiveInt
    """Trajectories at once."""
    spread: Spread = 0.5
    """Standard deviation of the logarithm of a trajectory's time."""
    task_share: Probability = 0.5
    """Share of that variance which a group has in common, because its task is long or short."""
    lost_share: Share = 0.0
    """Probability that a trajectory is lost to infrastructure, at a moment anywhere in its time."""
    infra_retries: NonNegativeInt = 2
    """How often one lost trajectory is sampled again before it is masked."""


class TraceGrading(Section):
    """The grader pool. Times are lognormal."""

    slots: PositiveInt
    """Groups at once."""
    time_s: PositiveFloat = 600.0
    """Mean time of one group."""
    spread: Spread = 0.4
    """Standard deviation of its logarithm."""
    timeout_s: PositiveFloat = 2400.0
    """A grading that takes longer ends then, as a fallback."""
    invalid_share: Share = 0.0
    """Probability that a verdict is invalid, which is a fallback too."""
    lost_share: Share = 0.0
    """Probability that the grader is lost during a grading; the group is handed to another one once."""


class TraceLearner(Section):
    """The learner and the publishing of its weights."""

    tokens_per_s: PositiveFloat
    """Tokens trained on in a second, all ranks together."""
    fixed_s: NonNegativeFloat = 0.0
    """Time of a step that does not depend on its tokens."""
    publish_s: NonNegativeFloat = 0.0
    """Time in which the engines take the new weights; all rollouts stand still meanwhile."""


class TraceConfig(Section):
    """One simulated run."""

    name: NonEmpty
    """Name of the folder of results."""
    seed: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    """Decides every random draw: the same trace and seed give the same run."""
    steps: PositiveInt = 6
    """Optimiser steps."""
    warmup_steps: NonNegativeInt = 2
    """First steps that are left out of the figures of the steady state: the pools fill up in them."""
    groups_per_step: PositiveInt
    """Groups of all sources in one batch."""
    group_size: Size = 16
    """Trajectories of a group."""
    sources: Annotated[dict[str, TraceSource], Field(min_length=1)]
    """Name -> source."""
    rollout: TraceRollout
    grading: TraceGrading | None = None
    """null: nothing is graded."""
    learner: TraceLearner
    scheduler: SchedulerConfig = SchedulerConfig()
    """As in a run's configuration."""

    @model_validator(mode="after")
    def _shares(self) -> TraceConfig:
        total = sum(source.share_percent for source in self.sources.values())
        if abs(total - 100.0) > 0.01:
            raise ValueError(f"the sources' share_percent sum to {total:g}; make them sum to 100")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} leaves no step of steps={self.steps} to be measured; raise steps"
            )
        if short := [name for name, quota in self.quotas().items() if quota == 0]:
            raise ValueError(
                f"groups_per_step={self.groups_per_step} leaves no group to {', '.join(short)}; raise groups_per_step"
            )
        return self

    def quotas(self) -> dict[str, int]:
        """B_i: groups of each source in a step, by largest remainder."""
        exact = {n: self.groups_per_step * s.share_percent / 100.0 for n, s in self.sources.items()}
        quotas = {name: int(value) for name, value in exact.items()}
        by_remainder = sorted(exact, key=lambda name: quotas[name] - exact[name])
        for name in by_remainder[: self.groups_per_step - sum(quotas.values())]:
            quotas[name] += 1
        return quotas

    def scaled(self, factor: float) -> TraceConfig:
        """The same run with `factor` times the groups and every pool in proportion; times stay.

        Raises:
            ValidationError: nothing is left of something.
        """
        data = self.model_dump(exclude_unset=True)
        data["groups_per_step"] = round(self.groups_per_step * factor)
        data["rollout"]["slots"] = round(self.rollout.slots * factor)
        if self.grading is not None:
            data["grading"]["slots"] = max(1, round(self.grading.slots * factor))
        data["learner"]["tokens_per_s"] = self.learner.tokens_per_s * factor
        inflight = round(self.scheduler.max_inflight_groups * factor)
        data["scheduler"] = {**data.get("scheduler", {}), "max_inflight_groups": inflight}
        return TraceConfig.model_validate(data)

    def run_config(self) -> RunConfig:
        """What the scheduler is given; models, engines and sandboxes in it stand for nothing."""
        model = {"model": "simulated", "device": "cuda"}  # no cache to be filled: the slots say what fits
        grading = self.grading
        sources = {
            name: {
                "type": _TYPES[self.sources[name].kind],
                "groups_per_step": quota,
                "prior_acceptance": self.sources[name].prior_acceptance or self.sources[name].acceptance,
                "prior_time_s": 60.0 * (self.sources[name].prior_time_min or self.sources[name].time_min),
            }
            for name, quota in self.quotas().items()
        }
        data: dict[str, Any] = {
            "name": "simulated",
            "seed": self.seed,
            "steps": self.steps,
            "sources": sources,
            "algorithm": {"group_size": self.group_size, "mode": "outcome" if grading is None else "redistribute"},
            "engine": {**model, "max_num_seqs": self.rollout.slots},
            "rollout": {
                "workers": 1,
                "slots_per_worker": self.rollout.slots,
                "infra_retries": self.rollout.infra_retries,
                "limits": {"wall_s": 1e8},
            },
            "learner": model,
            # With few slots and long rollouts nothing moves for long; what stands still is found out after a day.
            "scheduler": {"abort_after_s": 86_400, **self.scheduler.model_dump(exclude_unset=True)},
            "checkpoint": {"every_steps": self.steps + 1},  # a disk has no virtual time: none is written
            "eval": None,
        }
        if grading is not None:
            backend = {"type": "vllm", "engine": model}
            data["grader"] = {
                "backend": backend,
                "workers": 1,
                "groups_per_worker": grading.slots,
                "timeout_s": grading.timeout_s,
            }
        return RunConfig.model_validate(data)
