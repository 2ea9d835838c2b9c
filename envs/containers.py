"""A container of docker or podman on this host for each sandbox, through the program's own command line."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Mapping

from configs.schema import DockerSandbox
from envs.deployment import (
    PORT,
    SERVER,
    GuardedSandbox,
    Order,
    ServiceProvider,
    is_leftover,
    new_token,
    refused,
    server_command,
    worker_name,
)
from envs.rex import HttpRuntime, answering
from infra.errors import BusyError, SandboxError

WORKER = "dev.gagar.worker"
"""Label of a container: who started it."""
CALL_S = 60.0
"""What a call of the program may take that neither pulls nor starts anything."""


class DockerProvider(ServiceProvider):
    """Implements `SandboxProvider`; belongs to one event loop."""

    def __init__(self, config: DockerSandbox) -> None:
        super().__init__(config)
        self._config = config
        self._pulling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._pulled: set[str] = set()
        self._server: str | None = None
        self._swept = False

    async def launch(self, order: Order) -> GuardedSandbox:
        """See `ServiceProvider.launch`."""
        name, token = f"gagar-{secrets.token_hex(8)}", new_token()
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._sweep()
                await self.fetch(order.image)
                try:
                    await self._run(name, order, token)
                    return await self._reach(name, order, token)
                except BaseException:
                    await asyncio.shield(self._remove(name))
                    raise
        except TimeoutError:
            raise BusyError(f"no container of {order.image} was up within start_timeout_s = {limit_s:g} s") from None

    async def fetch(self, image: str) -> None:
        """See `ServiceProvider.fetch`: on this host."""
        async with self._pulling[image]:  # one pull for all that wait for it
            if image in self._pulled:
                return
            code, _ = await self._call("image", "inspect", image)
            if code != 0:
                code, output = await self._call("pull", "--quiet", image, timeout_s=None)
                if code != 0:
                    raise refused(self._config.runtime, image, output, pulling=True)
            self._pulled.add(image)

    async def _run(self, name: str, order: Order, token: str) -> None:
        config = self._config
        words = ["run", "--detach", "--name", name, "--label", f"{WORKER}={worker_name()}"]
        # Loopback only, and a port that nobody else can have taken meanwhile.
        words += ["--publish", f"127.0.0.1::{PORT}", "--env", "GAGAR_TOKEN"]
        if config.server_image is not None:
            words += ["--volume", f"{await self._server_volume(config.server_image)}:{SERVER}:ro"]
        # What a task asks for stands behind the run's own arguments, and wins.
        words += config.docker_args
        words += [] if order.memory_mib is None else [f"--memory={order.memory_mib}m"]
        words += [] if order.cpus is None else [f"--cpus={order.cpus:g}"]
        words += ["--entrypoint", "timeout", order.image, "--signal=KILL", f"{config.lifetime_s:g}"]
        words += ["/bin/sh", "-c", server_command(config.server_image)]
        # In the program's environment, not its arguments, which every user of the host can read.
        code, output = await self._call(*words, environment={"GAGAR_TOKEN": token}, timeout_s=None)
        if code != 0:
            raise refused(config.runtime, order.image, output)

    async def _reach(self, name: str, order: Order, token: str) -> GuardedSandbox:
        code, output = await self._call("port", name, f"{PORT}/tcp")
        if code != 0:
            raise refused(self._config.runtime, order.image, await self._last_words(name) or output)
        runtime = HttpRuntime(f"http://{output.split()[0]}", token)

        async def alive() -> None:
            _, state = await self._call("inspect", "--format", "{{.State.Running}}", name)
            if state.strip() != "true":
                raise refused(self._config.runtime, order.image, await self._last_words(name) or "it ended at once")

        await answering(runtime, self._config.start_timeout_s, alive)

        async def release(sandbox: GuardedSandbox) -> None:
            await self._remove(name)

        return GuardedSandbox(runtime, name=f"container {name}", release=release)

    async def _server_volume(self, image: str) -> str:
        """The volume with the server's files: an empty one takes over what the image has at its place."""
        async with self._pulling[SERVER]:
            if self._server is None:
                name = f"gagar-server-{hashlib.sha256(image.encode()).hexdigest()[:12]}"
                copy = ("run", "--rm", "--volume", f"{name}:{SERVER}", "--entrypoint", "/bin/true", image)
                code, output = await self._call(*copy, timeout_s=None)
                if code != 0:
                    raise SandboxError(f"server_image {image} cannot be used ({self._config.runtime}): {output[-500:]}")
                self._server = name
            return self._server

    async def _last_words(self, name: str) -> str:
        _, output = await self._call("logs", "--tail", "20", name)
        return output.strip()

    async def _remove(self, name: str) -> None:
        try:
            code, output = await self._call("rm", "--force", "--volumes", name)
            if code != 0 and "no such container" not in output.lower():
                logging.getLogger(__name__).warning("container %s may be left behind: %s", name, output[-500:])
        except (SandboxError, TimeoutError) as error:
            logging.getLogger(__name__).warning("container %s may be left behind: %s", name, error)

    async def _sweep(self) -> None:
        """Remove what workers of this host that were killed have left."""
        if self._swept:
            return
        self._swept = True
        form = f'{{{{.Names}}}} {{{{.Label "{WORKER}"}}}}'
        code, output = await self._call("ps", "--all", "--filter", f"label={WORKER}", "--format", form)
        for line in output.splitlines() if code == 0 else ():
            name, _, worker = line.partition(" ")
            if is_leftover(worker.strip()):
                await self._remove(name)

    async def _call(
        self, *words: str, environment: Mapping[str, str] | None = None, timeout_s: float | None = CALL_S
    ) -> tuple[int, str]:
        """Exit code and output of the program. Raises SandboxError where it is not installed, TimeoutError."""
        program = self._config.runtime
        try:
            process = await asyncio.create_subprocess_exec(
                program, *words, env={**os.environ, **(environment or {})},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            raise SandboxError(
                f"{program} cannot be started ({error.strerror}); install {program} on the workers' hosts, or choose "
                "another rollout.sandbox.type"
            ) from None
        try:
            async with asyncio.timeout(timeout_s):
                output, _ = await process.communicate()
        except BaseException:
            if process.returncode is None:
                process.kill()
            raise
        return process.returncode or 0, output.decode(errors="backslashreplace")
