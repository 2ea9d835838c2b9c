"""Sandboxes elsewhere, through SWE-ReX's own deployments: containers (docker, podman), Modal, and running servers.

These servers run a command as a plain child process, so a guard around each command does what the jail's server does:
it kills the whole tree on time-out and afterwards, keeps output bounded, and hides the server's environment.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import time
from typing import Protocol

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.config import DockerDeploymentConfig, ModalDeploymentConfig
from swerex.runtime.abstract import AbstractRuntime, Command
from swerex.runtime.remote import RemoteRuntime

from configs.schema import DockerSandbox, ModalSandbox, RemoteSandbox
from envs.rex import FILE_TIMEOUT_S, RUNTIME_FAULTS, RexSandbox, quiet_logger
from envs.sandbox import WORKSPACE, lost
from envs.task import Image
from infra.errors import SandboxError

LEASE = "/tmp/.gagar-lease"
LEASE_STALE_MIN = 60
"""A remote server that ran no command for this long, but was never given back, may be taken again."""
RETRY_S = 0.5
KILLED = 137
GUARD = r"""
name=$1 limit=$2 command=$3
exec 2>/dev/null
mkdir -p /workspace && cd -P /workspace || exit 125
touch -c /tmp/.gagar-lease
out=$(mktemp) || exit 125
env -i PATH="$PATH" HOME=/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 GAGAR_RUN="$name" \
    timeout --signal=KILL "$limit" bash -c "$command" > "$out" 2>&1 < /dev/null
code=$?
for file in $(grep -lsz "^GAGAR_RUN=$name\$" /proc/[0-9]*/environ); do
    pid=${file#/proc/}; kill -KILL "${pid%/environ}" 2>/dev/null
done
size=$(stat -c %s "$out")
if [ "$size" -gt 8454144 ]; then
    head -c 8388608 "$out"; printf '\n[%d bytes cut]\n' $((size - 8454144)); tail -c 65536 "$out"
else
    cat "$out"
fi
rm -f "$out"
exit $code
""".replace("/tmp/.gagar-lease", LEASE).replace("/workspace", WORKSPACE)


class Release(Protocol):
    """Gives back what stands behind a sandbox."""

    async def __call__(self, sandbox: GuardedSandbox) -> None:
        """Called once; must not raise for a lost sandbox."""
        ...


class GuardedSandbox(RexSandbox):
    """A sandbox on a server that runs commands as plain children."""

    def __init__(self, runtime: AbstractRuntime, *, name: str, release: Release) -> None:
        super().__init__(runtime, name=name)
        self._release = release
        self._closed = False

    async def close(self) -> None:
        """See `Sandbox.close`."""
        if not self._closed:
            self._closed = True
            await self._release(self)
            self._lost = f"{self.name} is closed"

    def _command(self, command: str, timeout_s: float) -> Command:
        words = ["bash", "-c", GUARD, "guard", secrets.token_hex(8), f"{timeout_s:g}", command]
        return Command(command=words, timeout=timeout_s + self._reply_margin_s / 2, merge_output_streams=True)

    def _outcome(self, exit_code: int | None, duration_s: float, timeout_s: float) -> tuple[int | None, bool]:
        timed_out = exit_code == KILLED and duration_s >= timeout_s
        return (None if timed_out else exit_code), timed_out


class DeploymentProvider:
    """Starts one SWE-ReX deployment for each sandbox and stops it when the sandbox is closed."""

    kind: str

    def deployment(self, image: Image | None = None) -> AbstractDeployment:
        """A deployment that is not started yet."""
        raise NotImplementedError

    async def start(self, image: Image | None = None) -> GuardedSandbox:
        """See `SandboxProvider.start`."""
        try:
            deployment = self.deployment(image)
            deployment.logger = quiet_logger()
            # SWE-ReX blocks its event loop while it pulls and waits, so it gets one of its own.
            await asyncio.to_thread(asyncio.run, deployment.start())
        except ImportError as error:
            raise SandboxError(f"{error}; install swe-rex[{self.kind}] for sandboxes of type {self.kind}") from error
        except RUNTIME_FAULTS as error:
            raise lost(f"starting a {self.kind} deployment", error) from error

        async def stop(sandbox: GuardedSandbox) -> None:
            try:
                await asyncio.to_thread(asyncio.run, deployment.stop())
            except RUNTIME_FAULTS as error:
                logging.getLogger(__name__).warning("%s did not stop cleanly: %s", sandbox.name, error)

        return GuardedSandbox(deployment.runtime, name=f"{self.kind} sandbox", release=stop)

    async def close(self) -> None:
        """See `SandboxProvider.close`: nothing is kept."""


class DockerProvider(DeploymentProvider):
    """Containers of the local docker or podman."""

    kind = "docker"

    def __init__(self, config: DockerSandbox) -> None:
        self.settings = DockerDeploymentConfig(
            image=config.image,
            docker_args=list(config.docker_args),
            startup_timeout=config.start_timeout_s,
            container_runtime=config.runtime,
        )

    def deployment(self, image: Image | None = None) -> AbstractDeployment:
        """See `DeploymentProvider.deployment`. What a task asks for stands behind the run's own arguments, and wins."""
        settings = self.settings.model_copy(deep=True)
        if image is not None:
            settings.image = image.name
            settings.docker_args += [] if image.memory_mib is None else [f"--memory={image.memory_mib}m"]
            settings.docker_args += [] if image.cpus is None else [f"--cpus={image.cpus:g}"]
            # Images of tasks have no server of ours, and often no Python that could run it.
            settings.python_standalone_dir = "/root"
        return settings.get_deployment()


class ModalProvider(DeploymentProvider):
    """Sandboxes of modal.com, without a network inside."""

    kind = "modal"

    def __init__(self, config: ModalSandbox) -> None:
        self.settings = ModalDeploymentConfig(image=config.image, startup_timeout=config.start_timeout_s)

    def deployment(self, image: Image | None = None) -> AbstractDeployment:
        """See `DeploymentProvider.deployment`."""
        settings = self.settings.model_copy(deep=True)
        if image is not None:
            settings.image = image.name
        return settings.get_deployment()


class RemoteProvider:
    """Running SWE-ReX servers; a lease on the server itself keeps other workers off it."""

    def __init__(self, config: RemoteSandbox) -> None:
        token = os.environ.get(config.token_env, "")
        if not token:
            raise SandboxError(f"environment variable {config.token_env} is empty; set it to the token of the servers")
        self._config = config
        self._token = token

    async def start(self, image: Image | None = None) -> GuardedSandbox:
        """See `SandboxProvider.start`: waits until one of the servers is free."""
        deadline = time.monotonic() + self._config.start_timeout_s
        last = "all are taken"
        while time.monotonic() < deadline:
            for host in random.sample(self._config.hosts, len(self._config.hosts)):
                sandbox = self._sandbox(host)
                try:
                    if await self._take(sandbox):
                        return sandbox
                except SandboxError as error:
                    last = error.message
            await asyncio.sleep(RETRY_S)
        raise SandboxError(f"no remote server became free within {self._config.start_timeout_s:g} s; last: {last}")

    async def close(self) -> None:
        """See `SandboxProvider.close`: nothing is kept."""

    def _sandbox(self, host: str) -> GuardedSandbox:
        runtime = RemoteRuntime(logger=quiet_logger(), host=host, auth_token=self._token)
        return GuardedSandbox(runtime, name=f"remote {host}", release=_give_back)

    async def _take(self, sandbox: GuardedSandbox) -> bool:
        result = await sandbox.run(
            f"find {LEASE} -maxdepth 0 -mmin +{LEASE_STALE_MIN} -exec rmdir {{}} \\; 2>/dev/null; "
            f"mkdir {LEASE} && {_EMPTY}",
            timeout_s=FILE_TIMEOUT_S,
        )
        return result.exit_code == 0


_EMPTY = f"find {WORKSPACE} -mindepth 1 -delete"


async def _give_back(sandbox: GuardedSandbox) -> None:
    try:
        await sandbox.run(f"{_EMPTY}; rmdir {LEASE}", timeout_s=FILE_TIMEOUT_S)
    except SandboxError as error:
        logging.getLogger(__name__).warning("%s", error)
