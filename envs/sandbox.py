"""What a sandbox is to everybody else: a workspace in which shell commands run, and nothing else.

Which kind of sandbox stands behind it is configuration alone (`make_provider`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

from configs.schema import (
    DaytonaSandbox,
    DockerSandbox,
    FargateSandbox,
    JailSandbox,
    KubernetesSandbox,
    ModalSandbox,
    RemoteSandbox,
    RunConfig,
    SandboxConfig,
    ServiceSandbox,
)
from envs.task import Task
from infra.errors import SandboxError

WORKSPACE = "/workspace"
"""Where commands run: the task's files, and the root of its repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What one command did."""

    output: str
    """stdout and stderr as they came, together; very long output has lost its middle."""
    exit_code: int | None
    """None if the command was killed for time."""
    timed_out: bool
    duration_s: float


class Sandbox(Protocol):
    """One isolated workspace. Commands run one at a time; each ends with everything it started."""

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """Run `bash -c command` in the workspace; after `timeout_s` it is killed with all its descendants.

        Raises SandboxError when the sandbox is lost, never for what the command did.
        """
        ...

    async def write_files(self, files: Mapping[str, str]) -> None:
        """Write files (path relative to the workspace -> content), replacing whatever stands in their way.

        Raises SandboxError when the sandbox is lost or cannot hold them.
        """
        ...

    async def read_file(self, path: str) -> str | None:
        """Content of a file of the workspace, None if there is no such regular file. Raises SandboxError when lost."""
        ...

    async def close(self) -> None:
        """Give the sandbox up: its processes and workspace are gone afterwards. Never raises; may be called twice."""
        ...


class SandboxProvider(Protocol):
    """Starts sandboxes. The caller bounds how many there are at once."""

    async def start(self, task: Task | None = None) -> Sandbox:
        """A sandbox with no history, and an empty workspace unless the task's image has files there.

        Made of the task's image where it has one and the provider has images, with what the task needs of memory,
        processors and disk. Nothing of the task is in it yet (`envs.workspace.prepare`).

        Raises SandboxError; ImageError for an image that cannot be had.
        """
        ...

    async def close(self) -> None:
        """Give up what the provider keeps between sandboxes."""
        ...


def make_provider(config: SandboxConfig, shown: Sequence[str] = ()) -> SandboxProvider:
    """The provider that a configuration names. `shown`: folders of this host that jails see too, read-only.

    Raises SandboxError where this host lacks what it needs, or cannot enforce a limit and `allow_weaker` is not set.
    """
    from envs.limits import refuse_weaker

    refuse_weaker(config)
    if isinstance(config, JailSandbox):
        from envs.jail import JailProvider

        return JailProvider(config, shown)
    if isinstance(config, RemoteSandbox):
        from envs.remote import RemoteProvider

        return RemoteProvider(config)
    provider = _service(config)
    if not config.warm:
        return provider
    from envs.warm import WarmProvider

    return WarmProvider(provider, config.warm)


def in_session(config: RunConfig) -> RunConfig:
    """The same run with sandboxes that show which start of the driver they belong to, where the service can tell."""
    sandboxes = (config.rollout.sandbox, config.grader.sandbox if config.grader is not None else None)
    if not any(isinstance(sandbox, KubernetesSandbox) for sandbox in sandboxes):
        return config
    from envs.pods import session_labels

    labels = session_labels(config.name)

    def labelled(sandbox: SandboxConfig) -> SandboxConfig:
        if not isinstance(sandbox, KubernetesSandbox):
            return sandbox
        return sandbox.model_copy(update={"labels": {**sandbox.labels, **labels}})

    rollout = config.rollout.model_copy(update={"sandbox": labelled(config.rollout.sandbox)})
    grader = config.grader
    if grader is not None and grader.sandbox is not None:
        grader = grader.model_copy(update={"sandbox": labelled(grader.sandbox)})
    return config.model_copy(update={"rollout": rollout, "grader": grader})


def _service(config: ServiceSandbox) -> SandboxProvider:
    from envs import containers, hosted, pods

    match config:
        case DockerSandbox():
            return containers.DockerProvider(config)
        case ModalSandbox():
            return hosted.ModalProvider(config)
        case FargateSandbox():
            return hosted.FargateProvider(config)
        case DaytonaSandbox():
            return hosted.DaytonaProvider(config)
        case KubernetesSandbox():
            return pods.KubernetesProvider(config)
        case _:
            assert_never(config)


class ScriptedSandbox:
    """A sandbox for tests: files in a dictionary, commands answered by a function that may raise SandboxError."""

    def __init__(self, respond: Callable[[str], CommandResult]) -> None:
        self.respond = respond
        self.files: dict[str, str] = {}
        self.commands: list[str] = []
        self.closed = False

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """See `Sandbox.run`."""
        self.commands.append(command)
        await asyncio.sleep(0)
        return self.respond(command)

    async def write_files(self, files: Mapping[str, str]) -> None:
        """See `Sandbox.write_files`."""
        self.files.update(files)

    async def read_file(self, path: str) -> str | None:
        """See `Sandbox.read_file`."""
        return self.files.get(path)

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self.closed = True


class ScriptedProvider:
    """A provider for tests: hands out what `make` returns, which may raise SandboxError."""

    def __init__(self, make: Callable[[], ScriptedSandbox]) -> None:
        self.make = make
        self.started: list[ScriptedSandbox] = []

    async def start(self, task: Task | None = None) -> ScriptedSandbox:
        """See `SandboxProvider.start`."""
        await asyncio.sleep(0)
        sandbox = self.make()
        self.started.append(sandbox)
        return sandbox

    async def close(self) -> None:
        """See `SandboxProvider.close`."""


def lost(what: str, error: BaseException) -> SandboxError:
    """A SandboxError that says what was being done and what came instead."""
    return SandboxError(f"sandbox lost while {what}: {type(error).__name__}: {error}")
