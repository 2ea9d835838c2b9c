"""A run: all sections together, and those that are about the run itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from configs.schema.algorithm import AlgorithmConfig, LossConfig
from configs.schema.fields import (
    Flag,
    Int,
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    at_most,
    output_folder,
    run_name,
)
from configs.schema.grader import GraderConfig
from configs.schema.learner import LearnerConfig
from configs.schema.pools import ScalingConfig
from configs.schema.rollout import EngineConfig, RolloutConfig
from configs.schema.scheduler import SchedulerConfig
from configs.schema.sources import SourceConfig


class SupervisionConfig(Section):
    """When a part of a run counts as hung, and how often it is started again (docs/operations.md)."""

    silent_after_s: PositiveFloat = 60.0
    """A rollout worker, grader, engine or learner rank that gives no sign of life for this long counts as hung: it is
    ended and replaced, as one that died is."""
    learner_timeout_s: PositiveFloat = 1800.0
    """One optimiser step, one publication of weights or one save of the learner's state that takes longer counts as
    hung, even if its processes answer: ranks can wait for each other for ever."""
    learner_restarts: NonNegativeInt = 3
    """Times in a row, without a finished step between, that a lost learner is started again from the last checkpoint
    while engines and workers stay; then the run ends."""
    driver_restarts: NonNegativeInt = 0
    """Times in a row, without a new checkpoint between, that a driver that died, hangs or failed is started again with
    --resume by a small process beside it; 0: none, as where Kubernetes or Slurm does that."""


class CheckpointConfig(Section):
    """Weights, optimiser, sampler and counters."""

    every_steps: PositiveInt = 5
    """Optimiser steps between checkpoints; the last step always has one."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk."""
    mirror: NonEmpty | None = None
    """Address of a folder in shared or object storage (file:///shared/runs, s3://bucket/runs, ...) that gets a copy of
    every checkpoint, and from which `--resume` brings the newest one back where the run's own folder has none; null:
    none. Credentials come from the environment, as the client library of that storage reads them."""
    rollouts: Flag = True
    """Whether workers keep finished rollouts in the run's folder `rollouts/` until a checkpoint covers them, so that a
    resume samples none of them again; every node must see the folder."""


class EvalConfig(Section):
    """Held-out evaluation: avg@samples over tasks (mean over samples, not pass@k)."""

    source: NonEmpty = "minirepo"
    """Source whose held-out split is used."""
    tasks: PositiveInt = 24
    """Held-out tasks."""
    samples: PositiveInt = 1
    """Trajectories of each task."""
    seed: NonNegativeInt = 1234
    """Index of the first task in the held-out stream; another one gives other tasks."""
    before: Flag = True
    """Evaluate before the first step."""
    after: Flag = True
    """Evaluate after the last step."""
    every_steps: PositiveInt | None = None
    """Evaluate after every so many steps too, beside the training: a quarter of the rollout slots sample it, with the
    weights that the engines have by then (`versions` in eval.jsonl says which); null: not."""


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online when logged in, else offline."""
    project: NonEmpty = "gagar"
    """Project that runs appear in."""
    entity: NonEmpty | None = None
    """Team or user; null: the default of the login."""


class TelemetryConfig(Section):
    """Metrics, spans and the archive of groups."""

    wandb: WandbConfig = WandbConfig()
    archive: Literal["graded", "none"] = "graded"
    """graded: every group that a grader was asked about is kept in the run's folder `archive/`, with its task, patches,
    turns and logs, to be shown and graded again; none: nothing is kept."""
    progress_every_s: PositiveFloat = 10.0
    """Interval of the progress lines where the output is not a terminal."""


class RayConfig(Section):
    """Where Ray runs."""

    address: NonEmpty | None = None
    """null starts a local Ray; `auto`, HOST:PORT or ray://HOST:PORT joins a running cluster."""
    object_store_mib: Annotated[Int, Field(ge=75), at_most(10**12)] | None = 512
    """Local Ray only: size of the object store, in MiB (Ray's own least is 75); null leaves it to Ray."""


class RunConfig(Section):
    """One training run."""

    name: Annotated[NonEmpty, AfterValidator(run_name)]
    """Folder of the run under `output`: letters, digits, `.`, `_` and `-`, at most 239 of them."""
    output: Annotated[NonEmpty, AfterValidator(output_folder)] = "runs"
    """Parent folder of runs (relative: against the working directory)."""
    seed: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    """Seeds the engines and the order in which graders see candidates; a source has its own seed."""
    steps: PositiveInt
    """Optimiser steps."""
    sources: dict[str, SourceConfig]
    """Name -> source. The names appear in metrics and identifiers."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    loss: LossConfig = LossConfig()
    engine: EngineConfig
    """Serves the policy."""
    rollout: RolloutConfig = RolloutConfig()
    grader: GraderConfig | None = None
    """None only with algorithm.mode outcome."""
    learner: LearnerConfig
    scheduler: SchedulerConfig = SchedulerConfig()
    scaling: ScalingConfig = ScalingConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig | None = EvalConfig()
    """null switches held-out evaluation off."""
    telemetry: TelemetryConfig = TelemetryConfig()
    ray: RayConfig = RayConfig()
