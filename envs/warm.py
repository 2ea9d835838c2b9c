"""Sandboxes that are started before anybody asks for them."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from envs.sandbox import Sandbox, SandboxProvider
from envs.task import Image, Needs, Task
from infra.errors import ImageError, SandboxError

SPARE_AGE_S = 900.0
"""A spare that is older is not given out: services end sandboxes by their age."""
PROBE_S = 20.0

Kind = tuple[Image | None, Needs]


@dataclass(slots=True, kw_only=True)
class Spare:
    """One sandbox that waits, or is on its way."""

    kind: Kind
    starting: asyncio.Task[Sandbox]
    since_s: float = field(default_factory=time.monotonic)


class WarmProvider:
    """Implements `SandboxProvider`: a sandbox of the kind last asked for is ready, or starting, before the next one.

    What comes next is mostly of that kind: a task's trajectories are sampled together, and each is verified in a
    sandbox of its own. There are at most `count` spares, whose starts are tried again as any other's.
    """

    def __init__(self, provider: SandboxProvider, count: int) -> None:
        self._provider = provider
        self._count = count
        self._spares: list[Spare] = []
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self, task: Task | None = None) -> Sandbox:
        """See `SandboxProvider.start`."""
        kind: Kind = (None, Needs()) if task is None else (task.image, task.needs)
        spare = next((spare for spare in self._spares if spare.kind == kind), None)
        if spare is not None:
            self._spares.remove(spare)
        self._refill(kind, task)
        return await (self._provider.start(task) if spare is None else self._use(spare, task))

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        for spare in self._spares:
            self._end(spare)
        self._spares.clear()
        while self._closing:
            await asyncio.wait(self._closing)
        await self._provider.close()

    async def _use(self, spare: Spare, task: Task | None) -> Sandbox:
        try:
            sandbox = await spare.starting
        except ImageError:
            raise
        except SandboxError:  # of a while ago
            return await self._provider.start(task)
        except asyncio.CancelledError:
            self._end(spare)
            raise
        young = time.monotonic() - spare.since_s <= SPARE_AGE_S
        try:
            if young and (await sandbox.run("true", timeout_s=PROBE_S)).exit_code == 0:
                return sandbox
        except SandboxError as error:
            logging.getLogger(__name__).warning("a sandbox that waited was lost: %s", error)
        except BaseException:
            self._end(spare)
            raise
        self._end(spare)
        return await self._provider.start(task)

    def _refill(self, kind: Kind, task: Task | None) -> None:
        for spare in [spare for spare in self._spares if spare.kind != kind]:
            self._spares.remove(spare)
            self._end(spare)
        while len(self._spares) < self._count:
            self._spares.append(Spare(kind=kind, starting=asyncio.ensure_future(self._provider.start(task))))

    def _end(self, spare: Spare) -> None:
        closing = asyncio.ensure_future(_end(spare.starting))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _end(starting: asyncio.Task[Sandbox]) -> None:
    starting.cancel()  # of a start that is done, nothing happens
    try:
        await (await starting).close()
    except (SandboxError, asyncio.CancelledError):
        return
