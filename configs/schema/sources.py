"""Where tasks come from (M6)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.fields import (
    Flag,
    Float,
    InputFolder,
    Int,
    NonEmpty,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    TaskPlace,
    Text,
)


class SourceBase(Section):
    """What every task source of the mix has (M6)."""

    groups_per_step: NonNegativeInt
    """B_i: groups of this source in every training batch; 0 keeps the source for evaluation only."""
    seed: Int = 0
    """Seed of the task stream; another seed gives other tasks."""
    prior_acceptance: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.6
    """Cold-start estimate of r_i, the share of groups that can be trained on."""
    prior_time_s: PositiveFloat = 20.0
    """Cold-start estimate of t_i, the effective time of one rollout (pauses for new weights left out), in seconds."""
    min_concurrency: NonNegativeInt = 0
    """Trajectories of this source at once below which it is served before the others, as long as it may be sampled."""
    max_concurrency: PositiveInt | None = None
    """Most trajectories of this source at once (at least a group runs); null: no limit of its own."""


class MinirepoSource(SourceBase):
    """Generated code-repair tasks in small git repositories (kind: code)."""

    type: Literal["minirepo"]
    kinds: tuple[str, ...] = ()
    """Bug kinds to draw from; empty means all."""


class FilesSource(SourceBase):
    """Generated multi-turn terminal tasks with a state verifier (kind: general)."""

    type: Literal["files"]


class ArithSource(SourceBase):
    """Generated single-turn arithmetic with a rule verifier (kind: single_turn)."""

    type: Literal["arith"]


class SandboxResources(Section):
    """What sandboxes of a source's tasks get: before what the sandbox's own section and the tasks themselves say."""

    cpus: PositiveFloat | None = None
    """Processors; jails have no such limit. null: as elsewhere."""
    memory_mib: PositiveInt | None = None
    """Memory in MiB. null: as elsewhere."""
    disk_mib: PositiveInt | None = None
    """Disk in MiB; of a jail the workspace_mib. docker and modal have no such limit. null: as elsewhere."""


class ListedSource(SourceBase):
    """What every source over a list of tasks has (kind: code): each once an epoch, in an order of each epoch's own."""

    path: TaskPlace
    """Where the tasks are (relative: against the folder of the configuration file); of swebench and mimo also a data
    set of the Hugging Face Hub, hf://OWNER/NAME:SPLIT."""
    heldout_share: Annotated[Float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the tasks that are held out, chosen by a hash of their ids alone; a task's own word goes first."""
    heldout_path: TaskPlace | None = None
    """Held-out tasks of their own, in the same format; null: heldout_share of those in path."""
    test_timeout_s: PositiveFloat = 900.0
    """Time limit of the tests of a task that names none."""
    resources: SandboxResources = SandboxResources()


class SwebenchSource(ListedSource):
    """Rows of SWE-bench, SWE-bench Pro, SWE-Gym or SWE-smith: JSON lines or parquet."""

    type: Literal["swebench"]
    dataset: Literal["auto", "swebench", "pro", "gym", "smith"] = "auto"
    """Whose conventions hold; auto tells swebench, pro and smith apart by the fields of each row."""
    image: NonEmpty | None = None
    """Image of rows that name none; {id} stands for the instance in lower case. Null: where the makers publish it."""
    repos: InputFolder | None = None
    """Folder of repositories, for sandboxes without images: ID/, ID.tar.gz, or a clone OWNER__NAME.git."""
    scripts: InputFolder | None = None
    """Folder run_scripts of SWE-bench Pro."""
    test_command: Text | None = None
    """How the tests run, in place of what the rows say; {tests}: the test files. Its log must name each test."""
    hints: Flag = False
    """Whether the statement ends with the row's hints_text."""


class MimoSource(ListedSource):
    """Rows whose instance_json names image, folder, statement, test patch and test command: JSON lines or parquet."""

    type: Literal["mimo"]
    repos: InputFolder | None = None
    """Folder of repositories, for sandboxes without images: ID/, ID.tar.gz, or a clone OWNER__NAME.git."""


class HarborSource(ListedSource):
    """A folder of Harbor or Terminal-Bench tasks."""

    type: Literal["harbor"]


class FolderSource(ListedSource):
    """A folder of tasks over your own repositories: each a task.toml, statement.md and a repository."""

    type: Literal["folder"]


SourceConfig = Annotated[
    MinirepoSource | FilesSource | ArithSource | SwebenchSource | MimoSource | HarborSource | FolderSource,
    Field(discriminator="type"),
]
