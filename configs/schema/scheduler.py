"""The driver: what is under way at once, and when it stops (M6)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from configs.schema.fields import (
    Flag,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)


class OversamplingConfig(Section):
    """How many groups more than needed are under way, by source: the longer its rollouts, the more (M6.1)."""

    mean: NonNegativeFloat = 0.5
    """p_bar: mean oversampling, weighted by need; 0.5 keeps half as many groups again as one step needs under way."""
    min: NonNegativeFloat = 0.0
    """p_min: least oversampling of a source."""
    max: NonNegativeFloat = 2.0
    """p_max: most oversampling of a source."""

    @model_validator(mode="after")
    def _order(self) -> OversamplingConfig:
        if not self.min <= self.mean <= self.max:
            raise ValueError(
                f"mean={self.mean:g} must lie between min={self.min:g} and max={self.max:g}; choose min <= mean <= max"
            )
        return self


class SchedulerConfig(Section):
    """The driver. docs/scheduling.md explains how its settings work together."""

    max_inflight_groups: PositiveInt = 12
    """Groups that roll out, are graded or are in the running step. Groups that wait for their batch are bounded by the
    quotas and max_staleness instead, so that the surplus of one source never keeps out another."""
    max_staleness: NonNegativeInt = 2
    """Optimiser steps between sampling a token and training on it (M6.4); the oldest token of a group decides."""
    stale: Literal["drop", "wait"] = "drop"
    """drop: a group that grew too old is dropped and counted; wait: a step waits for the groups that would otherwise
    grow too old, so that none is lost to its length (M6.4)."""
    asynchronous: Flag = True
    """false: strictly on-policy. Nothing is sampled for a later step before the weights of this one are published, and
    only tokens of the current weights are trained on. Can also be written `async`."""
    overlap: Flag = True
    """false: the stages of a step take turns, for comparison. Nothing is graded before all its rollouts have ended, and
    nothing is trained on before all its groups are graded. Needs asynchronous: false."""
    alpha: Probability = 0.5
    """Dispatch weight: 1 follows the quotas, 0 what is still missing in this step (M6.2)."""
    oversampling: OversamplingConfig | None = None
    """null: as many groups are under way as max_staleness lets be trained."""
    starve_after_groups: PositiveInt = 64
    """Groups of one source that end in a row without one to train on, before an alarm says that it starves; until the
    next acceptable one only `starve_probes` groups of it run at once."""
    starve_probes: PositiveInt = 1
    """Groups at once of a source that starves, or that is paused for its lost rollouts."""
    pause_masked_above: Probability | None = 0.5
    """Training pauses while a larger share of the last rollouts, of the run or of one source, was lost to
    infrastructure, retries included; probes go on, and with them the run; null: it trains on what is left."""
    pause_masked_window: PositiveInt = 64
    """Rollouts that the share is counted over; half as many decide when to go on."""
    quarantine_after: PositiveInt | None = 3
    """Failures of a verifier or of a workspace's set-up that put a task in quarantine, if it was never evaluated and
    other tasks of its source are: it is sampled no more in this run (M1.3); null: never."""
    kv_tokens_per_engine: PositiveInt | None = None
    """KV cache of one engine in tokens (vLLM logs it at its start): rollouts start only while what is predicted to be
    needed fits all engines; null: from engine.kv_cache_gib on a CPU, no such bound on CUDA."""
    stall_after_s: PositiveFloat = 50.0
    """Without any progress for this long, the run says which loop waits for which queue, pool or actor, and since when,
    and writes the stacks of its processes into `stacks/` (docs/operations.md). Nothing is ended by it."""
    abort_after_s: PositiveFloat = 900.0
    """Without any progress for this long, the run ends with exit code 3 and its last checkpoint, even if its event loop
    is blocked."""

    @model_validator(mode="before")
    @classmethod
    def _short_name(cls, data: Any) -> Any:
        """`async` cannot name an attribute in Python."""
        if isinstance(data, dict) and "async" in data and "asynchronous" not in data:
            return {("asynchronous" if key == "async" else key): value for key, value in data.items()}
        return data

    @property
    def staleness(self) -> int:
        """Optimiser steps that a token may be old when it is trained on."""
        return self.max_staleness if self.asynchronous else 0
