"""A sandbox over any SWE-ReX runtime: everything is done by `execute`, so each call leaves no session behind."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
from pydantic import BaseModel
from swerex.exceptions import SwerexException
from swerex.runtime.abstract import AbstractRuntime, Command
from swerex.runtime.remote import RemoteRuntime

from envs.sandbox import CommandResult, lost
from envs.shell import parse_read, read_command, unpack_commands
from infra.errors import BusyError, SandboxError

REPLY_MARGIN_S = 30.0
"""How much longer than the command itself an answer may take before the sandbox counts as lost."""
FILE_TIMEOUT_S = 60.0
MAX_READ_BYTES = 4 * 2**20
_UNLIMITED = aiohttp.ClientTimeout(total=None, sock_connect=30)
RUNTIME_FAULTS = (aiohttp.ClientError, SwerexException, OSError, TimeoutError, RuntimeError, ValueError)
"""What SWE-ReX's clients raise when a server is gone, answers with an error, or answers nonsense."""


def quiet_logger() -> logging.Logger:
    """A logger that says nothing: SWE-ReX logs every failure that it also raises, and we record those."""
    logger = logging.getLogger("gagar.swerex")
    logger.setLevel(logging.CRITICAL + 1)
    return logger


class HttpRuntime(RemoteRuntime):
    """SWE-ReX's client without its retries, its logging and its limit: that one gives up on any command after 300 s."""

    def __init__(self, address: str, token: str, headers: Mapping[str, str] | None = None) -> None:
        """`headers`: what the way to the server asks for beside the server's own token."""
        super().__init__(logger=quiet_logger(), host=address, auth_token=token)
        self._more = dict(headers or {})

    @property
    def _headers(self) -> dict[str, str]:
        return {"X-API-Key": self._config.auth_token, **self._more}

    async def _request(self, endpoint: str, payload: BaseModel | None, output_class: Any, num_retries: int = 0) -> Any:
        body = payload.model_dump() if payload is not None else None
        # A connection for each call: a kept one may be closed by the other side just when the next command is sent.
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True), timeout=_UNLIMITED) as session,
            session.post(f"{self._api_url}/{endpoint}", json=body, headers=self._headers) as response,
        ):
            if response.status != 200:
                raise ConnectionError(f"{endpoint} answered {response.status}: {(await response.text())[:500]}")
            return output_class(**await response.json())


async def answering(runtime: AbstractRuntime, timeout_s: float, alive: Callable[[], Awaitable[None]]) -> None:
    """Returns when the server answers. `alive` is awaited between tries, and raises when it never will.

    Raises BusyError when it does not answer in time.
    """
    deadline, wait_s = time.monotonic() + timeout_s, 0.1
    while True:
        answer = await runtime.is_alive(timeout=5.0)
        if answer.is_alive:
            return
        await alive()
        if time.monotonic() > deadline:
            raise BusyError(f"the sandbox's server did not answer within {timeout_s:g} s")
        await asyncio.sleep(wait_s)
        wait_s = min(1.5 * wait_s, 2.0)


class RexSandbox:
    """Implements `envs.sandbox.Sandbox` on a runtime whose commands end with everything they started."""

    def __init__(self, runtime: AbstractRuntime, *, name: str, reply_margin_s: float = REPLY_MARGIN_S) -> None:
        self.runtime = runtime
        self.name = name
        self._reply_margin_s = reply_margin_s
        self._lost: str | None = None
        self._running = False

    @property
    def clean(self) -> bool:
        """Whether the sandbox is alive and idle."""
        return self._lost is None and not self._running

    async def run(self, command: str, *, timeout_s: float) -> CommandResult:
        """See `Sandbox.run`."""
        if self._lost is not None:
            raise SandboxError(self._lost)
        started = time.monotonic()
        self._running = True
        try:
            async with asyncio.timeout(timeout_s + self._reply_margin_s):
                response = await self.runtime.execute(self._command(command, timeout_s))
        except RUNTIME_FAULTS as error:
            fault = lost(f"running a command in {self.name}", error)
            self._lost = fault.message
            raise fault from error
        # Not in a finally: after a cancellation the command is still running, and the sandbox is not clean.
        self._running = False
        duration_s = time.monotonic() - started
        exit_code, timed_out = self._outcome(response.exit_code, duration_s, timeout_s)
        return CommandResult(output=response.stdout, exit_code=exit_code, timed_out=timed_out, duration_s=duration_s)

    async def write_files(self, files: Mapping[str, str]) -> None:
        """See `Sandbox.write_files`."""
        for command in unpack_commands(files):
            result = await self.run(command, timeout_s=FILE_TIMEOUT_S)
            if result.exit_code != 0:
                raise SandboxError(f"{self.name} did not take {len(files)} files: {result.output[-500:]}")

    async def read_file(self, path: str) -> str | None:
        """See `Sandbox.read_file`. Bytes that are no UTF-8 come as surrogate escapes; at most MAX_READ_BYTES bytes."""
        result = await self.run(read_command([path], max_bytes=MAX_READ_BYTES), timeout_s=FILE_TIMEOUT_S)
        entries = parse_read(result.output)
        if len(entries) != 1:
            raise SandboxError(f"{self.name} did not read {path}: {result.output[-500:]}")
        content = entries[0]
        return content.decode("utf-8", errors="surrogateescape") if isinstance(content, bytes) else None

    async def close(self) -> None:
        """See `Sandbox.close`."""
        raise NotImplementedError

    def _command(self, command: str, timeout_s: float) -> Command:
        return Command(command=["bash", "-c", command], timeout=timeout_s, merge_output_streams=True)

    def _outcome(self, exit_code: int | None, duration_s: float, timeout_s: float) -> tuple[int | None, bool]:
        return exit_code, exit_code is None
