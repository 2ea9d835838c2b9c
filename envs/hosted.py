"""Sandboxes of services: Modal, AWS Fargate, Daytona. Each needs a package that is not in the locks.

SWE-ReX's own deployments are used where they work. That of Modal reaches servers over plain HTTP and never ends a
sandbox, that of Daytona cannot start one with any current client: these two are made here, by the services' clients.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from typing import Any

from configs.schema import DaytonaSandbox, FargateSandbox, ModalSandbox
from envs.deployment import (
    PORT,
    SERVER,
    SWEREX,
    GuardedSandbox,
    Order,
    ServiceProvider,
    needs_package,
    new_token,
    refused,
    server_command,
    worker_name,
)
from envs.rex import RUNTIME_FAULTS, HttpRuntime, answering, quiet_logger
from infra.errors import BusyError, SandboxError

APP = "gagar"
"""Under which Modal shows the sandboxes."""
CALL_S = 60.0


class ModalProvider(ServiceProvider):
    """Sandboxes of modal.com, reached by encrypted tunnels."""

    def __init__(self, config: ModalSandbox) -> None:
        super().__init__(config)
        self._config = config

    async def launch(self, order: Order) -> GuardedSandbox:
        """See `ServiceProvider.launch`."""
        try:
            import modal
        except ImportError as error:
            raise needs_package("modal", error) from error
        config, token = self._config, new_token()
        memory_mib = order.memory_mib or config.memory_mib
        cpus = order.cpus or config.cpus
        deadline = time.monotonic() + config.start_timeout_s
        box: Any = None
        try:
            async with asyncio.timeout(config.start_timeout_s):
                box = await modal.Sandbox.create.aio(
                    "/bin/sh",
                    "-c",
                    server_command(config.server_image),
                    app=await modal.App.lookup.aio(APP, create_if_missing=True),
                    image=self._image(modal, order.image),
                    env={"GAGAR_TOKEN": token},
                    tags={"worker": worker_name()},
                    timeout=math.ceil(config.lifetime_s),
                    cpu=(cpus, cpus),
                    memory=(memory_mib, memory_mib),
                    # A sandbox without any network has no tunnel either.
                    outbound_cidr_allowlist=None if config.network else [],
                    encrypted_ports=[PORT],
                )
                tunnel = (await box.tunnels.aio())[PORT]
            runtime = HttpRuntime(tunnel.url, token)

            async def alive() -> None:
                if (code := await box.poll.aio()) is not None:
                    raise SandboxError(f"Modal's sandbox of {order.image} ended with {code} before its server answered")

            await answering(runtime, max(deadline - time.monotonic(), 1.0), alive)
        except BaseException as error:
            if box is not None:
                await asyncio.shield(_terminate(box))
            if isinstance(error, TimeoutError):
                raise BusyError(
                    f"no Modal sandbox of {order.image} within start_timeout_s = {config.start_timeout_s:g} s"
                ) from error
            if isinstance(error, modal.exception.Error):
                building = isinstance(error, modal.exception.RemoteError | modal.exception.NotFoundError)
                raise refused("modal", order.image, _said(error), pulling=building) from error
            raise

        async def release(sandbox: GuardedSandbox) -> None:
            await _terminate(box)

        return GuardedSandbox(runtime, name="Modal sandbox", release=release)

    def _image(self, modal: Any, name: str) -> Any:
        image = modal.Image.from_registry(name)
        if self._config.server_image is not None:
            return image.dockerfile_commands(f"COPY --from={self._config.server_image} {SERVER} {SERVER}")
        return image.apt_install("pipx").run_commands(
            f"PIPX_HOME={SERVER} PIPX_BIN_DIR=/usr/local/bin pipx install {SWEREX}"
        )


async def _terminate(box: Any) -> None:
    try:
        await asyncio.wait_for(box.terminate.aio(), CALL_S)
    except Exception as error:  # whatever the client raises: Modal ends the sandbox at the end of its lifetime
        logging.getLogger(__name__).warning("a Modal sandbox is left behind: %s", _said(error))


class FargateProvider(ServiceProvider):
    """Tasks of AWS Fargate, by SWE-ReX's deployment."""

    def __init__(self, config: FargateSandbox) -> None:
        super().__init__(config)
        self._config = config

    async def launch(self, order: Order) -> GuardedSandbox:
        """See `ServiceProvider.launch`."""
        try:
            deployment = _fargate(self._config, order)
        except ImportError as error:
            raise needs_package("fargate", error) from error
        from botocore.exceptions import BotoCoreError, ClientError

        def stop() -> None:
            try:
                deployment._runtime = None  # asking a server that is gone to close would leave the task running
                asyncio.run(deployment.stop())
            except (*RUNTIME_FAULTS, BotoCoreError, ClientError) as error:
                logging.getLogger(__name__).warning("a Fargate task is left behind: %s", _said(error))

        try:
            # It blocks its event loop while AWS works, so it gets one of its own.
            await asyncio.to_thread(asyncio.run, deployment.start())
        except (*RUNTIME_FAULTS, BotoCoreError, ClientError) as error:
            await asyncio.to_thread(stop)
            raise refused("fargate", order.image, _said(error), pulling="CannotPullContainer" in str(error)) from error
        runtime = HttpRuntime(deployment.runtime._api_url, deployment.runtime._config.auth_token)

        async def release(sandbox: GuardedSandbox) -> None:
            await asyncio.to_thread(stop)

        return GuardedSandbox(runtime, name="Fargate task", release=release)


def _fargate(config: FargateSandbox, order: Order) -> Any:
    from swerex.deployment.config import FargateDeploymentConfig
    from swerex.deployment.fargate import FargateDeployment

    class Deployment(FargateDeployment):
        def _get_command(self, *, token: str) -> list[str]:
            """SWE-ReX's own starts an installed server without the token that it asks for."""
            server = f"GAGAR_TOKEN={token}; {server_command(None)}"
            return [f"timeout {math.ceil(config.lifetime_s)}s bash -c '{server}'"]

    deployment = Deployment(
        logger=quiet_logger(),
        **FargateDeploymentConfig(
            image=order.image,
            port=PORT,
            cluster_name=config.cluster,
            container_timeout=config.lifetime_s,
            runtime_timeout=config.start_timeout_s,
        ).model_dump(),
    )
    memory_mib, disk_gib = config.memory_mib, config.disk_gib
    deployment._config.fargate_args = {  # its own type is text, which AWS refuses
        "vcpus": math.ceil(order.cpus or config.cpus),
        "memory": math.ceil((order.memory_mib or memory_mib) / 1024) * 1024,
        "ephemeral_storage": disk_gib if order.disk_mib is None else max(math.ceil(order.disk_mib / 1024), 21),
    }
    return deployment


class DaytonaProvider(ServiceProvider):
    """Sandboxes of daytona.io."""

    def __init__(self, config: DaytonaSandbox) -> None:
        """Raises SandboxError without a key."""
        super().__init__(config)
        self._config = config
        self._key = os.environ.get(config.api_key_env, "")
        if not self._key:
            raise SandboxError(f"environment variable {config.api_key_env} is empty; set it to the key of Daytona")
        self._client: Any = None

    async def launch(self, order: Order) -> GuardedSandbox:
        """See `ServiceProvider.launch`."""
        try:
            import daytona
        except ImportError as error:
            raise needs_package("daytona", error) from error
        config, token = self._config, new_token()
        if self._client is None:
            self._client = daytona.AsyncDaytona(daytona.DaytonaConfig(api_key=self._key, target=config.target))
        deadline = time.monotonic() + config.start_timeout_s
        box: Any = None
        try:
            box = await self._client.create(
                daytona.CreateSandboxFromImageParams(
                    image=order.image,
                    resources=daytona.Resources(
                        cpu=math.ceil(order.cpus or config.cpus),
                        memory=math.ceil((order.memory_mib or config.memory_gib * 1024) / 1024),
                        disk=math.ceil((order.disk_mib or config.disk_gib * 1024) / 1024),
                    ),
                    labels={"gagar.worker": worker_name()},
                    network_block_all=not config.network,
                    ephemeral=True,
                    auto_stop_interval=0,  # else it would stop while the policy thinks
                    ttl_minutes=math.ceil(config.lifetime_s / 60),
                ),
                timeout=config.start_timeout_s,
            )
            await box.process.create_session("server")
            server = f"export GAGAR_TOKEN={token}; {server_command(None)}"
            request = daytona.SessionExecuteRequest(command=server, run_async=True)
            await box.process.execute_session_command("server", request)
            link = await box.get_preview_link(PORT)
            runtime = HttpRuntime(link.url, token, {"x-daytona-preview-token": link.token})
            await answering(runtime, max(deadline - time.monotonic(), 1.0), _nothing)
        except BaseException as error:
            if box is not None:
                await asyncio.shield(self._delete(box))
            if isinstance(error, daytona.DaytonaError):
                raise refused("daytona", order.image, _said(error), pulling=box is None) from error
            raise

        async def release(sandbox: GuardedSandbox) -> None:
            await self._delete(box)

        return GuardedSandbox(runtime, name="Daytona sandbox", release=release)

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _delete(self, box: Any) -> None:
        try:
            await self._client.delete(box, timeout=CALL_S)
        except (
            Exception
        ) as error:  # whatever the client raises: Daytona destroys the sandbox at the end of its lifetime
            logging.getLogger(__name__).warning("a Daytona sandbox is left behind: %s", _said(error))


async def _nothing() -> None:
    """There is no cheap way to ask Daytona whether the server's process still lives."""


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
