"""What an actor of a pool takes of the cluster, and pools that follow their queue."""

from __future__ import annotations

from pydantic import model_validator

from configs.schema.fields import NonNegativeFloat, PositiveFloat, PositiveInt, Section


class Resources(Section):
    """Ray resources of one actor of a pool."""

    cpus: NonNegativeFloat = 0.0
    """Ray CPUs of one actor; 0 leaves the placement free."""
    gpus: NonNegativeFloat = 0.0
    """GPUs of one actor; 0 on device cuda: one for a learner rank, tensor_parallel_size for an engine."""
    custom: dict[str, PositiveFloat] = {}
    """Custom Ray resources, e.g. {grader_node: 1}, to tie a pool to a node type."""
    labels: dict[str, str] = {}
    """Node labels that are required, e.g. {"pool": "graders"}; Ray also takes "!spot" and "in(a,b)" as values."""


class AutoscaleConfig(Section):
    """A pool that follows its queue."""

    min: PositiveInt = 1
    """Fewest workers."""
    max: PositiveInt
    """Most workers."""
    target_queue_s: PositiveFloat = 30.0
    """Wait for a free slot that is long enough to start more workers."""

    @model_validator(mode="after")
    def _order(self) -> AutoscaleConfig:
        if self.max < self.min:
            raise ValueError(f"max={self.max} must not be below min={self.min}; raise max")
        return self


class ScalingConfig(Section):
    """Pools that grow and drain while the run works (docs/scaling.md); `gagar scale` does it by hand."""

    rollout: AutoscaleConfig | None = None
    """null: the pool stays as large as it is told to be."""
    grader: AutoscaleConfig | None = None
    """null: the pool stays as large as it is told to be."""
    cooldown_s: PositiveFloat = 60.0
    """Least time between two changes of one pool, and how long it must be calm before it shrinks."""
    drain_s: NonNegativeFloat = 120.0
    """What a drained worker gets to finish what it has; the rest is handed back and starts again on another one."""
    max_actors: PositiveInt = 1024
    """Most actors that `gagar scale` gives one pool."""
