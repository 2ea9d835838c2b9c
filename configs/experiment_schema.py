"""An experiment: arms x seeds of one training run, and how they are held against each other (`gagar experiment`).

Like `configs.schema`: unknown keys are errors, every number says its unit, checks across keys are pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from configs.schema import (
    InputFolder,
    Int,
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    output_folder,
    run_name,
)

Override = NonEmpty
"""As on the command line: key.path=value, or ~key.path for the default."""


def _arm_name(value: str) -> str:
    """Names of folders, together with a seed."""
    if not re.fullmatch(r"[a-z][a-z0-9_.-]*", value) or re.search(r"-s\d+$", value):
        raise ValueError("is no name of an arm; use a-z, 0-9, '_', '.' and '-', and no '-s0' at its end")
    return value


ArmName = Annotated[str, AfterValidator(_arm_name)]


class ArmConfig(Section):
    """One arm: what is different in it. Everything else is the same in all arms, the data order included."""

    files: tuple[InputFolder, ...] = ()
    """Files merged over the base, e.g. arms/outcome.yaml (relative: against the folder of this file)."""
    set: tuple[Override, ...] = ()
    """Changes to single keys, after the files."""


class HeldOut(Section):
    """The held-out tasks that every cell is evaluated on."""

    source: NonEmpty
    """Source of the base whose held-out split is used; one with groups_per_step: 0, so that its seed is the same in
    all cells."""
    tasks: PositiveInt = 60
    """Held-out tasks."""
    samples: PositiveInt = 3
    """k: trajectories of each task, for avg@k and pass@k."""
    seed: NonNegativeInt = 1234
    """Index of the first task in the held-out stream."""
    every_steps: PositiveInt | None = None
    """Evaluate cells beside their training too, for curves over steps: as eval.every_steps. It takes rollout slots from
    the training, in all arms alike; null: not."""


class ExperimentConfig(Section):
    """One experiment. Its cells are ordinary runs, ARM-sSEED, in its folder."""

    name: Annotated[NonEmpty, AfterValidator(run_name)]
    """Folder of the experiment under `output`."""
    output: Annotated[NonEmpty, AfterValidator(output_folder)] = "runs"
    """Parent folder of experiments (relative: against the working directory)."""
    base: InputFolder
    """Configuration that every cell starts from (relative: against the folder of this file)."""
    set: tuple[Override, ...] = ()
    """Changes to it for all arms."""
    seeds: Annotated[tuple[Annotated[Int, Field(ge=0, lt=100_000)], ...], Field(min_length=1)] = (0, 1, 2)
    """Seed s gives the run that seed, and each source with a quota its own seed plus 1000 s: other tasks, in an order
    that is the same in all arms."""
    arms: Annotated[dict[ArmName, ArmConfig], Field(min_length=1)]
    """Name -> arm."""
    run: tuple[ArmName, ...] = ()
    """Arms that run where none is named; empty: all."""
    reference: ArmName
    """The arm that the others are held against."""
    against: Mapping[ArmName, ArmName] = Field(default_factory=dict)
    """Arms that are held against another one than the reference, e.g. variants of an arm against that arm."""
    evaluation: HeldOut
    """Of the start checkpoint once, and of every cell's last one, on the same held-out tasks. What passes is graded by
    the base's grader, whatever the arm trained with."""
    parallel: PositiveInt = 1
    """Cells at once; more than 1 where the base joins a cluster (`ray.address`) that has room for them."""
    cell_minutes: PositiveFloat | None = None
    """How long one cell takes where this was measured, for the estimate of --dry-run before any has ended."""

    @model_validator(mode="after")
    def _names(self) -> ExperimentConfig:
        for key, names in (
            ("run", self.run),
            ("reference", (self.reference,)),
            ("against", (*self.against, *self.against.values())),
        ):
            if unknown := [name for name in names if name not in self.arms]:
                raise ValueError(f"{key} names {unknown[0]!r}, which is no arm; choose from {', '.join(self.arms)}")
        for key, values in (("seeds", self.seeds), ("run", self.run)):
            if len(set(values)) < len(values):
                raise ValueError(f"{key} names one twice; remove it")
        return self
