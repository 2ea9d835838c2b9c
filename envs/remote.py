"""Running SWE-ReX servers that sandboxes take turns on."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time

from configs.schema import RemoteSandbox
from envs.deployment import GuardedSandbox
from envs.rex import FILE_TIMEOUT_S, HttpRuntime
from envs.sandbox import WORKSPACE
from envs.task import Task
from infra.errors import SandboxError

LEASE = "/tmp/.gagar-lease"
LEASE_STALE_MIN = 60
"""A remote server that ran no command for this long, but was never given back, may be taken again."""
RETRY_S = 0.5
_BEAT = f"touch -c {LEASE}"


class RemoteProvider:
    """Running SWE-ReX servers; a lease on the server itself keeps other workers off it."""

    def __init__(self, config: RemoteSandbox) -> None:
        token = os.environ.get(config.token_env, "")
        if not token:
            raise SandboxError(f"environment variable {config.token_env} is empty; set it to the token of the servers")
        self._config = config
        self._token = token

    async def start(self, task: Task | None = None) -> GuardedSandbox:
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
        runtime = HttpRuntime(host, self._token)
        return GuardedSandbox(runtime, name=f"remote {host}", release=_give_back, before=_BEAT)

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
