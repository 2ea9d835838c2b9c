"""Where commands run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from configs.schema.fields import Flag, NonEmpty, NonNegativeInt, PositiveFloat, PositiveInt, Section


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
    """What all sandboxes have that are started for a task, of an image."""

    image: NonEmpty
    """Image with bash, git and what the tasks need; tasks that name one of their own get that."""
    start_timeout_s: PositiveFloat = 600.0
    """A sandbox that is not up by then counts as lost. The first start of an image takes longest: it is pulled, and
    Modal and Daytona make one of their own from it."""
    lifetime_s: PositiveFloat = 7200.0
    """A sandbox ends after this long, whatever becomes of the worker; it must outlast limits.wall_s."""
    start_retries: NonNegativeInt = 3
    """How often a start is tried again, after waits that grow, where the service had no room or did not answer in time.
    An image that does not exist is never asked for twice."""
    warm: NonNegativeInt = 0
    """Sandboxes that each worker starts ahead, of the image that it was last asked for: the verification of that task
    and the next of its trajectories take them. What nobody takes is ended when another image is asked for."""


class DockerSandbox(StartedSandbox):
    """Containers of docker or podman on the worker's host and a SWE-ReX server in each."""

    type: Literal["docker"]
    runtime: Literal["docker", "podman"] = "docker"
    """Container program on the worker's host."""
    server_image: NonEmpty | None = None
    """Image of SWE-ReX's server and its Python (infra/docker/Dockerfile.server), which containers see read-only; null:
    images have `swerex-remote` themselves, or a Python and a way to PyPI."""
    start_timeout_s: PositiveFloat = 300.0
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
    server_image: NonEmpty | None = None
    """Image of SWE-ReX's server and its Python (infra/docker/Dockerfile.server), which goes into Modal's images; null:
    it is installed there with apt and pipx."""
    cpus: PositiveFloat = 1.0
    """Processors of one sandbox."""
    memory_mib: PositiveInt = 1024
    """Memory of one sandbox, in MiB; more ends it."""
    network: Flag = False
    """Whether a sandbox reaches the internet."""


class FargateSandbox(StartedSandbox):
    """Tasks of AWS Fargate (SWE-ReX FargateDeployment); needs AWS credentials in the worker's environment or role."""

    type: Literal["fargate"]
    cluster: NonEmpty = "swe-rex-cluster"
    """Name of the ECS cluster; it is made if there is none."""
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
