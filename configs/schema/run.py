"""The configuration of a run: every key, its type, default, unit and meaning.

Unknown keys are errors (`extra="forbid"`). Checks that need more than one key live in `RunConfig` (pure) and in
`configs.check` (those that look at the disk or at keys without effect).
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError


def _no_flag(value: Any) -> Any:
    """Pydantic would read `true` as 1, and text that looks like a number as that number."""
    if isinstance(value, bool | str):
        raise PydanticCustomError("number_type", "must be a number, not text, true or false")
    return value


def _at_most(limit: int) -> AfterValidator:
    """Beyond any machine, and where clocks and C integers overflow."""

    def check(value: float) -> float:
        if abs(value) > limit:
            raise PydanticCustomError(
                "too_large", "is beyond what any machine can do (the limit is {limit})", {"limit": limit}
            )
        return value

    return AfterValidator(check)


Flag = Annotated[bool, Field(strict=True)]
Int = Annotated[int, BeforeValidator(_no_flag), _at_most(2**63 - 1)]
Float = Annotated[float, BeforeValidator(_no_flag), _at_most(10**9)]
PositiveInt = Annotated[Int, Field(gt=0), _at_most(10**12)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0), _at_most(10**12)]
NonNegativeFloat = Annotated[Float, Field(ge=0.0)]
Probability = Annotated[Float, Field(ge=0.0, le=1.0)]
Decay = Annotated[Float, Field(ge=0.0, lt=1.0)]


def _one_line(value: str) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise PydanticCustomError("one_line", "must be one line of text")
    return value


Text = Annotated[str, Field(min_length=1)]
NonEmpty = Annotated[Text, AfterValidator(_one_line)]


def _against_config_folder(value: str, info: ValidationInfo) -> str:
    """A relative folder means one beside the configuration file (`configs.load` gives its folder)."""
    folder = (info.context or {}).get("folder")
    if folder is None:
        return value
    try:
        return str((folder / Path(value).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"is not a usable path ({error}); give a folder that exists") from None


def _place_of_tasks(value: str, info: ValidationInfo) -> str:
    return value if value.startswith("hf://") else _against_config_folder(value, info)


InputFolder = Annotated[NonEmpty, AfterValidator(_against_config_folder)]
TaskPlace = Annotated[NonEmpty, AfterValidator(_place_of_tasks)]
ModelFolder = InputFolder

MAX_NAME = 239
"""A file system takes 255 bytes, and an earlier run of the name is kept with 16 more behind it."""


def run_name(value: str) -> str:
    """Names are folders, parts of Ray namespaces and W&B names."""
    if len(value) > MAX_NAME:
        raise ValueError(f"has {len(value)} characters and the folder of a run takes {MAX_NAME}; give a shorter name")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("._-")
        raise ValueError(
            "may hold only the letters A-Z and a-z, digits, '.', '_' and '-', and must start with a letter or a digit; "
            f"write e.g. name: {plain or 'my-run'}"
        )
    return value


def output_folder(value: str) -> str:
    """`~` is the home folder."""
    long = next((part for part in value.split("/") if len(os.fsencode(part)) > 255), None)
    if long is not None or len(os.fsencode(value)) > 3500:
        raise ValueError("is longer than file systems take (255 bytes a folder, 3,500 in all); give a shorter path")
    try:
        return str(Path(value).expanduser()) if value.startswith("~") else value
    except RuntimeError as error:
        raise ValueError(f"is not a usable path ({error}); give the parent folder of runs") from None


class Section(BaseModel):
    """Base of every section: unknown keys are refused and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=(), allow_inf_nan=False)


class AdvantageMode(StrEnum):
    """How outcome advantages and quality factors become training advantages (M4)."""

    OUTCOME = "outcome"
    DOWNWEIGHT = "downweight"
    DISCOUNT = "discount"
    REDISTRIBUTE_EXACT = "redistribute_exact"
    REDISTRIBUTE = "redistribute"


class Aggregation(StrEnum):
    """How token losses become one number (M5.2)."""

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    PROMPT_MEAN = "prompt_mean"


class LengthPenaltyConfig(Section):
    """M5.4, applied to passing trajectories after the grader's corrections (M1.8)."""

    max_penalty: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.2
    """X: the largest deduction from a passing reward."""
    free_excess: NonNegativeFloat = 0.0
    """d: relative excess over l* that costs nothing."""
    full_excess: PositiveFloat = 1.0
    """s: relative excess over l* at which the whole penalty applies; must be above free_excess."""
    exponent: PositiveFloat = 1.5
    """g: shape of the ramp."""
    percentile: Annotated[Float, Field(ge=0.0, le=100.0)] = 30.0
    """B: the percentile of passing lengths that is l*."""
    min_pass_rate: Probability = 0.5
    """A: groups whose pass rate is not above this are left alone."""

    @model_validator(mode="after")
    def _ramp(self) -> LengthPenaltyConfig:
        if self.full_excess <= self.free_excess:
            raise ValueError(
                f"full_excess={self.full_excess} must be above free_excess={self.free_excess}; raise full_excess"
            )
        return self


Dimension = Literal["approach", "precision", "minimality", "side_effects", "consistency"]
"""What a candidate is scored on (M3.1)."""


class RubricConfig(Section):
    """M3 constants."""

    weight_approach: NonNegativeFloat = 0.30
    """Share of approach suitability in W; the five weights sum to 1 (M3.1)."""
    weight_precision: NonNegativeFloat = 0.25
    """Share of implementation precision."""
    weight_minimality: NonNegativeFloat = 0.20
    """Share of minimality of changes."""
    weight_side_effects: NonNegativeFloat = 0.15
    """Share of freedom from side effects."""
    weight_consistency: NonNegativeFloat = 0.10
    """Share of codebase consistency."""
    t1_first: Annotated[Float, Field(gt=0.0, le=1.0)] = 1.0
    """Factor of the first tied group in tier 1 (M3.4)."""
    t1_rest: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.9
    """Factor of the others in tier 1."""
    t2_high: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.85
    """Factor of the first tied group in tier 2."""
    t2_low: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.40
    """Factor of the last one in tier 2; between them it falls linearly."""
    t3: Annotated[Float, Field(gt=0.0, le=1.0)] = 0.2
    """Factor of tier 3."""
    left_out: tuple[Dimension, ...] = ()
    """Ablation: dimensions that count as 5 for every candidate, so that they move neither a tier nor an order. What the
    grader gave them is still recorded, and flags still count."""

    @model_validator(mode="after")
    def _check(self) -> RubricConfig:
        weights = {key: value for key, value in self if key.startswith("weight_")}
        total = sum(weights.values())
        if abs(total - 1.0) > 1e-9:
            said = ", ".join(f"{key}={value:g}" for key, value in weights.items())
            raise ValueError(f"the weights sum to {total:g} ({said}); make them sum to 1")
        if not self.t1_first >= self.t1_rest >= self.t2_high >= self.t2_low >= self.t3:
            factors = ", ".join(
                f"{key}={getattr(self, key):g}" for key in ("t1_first", "t1_rest", "t2_high", "t2_low", "t3")
            )
            raise ValueError(f"factors must not rise in this order: {factors}; lower the later ones")
        return self


class AlgorithmConfig(Section):
    """Groups and their advantages (M1, M3, M4)."""

    mode: AdvantageMode = AdvantageMode.REDISTRIBUTE
    """How outcome advantages and quality factors become training advantages (M4.6)."""
    group_size: Annotated[Int, Field(ge=2), _at_most(10**12)] = 6
    """n: trajectories sampled for one task."""
    min_valid: Annotated[Int, Field(ge=2), _at_most(10**12)] = 2
    """A group with fewer valid trajectories (after masking, M1.3) is skipped and counted."""
    lambda_max: Annotated[Float, Field(ge=1.0)] = 1.5
    """Cap of the scale-up (M4.3); used by mode `redistribute` only."""
    rubric: RubricConfig = RubricConfig()
    length_penalty: LengthPenaltyConfig | None = None
    """null: none."""


class RatioMaskLoss(Section):
    """Token policy gradient; tokens whose ratio leaves the bounds are masked but stay in the denominator (M5.1)."""

    name: Literal["ratio_mask"] = "ratio_mask"
    bounds_positive: tuple[PositiveFloat, PositiveFloat] = (0.2, 5.0)
    """Kept ratios where the advantage is positive."""
    bounds_negative: tuple[PositiveFloat, PositiveFloat] = (0.2, 5.0)
    """Kept ratios where the advantage is negative."""

    @model_validator(mode="after")
    def _bounds(self) -> RatioMaskLoss:
        for key, (low, high) in (("bounds_positive", self.bounds_positive), ("bounds_negative", self.bounds_negative)):
            if not low < 1.0 < high:
                raise ValueError(f"{key}=[{low:g}, {high:g}] must contain 1; choose low < 1 < high")
        return self


class PpoClipLoss(Section):
    """PPO-clip with dual clip (M5.1)."""

    name: Literal["ppo_clip"]
    clip_low: Annotated[Float, Field(gt=0.0, lt=1.0)] = 0.2
    """Ratios below 1 - clip_low are clipped."""
    clip_high: PositiveFloat = 0.2
    """Ratios above 1 + clip_high are clipped."""
    dual_clip: Annotated[Float, Field(gt=1.0)] = 3.0
    """Lower bound of the objective for negative advantages, as a multiple of the advantage."""


class LossConfig(Section):
    """M5."""

    objective: Annotated[RatioMaskLoss | PpoClipLoss, Field(discriminator="name")] = RatioMaskLoss()
    aggregation: Aggregation = Aggregation.PROMPT_MEAN
    """How token losses become one number (M5.2)."""


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


class JailSandbox(Section):
    """A SWE-ReX server inside a bubblewrap jail on the worker's host."""

    type: Literal["jail"] = "jail"
    memory_mib: PositiveInt = 512
    """Memory of all processes of a command together, and address space of each one of them, in MiB."""
    max_processes: PositiveInt = 64
    """Processes in one jail."""
    cpu_s: PositiveFloat = 1800.0
    """CPU seconds of one process; it is killed then."""
    file_size_mib: PositiveInt = 64
    """Largest file that a process may write, in MiB."""
    workspace_mib: PositiveInt = 256
    """Size of workspace, /tmp and /dev/shm of a sandbox together, in MiB; all are in memory, beside memory_mib."""
    max_files: PositiveInt = 50_000
    """Files and folders in workspace, /tmp and /dev/shm of a sandbox together."""
    reuse_servers: Flag = True
    """Whether a server whose sandbox was closed and emptied serves the next one; false starts a server for each."""
    allow_weaker: Flag = False
    """Whether to run where a host cannot enforce one of the limits; `gagar doctor` names them."""
    start_timeout_s: PositiveFloat = 60.0
    """A sandbox that is not up by then counts as lost."""


class StartedSandbox(Section):
    """What all sandboxes have that some service starts."""

    start_retries: NonNegativeInt = 3
    """How often a start is tried again, after waits that grow, where the service had no room or did not answer in time.
    An image that does not exist is never asked for twice."""
    warm: NonNegativeInt = 0
    """Sandboxes that each worker starts ahead, of the image that it was last asked for: the verification of that task
    and the next of its trajectories take them. What nobody takes is ended when another image is asked for."""


class DockerSandbox(StartedSandbox):
    """Containers of docker or podman on the worker's host and a SWE-ReX server in each."""

    type: Literal["docker"]
    image: NonEmpty
    """Image with bash, git and what the tasks need; tasks that name one of their own get that."""
    runtime: Literal["docker", "podman"] = "docker"
    """Container program on the worker's host."""
    server_image: NonEmpty | None = None
    """Image of SWE-ReX's server and its Python (infra/docker/Dockerfile.server), which containers see read-only; null:
    images have `swerex-remote` themselves, or a Python and a way to PyPI."""
    start_timeout_s: PositiveFloat = 300.0
    """A sandbox that is not up by then counts as lost (the first start pulls the image)."""
    lifetime_s: PositiveFloat = 7200.0
    """A container ends by itself after this long, whatever becomes of the worker; it must outlast limits.wall_s."""
    docker_args: tuple[str, ...] = (
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--pids-limit=256",
        "--memory=1g",
    )
    """More arguments of `docker run`. The server is reached through a published port, which `--network=none` would cut
    off: give a network without a route outside (`--network=NAME`) to keep the policy off the internet."""
    allow_weaker: Flag = False
    """Whether to run with docker_args that bound no memory or processes, or leave a network that may lead outside."""


class ModalSandbox(StartedSandbox):
    """Sandboxes of modal.com."""

    type: Literal["modal"]
    image: NonEmpty
    """Image with bash, git and what the tasks need; tasks that name one of their own get that."""
    server_image: NonEmpty | None = None
    """Image of SWE-ReX's server and its Python (infra/docker/Dockerfile.server), which goes into Modal's images; null:
    it is installed there with apt and pipx."""
    start_timeout_s: PositiveFloat = 600.0
    """A sandbox that is not up by then counts as lost (the first start of an image builds Modal's own from it)."""
    lifetime_s: PositiveFloat = 7200.0
    """Modal ends a sandbox after this long, whatever becomes of the worker; it must outlast limits.wall_s."""
    cpus: PositiveFloat = 1.0
    """Processors of one sandbox."""
    memory_mib: PositiveInt = 1024
    """Memory of one sandbox, in MiB; more ends it."""
    network: Flag = False
    """Whether a sandbox reaches the internet."""


class FargateSandbox(StartedSandbox):
    """Tasks of AWS Fargate (SWE-ReX FargateDeployment); needs AWS credentials in the worker's environment or role."""

    type: Literal["fargate"]
    image: NonEmpty
    """Image with bash, git and what the tasks need; tasks that name one of their own get that."""
    cluster: NonEmpty = "swe-rex-cluster"
    """Name of the ECS cluster; it is made if there is none."""
    start_timeout_s: PositiveFloat = 600.0
    """A sandbox that is not up by then counts as lost."""
    lifetime_s: PositiveFloat = 7200.0
    """A task ends after this long, whatever becomes of the worker; it must outlast limits.wall_s."""
    cpus: Literal[1, 2, 4, 8, 16] = 1
    """Processors of one task (vCPU)."""
    memory_mib: Annotated[PositiveInt, Field(ge=2048)] = 2048
    """Memory of one task, in MiB; Fargate offers 2 to 8 GiB for each processor, in whole GiB."""
    disk_gib: Annotated[PositiveInt, Field(ge=21, le=200)] = 21
    """Ephemeral storage of one task, in GiB."""
    allow_weaker: Flag = False
    """Whether to run although SWE-ReX gives these tasks a public address and a way to the internet."""


class DaytonaSandbox(StartedSandbox):
    """Sandboxes of daytona.io."""

    type: Literal["daytona"]
    image: NonEmpty
    """Image with bash, git, swe-rex and what the tasks need; tasks that name one of their own get that."""
    api_key_env: NonEmpty = "DAYTONA_API_KEY"
    """Environment variable that holds the key."""
    target: NonEmpty | None = None
    """Region; null: the organisation's own."""
    start_timeout_s: PositiveFloat = 600.0
    """A sandbox that is not up by then counts as lost (the first start of an image makes Daytona's snapshot of it)."""
    lifetime_s: PositiveFloat = 7200.0
    """Daytona destroys a sandbox after this long, whatever becomes of the worker; it must outlast limits.wall_s."""
    cpus: PositiveInt = 1
    """Processors of one sandbox."""
    memory_gib: PositiveInt = 1
    """Memory of one sandbox, in GiB."""
    disk_gib: PositiveInt = 4
    """Disk of one sandbox, in GiB."""
    network: Flag = False
    """Whether a sandbox reaches the internet."""


class KubernetesSandbox(StartedSandbox):
    """A pod for each sandbox (docs/security.md)."""

    type: Literal["kubernetes"]
    image: NonEmpty
    """Image with bash, git and what the tasks need; tasks that name one of their own get that."""
    server_image: NonEmpty | None = None
    """Image of SWE-ReX's server and its Python (infra/docker/Dockerfile.server), which each pod gets a copy of; null:
    images have `swerex-remote` themselves, or a Python and a way to PyPI."""
    namespace: NonEmpty = "default"
    """Where the pods are made."""
    context: NonEmpty | None = None
    """Context of the kubeconfig ($KUBECONFIG, else ~/.kube/config); null: its current one, or without such a file the
    service account of the pod that the worker runs in."""
    reach: Literal["pod", "api"] = "pod"
    """How the worker talks to a pod: by its address, or through the API server where the pods' network is not the
    worker's own."""
    start_timeout_s: PositiveFloat = 600.0
    """A pod that is not up by then is deleted and counts as lost (the first start on a node pulls the image)."""
    lifetime_s: PositiveFloat = 7200.0
    """Kubernetes ends a pod after this long, whatever becomes of the worker; it must outlast limits.wall_s."""
    cpus: PositiveFloat = 1.0
    """Processors of one pod, asked for and at most."""
    memory_mib: PositiveInt = 1024
    """Memory of one pod, asked for and at most, in MiB."""
    disk_mib: PositiveInt = 8192
    """Ephemeral storage of one pod, asked for and at most, in MiB."""
    runtime_class: NonEmpty | None = None
    """RuntimeClass of the pods, e.g. gvisor or kata, whose kernel is not the node's."""
    pull_secret: NonEmpty | None = None
    """Secret of the namespace for a private registry."""
    node_selector: dict[str, str] = {}
    """Labels of the nodes that pods may run on."""
    labels: dict[str, str] = {}
    """More labels of the pods, beside those that say which run, task and worker a pod belongs to."""
    allow_weaker: Flag = False
    """Whether to run where no NetworkPolicy of the namespace keeps the pods from the network."""


class RemoteSandbox(Section):
    """Running SWE-ReX servers; each sandbox takes one of them and gives it back."""

    type: Literal["remote"]
    hosts: Annotated[tuple[str, ...], Field(min_length=1)]
    """Addresses as http://host:port."""
    token_env: NonEmpty = "SWEREX_AUTH_TOKEN"
    """Environment variable that holds the servers' token."""
    start_timeout_s: PositiveFloat = 60.0
    """How long to wait for a free server."""


ServiceSandbox = DockerSandbox | ModalSandbox | FargateSandbox | DaytonaSandbox | KubernetesSandbox
"""Sandboxes that are started for a task, of an image."""
SandboxConfig = Annotated[JailSandbox | ServiceSandbox | RemoteSandbox, Field(discriminator="type")]


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


class LimitsConfig(Section):
    """Budgets of one trajectory (M1.3). Turns, tokens and command time are the policy's; the wall clock masks."""

    max_turns: PositiveInt = 8
    """Commands, submit included."""
    max_turn_tokens: PositiveInt = 160
    """Generated tokens in one turn."""
    max_total_tokens: PositiveInt = 1024
    """Prompt, generated and observation tokens together; must fit the engine's max_model_len."""
    command_timeout_s: PositiveFloat = 10.0
    """One command; a command that runs longer is killed and the model is told."""
    command_budget_s: PositiveFloat = 60.0
    """All commands of the trajectory together; beyond it the trajectory ends with status time_limit."""
    wall_s: PositiveFloat = 300.0
    """Backstop on the wall clock; reaching it masks the trajectory (infra_wall)."""
    observation_chars: PositiveInt = 1600
    """Output of one command shown to the model; the middle is cut, head and tail stay."""


class SamplingConfig(Section):
    """Sampling of the policy. Top-p and top-k stay off in training, so the recorded probability is the policy's."""

    temperature: PositiveFloat = 1.0
    """The recorded probabilities are those after temperature."""


class EngineConfig(Section):
    """One pool of vLLM engines."""

    model: ModelFolder
    """HF checkpoint folder (relative paths: against the folder of the configuration file)."""
    replicas: PositiveInt = 1
    """Engines in the pool."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and activations in the engine."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the engines run."""
    max_model_len: PositiveInt = 1024
    """Context of one sequence, in tokens."""
    max_num_seqs: PositiveInt = 64
    """Sequences that one engine decodes at once."""
    kv_cache_gib: PositiveFloat = 0.5
    """CPU: size of the KV cache in GiB. CUDA: ignored in favour of gpu_memory_utilization, and refused if set."""
    gpu_memory_utilization: Annotated[Float, Field(gt=0.0, lt=1.0)] | None = None
    """CUDA only."""
    tensor_parallel_size: PositiveInt = 1
    """CUDA: GPUs of one engine."""
    threads: PositiveInt = 1
    """CPU: OpenMP threads of one engine."""
    enforce_eager: Flag = True
    """false lets vLLM compile and capture graphs: a slower start, faster decoding."""
    weight_transfer: Literal["ray_object", "nccl"] = "ray_object"
    """How new weights reach the engines: through Ray's object store, or NCCL on CUDA."""
    resources: Resources = Resources()


class BuiltinHarness(Section):
    """Our own agent loop: one context, one command a message."""

    type: Literal["builtin"] = "builtin"


class MiniSweAgentHarness(Section):
    """mini-swe-agent as it is published, on the workers; its commands run in the sandbox. See docs/harnesses.md."""

    type: Literal["mini_swe_agent"]
    config_file: InputFolder | None = None
    """Its own configuration, with sections agent, model and environment; null: the one that the package ships."""
    tool_calls: Flag = False
    """true: commands come as calls of a tool (the chat template must render tools); false: in a fenced block."""


class CommandHarness(Section):
    """A program of yours, inside the sandbox (of type jail), with the gateway as its only network."""

    type: Literal["command"]
    command: Text
    """Shell command that works on $GAGAR_TASK in the workspace; it finds the policy by OPENAI_* and ANTHROPIC_*."""
    paths: tuple[InputFolder, ...] = ()
    """Folders of the workers' hosts that sandboxes see too, read-only, at the same place: the program and its parts."""


HarnessConfig = Annotated[BuiltinHarness | MiniSweAgentHarness | CommandHarness, Field(discriminator="type")]


class RolloutConfig(Section):
    """The rollout pool: workers that run agent loops over sandboxes and engines."""

    workers: PositiveInt = 1
    """Worker processes."""
    slots_per_worker: PositiveInt = 16
    """Trajectories that one worker runs at once."""
    harness: HarnessConfig = BuiltinHarness()
    """What drives the policy through tasks with a sandbox; single answers need none."""
    action_format: Literal["plain", "fenced"] = "plain"
    """builtin: plain: the whole message is one bash command; fenced: the command is in one ```bash block."""
    system_prompt: Text | None = None
    """builtin: text of a system message before each task; null: none."""
    limits: LimitsConfig = LimitsConfig()
    sampling: SamplingConfig = SamplingConfig()
    sandbox: SandboxConfig = JailSandbox()
    infra_retries: NonNegativeInt = 2
    """How often one trajectory lost to infrastructure is sampled again before it is masked."""
    resources: Resources = Resources()


class VllmGraderBackend(Section):
    """Grades come from an engine pool of our own, with its own checkpoint."""

    type: Literal["vllm"]
    engine: EngineConfig


class TokenPrices(Section):
    """What an endpoint charges, for the cost metrics."""

    prompt_usd_per_mtok: NonNegativeFloat = 0.0
    """US dollars for a million prompt tokens."""
    completion_usd_per_mtok: NonNegativeFloat = 0.0
    """US dollars for a million generated tokens."""


class EndpointGraderBackend(Section):
    """Grades come from an OpenAI-compatible endpoint."""

    type: Literal["endpoint"]
    base_url: NonEmpty
    """Address up to /v1."""
    model: NonEmpty
    """Name of the model at the endpoint."""
    api_key_env: NonEmpty = "OPENAI_API_KEY"
    """Environment variable that holds the key; the key itself never enters a configuration."""
    max_retries: NonNegativeInt = 4
    """Retries of 429 and 5xx answers and of connection errors, with exponential backoff and jitter."""
    max_concurrency: PositiveInt = 8
    """Requests at once to the endpoint, shared evenly by the grader workers."""
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the endpoint is asked for JSON; the verdict is validated in any case."""
    tool_calling: Flag = True
    """Whether the model calls tools natively; false: it writes its calls as a JSON object."""
    request_timeout_s: PositiveFloat = 600.0
    """One request."""
    prices: TokenPrices = TokenPrices()


class GraderBudget(Section):
    """Budgets of one group; at the end of any of them the grader must answer with what it has."""

    turns: PositiveInt = 24
    """Answers of the model, the verdict included."""
    tokens: PositiveInt = 100_000
    """Length of the conversation, in tokens: what was asked, shown and written."""
    seconds: PositiveFloat | None = None
    """Wall clock; null: three quarters of timeout_s. What is left until timeout_s is for the answer."""


class GraderChecks(Section):
    """Commands that the grader runs against a candidate's tree, in a sandbox of the group's own."""

    enabled: Flag = True
    """Whether the grader may run commands."""
    limit: PositiveInt = 8
    """Commands of one group."""
    timeout_s: PositiveFloat = 30.0
    """One command."""


class CanaryConfig(Section):
    """Stored groups with known labels, graded among the others and never trained on."""

    share: Annotated[Float, Field(ge=0.0, le=0.5)] = 0.0
    """Share of the gradings that are canaries; 0 turns them off."""
    path: InputFolder | None = None
    """Folder of stored groups with labels (relative: against the folder of the configuration); null: groups of the
    built-in held-out minirepo tasks."""
    window: PositiveInt = 50
    """Canaries over which the agreement is averaged."""
    alarm_below: Probability = 0.6
    """An alarm is raised while the tier agreement over a full window is below this."""


class GraderAlarms(Section):
    """When the grader's own figures raise an alarm, over the last `window` graded groups."""

    window: PositiveInt = 50
    """Graded groups."""
    fallback_above: Probability = 0.5
    """Share of them that fell back."""


class GraderConfig(Section):
    """The grader pool."""

    backend: Annotated[VllmGraderBackend | EndpointGraderBackend, Field(discriminator="type")]
    mode: Literal["agent", "single"] = "agent"
    """agent: the model works with tools over a workspace of the group; single: one prompt with the task and the
    patches, no tools."""
    scope: Literal["group", "candidate"] = "group"
    """group: all candidates are seen together; candidate: each passing one is graded alone, and the rubric ranks."""
    style: Literal["compact", "full"] = "compact"
    """compact: the terse texts the shipped grader checkpoint was trained on (default of the vllm backend);
    full: explains the rubric and shows whole patches, for real language models (default of the endpoint backend)."""
    repair_rounds: Annotated[Int, Field(ge=0, le=1)] = 1
    """How often a model whose verdict is invalid is told why and asked again; the round counts against timeout_s."""
    reference_patch: Flag = False
    """Whether the grader may read the task's reference patch; it explains the task and is no criterion (M2.3)."""
    second_pass: Flag = False
    """Whether a hack counts only if a second, independent grading of the group confirms it (M1.5)."""
    budget: GraderBudget = GraderBudget()
    checks: GraderChecks = GraderChecks()
    sandbox: SandboxConfig | None = None
    """Where checks run; null: as rollout.sandbox."""
    tool_output_chars: PositiveInt = 4000
    """Output of one tool shown to the model; the middle is cut, head and tail stay."""
    workers: PositiveInt = 1
    """Grader actors."""
    groups_per_worker: PositiveInt = 4
    """Groups that one grader works on at once."""
    timeout_s: PositiveFloat = 120.0
    """One group; beyond it the group falls back to outcome advantages (M1.10)."""
    endpoint_wait_s: NonNegativeFloat = 600.0
    """Backend endpoint: how long groups wait for an endpoint that cannot be reached, or refuses the key, before they
    fall back (M1.10); below scheduler.abort_after_s."""
    max_tokens: PositiveInt = 400
    """Tokens of one answer."""
    temperature: NonNegativeFloat = 0.0
    """Sampling of answers; 0 is greedy."""
    prompt_chars: PositiveInt = 6000
    """Budget of the group's material in the first message; statement, patches and logs are cut evenly to fit."""
    canaries: CanaryConfig = CanaryConfig()
    alarms: GraderAlarms = GraderAlarms()
    resources: Resources = Resources()

    @model_validator(mode="before")
    @classmethod
    def _style_of_backend(cls, data: Any) -> Any:
        """An endpoint serves a real language model: it gets the full prompt unless the configuration says otherwise."""
        if not isinstance(data, dict) or data.get("style") is not None:
            return data
        backend = data.get("backend")
        kind = backend.get("type") if isinstance(backend, dict) else getattr(backend, "type", None)
        return {**data, "style": "full"} if kind == "endpoint" else data


class OptimizerConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 1e-4
    """Learning rate after warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Maximal global gradient norm."""
    warmup_steps: NonNegativeInt = 0
    """Optimiser steps over which the learning rate rises linearly from 0."""


class LoraConfig(Section):
    """Low-rank adapters: the model stays as it is, and the small matrices A and B beside some of its layers train.
    Engines and checkpoints' `policy` folders get whole weights, W + alpha / rank B A."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The adapters' part is scaled by alpha / rank."""
    target_modules: Annotated[tuple[NonEmpty, ...], Field(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that get adapters, in every block; not the output layer or the embeddings."""


class LearnerConfig(Section):
    """The DeepSpeed actor group."""

    model: ModelFolder
    """HF checkpoint folder the policy starts from."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the ranks run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in the learner; optimiser state is fp32."""
    world_size: PositiveInt = 1
    """Data-parallel ranks."""
    zero_stage: Annotated[Int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO: 1 shards optimiser state, 2 gradients too, 3 weights too."""
    offload_optimizer: Flag = False
    """ZeRO >= 1 on CUDA: optimiser state in host memory."""
    gradient_checkpointing: Flag = False
    """Recomputes activations in the backward pass to save memory."""
    max_tokens_per_microbatch: PositiveInt = 4096
    """Sequence packing: tokens in one packed row."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once, twice in fp32: 1024 of a vocabulary of 150,000 take 1.2 GB. The loss does not
    depend on it."""
    threads: PositiveInt = 2
    """CPU: torch threads of one rank."""
    lora: LoraConfig | None = None
    """null: all weights train."""
    optimizer: OptimizerConfig = OptimizerConfig()
    placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """How several ranks share nodes: PACK on as few as possible, STRICT_PACK on one, SPREAD on many, STRICT_SPREAD on
    one each."""
    resources: Resources = Resources()


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
    object_store_mib: Annotated[Int, Field(ge=75), _at_most(10**12)] | None = 512
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
