"""What a pool needs of its actors, for Ray's and for scripted ones; and the three ways in which a call is lost."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from infra.errors import Boundary, GagarError


class ActorLost(GagarError):
    """An actor died, or could not be started, while it owed the caller a result. The call may have run in part."""

    boundary = Boundary.WORKER

    def __init__(self, actor: str, method: str, detail: str = "") -> None:
        super().__init__(f"actor {actor} was lost during {method}" + (f": {detail}" if detail else ""))
        self.actor = actor
        self.method = method
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.actor, self.method, self.detail)


class ActorDrained(ActorLost):
    """An actor was taken out of its pool and handed back a call that outlasted the deadline. Nobody is at fault: the
    caller starts the work again, elsewhere, and counts no failure."""

    def __init__(self, actor: str, method: str, detail: str = "drained") -> None:
        super().__init__(actor, method, detail)


class ActorTimeout(GagarError):
    """A call did not end within its deadline; its actor was replaced."""

    boundary = Boundary.WORKER

    def __init__(self, actor: str, method: str, timeout_s: float) -> None:
        super().__init__(f"actor {actor} did not finish {method} within {timeout_s:g} s and was replaced")
        self.actor = actor
        self.method = method
        self.timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.actor, self.method, self.timeout_s)


class Actors(Protocol):
    """Speaks to actors through handles. What `call` returns can be awaited, and is hashable."""

    def lost(self) -> tuple[type[BaseException], ...]:
        """What a call raises whose actor is gone."""
        ...

    def cancelled(self) -> tuple[type[BaseException], ...]:
        """What a call raises that `cancel` ended."""
        ...

    async def ready(self, handle: Any) -> None:
        """Returns once the constructor has run, and at once after that; raises `lost`."""
        ...

    def call(
        self, handle: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], num_returns: int
    ) -> list[Any]:
        """Starts a call; returns its `num_returns` results to come."""
        ...

    def cancel(self, ref: Any) -> None:
        """Asks the actor to stop a call."""
        ...

    def kill(self, handle: Any) -> None:
        """Ends the actor at once."""
        ...

    async def leaving(self, handles: Sequence[Any]) -> list[float | None]:
        """Of each actor: seconds until its node leaves, as the cluster was told (`inf` without a deadline); None where
        it stays or nobody knows."""
        ...

    def identity(self, handle: Any) -> str:
        """The name under which its process registered for stacks (infra/stacks.py); "" where there is none."""
        ...


class RayActors:
    """Ray's."""

    def lost(self) -> tuple[type[BaseException], ...]:
        """Some of what Ray raises for an actor that is gone is no RayActorError, such as the memory monitor's kill."""
        from ray.exceptions import (
            ActorUnschedulableError,
            NodeDiedError,
            OutOfMemoryError,
            RayActorError,
            RuntimeEnvSetupError,
            WorkerCrashedError,
        )

        return (
            RayActorError,
            ActorUnschedulableError,
            NodeDiedError,
            OutOfMemoryError,
            RuntimeEnvSetupError,
            WorkerCrashedError,
        )

    def cancelled(self) -> tuple[type[BaseException], ...]:
        """See `Actors.cancelled`."""
        from ray.exceptions import TaskCancelledError

        return (TaskCancelledError,)

    async def ready(self, handle: Any) -> None:
        """See `Actors.ready`."""
        await handle.__ray_ready__.remote()

    def call(
        self, handle: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], num_returns: int
    ) -> list[Any]:
        """See `Actors.call`."""
        bound = getattr(handle, method)
        if num_returns == 1:
            return [bound.remote(*args, **kwargs)]
        return list(bound.options(num_returns=num_returns).remote(*args, **kwargs))

    def cancel(self, ref: Any) -> None:
        """See `Actors.cancel`."""
        import ray

        ray.cancel(ref)

    def kill(self, handle: Any) -> None:
        """See `Actors.kill`."""
        import ray

        ray.kill(handle)

    async def leaving(self, handles: Sequence[Any]) -> list[float | None]:
        """See `Actors.leaving`. Asks Ray's control store, in a thread."""
        return await asyncio.to_thread(_leaving, [self.identity(handle) for handle in handles])

    def identity(self, handle: Any) -> str:
        """See `Actors.identity`."""
        return str(handle._actor_id.hex())


class Killed(Exception):
    """A scripted actor is gone."""


class Stopped(Exception):
    """A scripted call was cancelled."""


class ScriptedActor:
    """Stands for an actor in tests: an object whose async methods run in this process."""

    def __init__(self, worker: Any, *, start_s: float = 0.0, broken: str = "") -> None:
        """Ready after `start_s`; `broken`: why its constructor failed."""
        self.worker = worker
        self.start_s = start_s
        self.broken = broken
        self.killed = False
        self.hangs = False
        """Does not answer `ready` any more."""
        self.leaves_s: float | None = None
        """Seconds until its node leaves."""
        self.running: set[asyncio.Future[Any]] = set()

    def kill(self) -> None:
        """Everything that runs on it is lost."""
        self.killed = True
        for future in list(self.running):
            if not future.done():
                future.set_exception(Killed("killed"))


class ScriptedActors:
    """Speaks to `ScriptedActor`s."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Future[Any], asyncio.Task[Any]] = {}

    def lost(self) -> tuple[type[BaseException], ...]:
        """See `Actors.lost`."""
        return (Killed,)

    def cancelled(self) -> tuple[type[BaseException], ...]:
        """See `Actors.cancelled`."""
        return (Stopped,)

    async def ready(self, handle: ScriptedActor) -> None:
        """See `Actors.ready`."""
        if handle.start_s:
            delay_s, handle.start_s = handle.start_s, 0.0
            await asyncio.sleep(delay_s)
        if handle.hangs:
            await asyncio.Event().wait()
        if handle.broken or handle.killed:
            raise Killed(handle.broken or "killed")

    def call(
        self, handle: ScriptedActor, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], num_returns: int
    ) -> list[Any]:
        """The first result only; the others are its position in the list."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if handle.killed:
            future.set_exception(Killed("killed"))
            return [future, *range(1, num_returns)]
        handle.running.add(future)
        task = loop.create_task(getattr(handle.worker, method)(*args, **kwargs))
        task.add_done_callback(_passes_on(future))
        self._tasks[future] = task
        future.add_done_callback(lambda _: self._tasks.pop(future).cancel())
        future.add_done_callback(handle.running.discard)
        return [future, *range(1, num_returns)]

    def cancel(self, ref: asyncio.Future[Any]) -> None:
        """See `Actors.cancel`. A call that is done by then keeps its result."""
        if ref in self._tasks:
            self._tasks[ref].cancel()

    def kill(self, handle: ScriptedActor) -> None:
        """See `Actors.kill`."""
        handle.kill()

    async def leaving(self, handles: Sequence[ScriptedActor]) -> list[float | None]:
        """See `Actors.leaving`."""
        return [handle.leaves_s for handle in handles]

    def identity(self, handle: ScriptedActor) -> str:
        """Scripted actors share this process."""
        return ""


def _passes_on(future: asyncio.Future[Any]) -> Callable[[asyncio.Task[Any]], None]:
    def done(task: asyncio.Task[Any]) -> None:
        if future.done():
            return
        error = Stopped("cancelled") if task.cancelled() else task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)

    return done


def _leaving(actor_ids: Sequence[str]) -> list[float | None]:
    """See `Actors.leaving`. Ray Train asks the same way; there is no public one."""
    from ray._private.state import state
    from ray.exceptions import RayError

    try:
        deadlines = state.get_draining_nodes()  # node -> ms, 0 where there is none
        if not deadlines:
            return [None] * len(actor_ids)
        nodes = [state.actor_table(actor_id).get("Address", {}).get("NodeID", "") for actor_id in actor_ids]
    except RayError:  # what is lost with the control store is noticed elsewhere
        return [None] * len(actor_ids)
    now_s = time.time()
    left_s = {node: ms / 1e3 - now_s if ms else math.inf for node, ms in deadlines.items()}
    return [left_s.get(node) for node in nodes]


def reason_of(error: BaseException) -> str:
    """The line of Ray's long message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
