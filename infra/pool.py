"""An elastic pool of Ray actors, driven from one asyncio loop.

Knows nothing of what its actors do. Every actor has a number of slots; a call waits for a free slot on the live actor
that has the fewest calls. An actor that dies, or does not answer in time, loses the calls it was running and is
replaced. All methods belong to one event loop; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from infra.errors import GagarError

_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 30.0


class ActorLost(GagarError):
    """An actor died, or could not be started, while it owed the caller a result. The call may have run in part."""

    def __init__(self, actor: str, method: str, detail: str = "") -> None:
        super().__init__(f"actor {actor} was lost during {method}" + (f": {detail}" if detail else ""))
        self.actor = actor
        self.method = method
        self.detail = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.actor, self.method, self.detail)


class ActorTimeout(GagarError):
    """A call did not end within its deadline; its actor was replaced."""

    def __init__(self, actor: str, method: str, timeout_s: float) -> None:
        super().__init__(f"actor {actor} did not finish {method} within {timeout_s:g} s and was replaced")
        self.actor = actor
        self.method = method
        self.timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.actor, self.method, self.timeout_s)


@dataclass(slots=True, eq=False, kw_only=True)
class _Member:
    """One actor of the pool."""

    name: str
    handle: Any
    failures: int
    """Actors lost in a row in this place, without a finished call between."""
    busy: int = 0
    live: bool = True
    """Takes new calls. False while draining and once dead."""
    dead: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the actor is out of the pool."""


class ActorPool:
    """`size` actors made by `factory`, each with `slots` slots.

    `factory(name)` creates one Ray actor and returns its handle; names are "<pool>-<n>", none used twice. In any one
    place of the pool at most `max_failures` actors in a row are replaced, with growing pauses; a finished call starts
    the count anew. A pool that has no actor left and may start none fails its calls with ActorLost.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[[str], Any],
        *,
        size: int,
        slots: int,
        max_failures: int = 5,
        first_backoff_s: float = _FIRST_BACKOFF_S,
    ) -> None:
        self.name = name
        self.restarts = 0
        """Actors replaced so far."""
        self._factory = factory
        self._size = size
        self._slots = slots
        self._max_failures = max_failures
        self._first_backoff_s = first_backoff_s
        self._members: list[_Member] = []
        self._waiting: deque[asyncio.Future[_Member]] = deque()
        self._pending = 0
        """Replacements that wait for their backoff to pass."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._made = 0
        self._closed = False
        self._last_failure = "it was never started"

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Creates the actors; does not wait for their constructors."""
        while len(self._members) < self._size:
            self._add(failures=0)

    async def ready(self, timeout_s: float = 300.0) -> None:
        """Returns when every actor's constructor has run. Raises ActorLost, naming the actor and the reason."""
        if not self._members:
            self.start()
        deadline = time.monotonic() + timeout_s
        for member in list(self._members):
            try:
                await asyncio.wait_for(
                    _value(member.handle.__ray_ready__.remote()), max(0.0, deadline - time.monotonic())
                )
            except TimeoutError:
                raise ActorLost(
                    member.name,
                    "its start",
                    f"not ready after {timeout_s:g} s; does the cluster have the resources that the pool asks for?",
                ) from None
            except _lost_errors() as e:
                raise ActorLost(member.name, "its start", _reason(e)) from None

    async def scale(self, size: int) -> None:
        """Makes the pool `size` actors large; waits until surplus actors, which get no new calls, have finished."""
        if size < 1:
            raise ValueError(f"a pool needs at least one actor, not {size}")
        self._size = size
        live = sorted((m for m in self._members if m.live), key=lambda m: m.busy)
        surplus = live[: max(0, len(live) + self._pending - size)]
        for member in surplus:
            member.live = False
            if member.busy == 0:
                self._remove(member)
        while sum(m.live for m in self._members) + self._pending < size:
            self._add(failures=0)
        self._hand_out()
        for member in surplus:
            await member.gone.wait()

    async def shutdown(self) -> None:
        """Ends every actor at once. Calls still running raise ActorLost."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for member in list(self._members):
            self._remove(member)
        self._last_failure = "the pool was shut down"
        self._fail_waiting()

    def occupancy(self) -> tuple[int, int]:
        """(busy slots, all slots) of the live actors; actors about to be replaced count, those that drain do not."""
        live = [m for m in self._members if m.live]
        return sum(m.busy for m in live), (len(live) + self._pending) * self._slots

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return sum(not w.done() for w in self._waiting)

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def call(
        self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Runs `method` on an actor and waits until it is done.

        With `num_returns` 1, returns its value. With n > 1 the method returns n values: the first is fetched, the
        others stay in the object store, and `(first, [n - 1 ObjectRefs])` is returned. `timeout_s` counts from the
        moment the actor gets the call. Raises what the method raises, ActorLost, or ActorTimeout; a cancelled call is
        cancelled in the actor too.
        """
        member = await self._acquire(method)
        try:
            bound = getattr(member.handle, method)
            refs = (bound.options(num_returns=num_returns) if num_returns > 1 else bound).remote(*args, **kwargs)
            first, rest = (refs[0], list(refs[1:])) if num_returns > 1 else (refs, [])
            value = await self._wait(member, method, first, timeout_s)
        finally:
            self._release(member)
        return (value, rest) if num_returns > 1 else value

    async def _wait(self, member: _Member, method: str, ref: Any, timeout_s: float | None) -> Any:
        try:
            async with asyncio.timeout(timeout_s):  # wait_for can lose a cancellation that meets the result
                value = await _value(ref)
        except TimeoutError as e:
            if timeout_s is None or _is_task_error(e):  # raised by the method itself
                raise
            self._lose(member, f"{method} did not finish within {timeout_s:g} s")
            raise ActorTimeout(member.name, method, timeout_s) from None
        except _lost_errors() as e:
            self._lose(member, _reason(e))
            raise ActorLost(member.name, method, _reason(e)) from None
        except asyncio.CancelledError:
            _cancel(ref)
            raise
        member.failures = 0
        return value

    async def _acquire(self, method: str) -> _Member:
        member = self._free()
        if member is not None and not self._waiting:
            member.busy += 1
            return member
        if self._hopeless():
            raise ActorLost(self.name, method, f"no actor is left ({self._last_failure})")
        future: asyncio.Future[_Member] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result())
            raise
        except ActorLost as e:
            raise ActorLost(e.actor, method, e.detail) from None

    def _release(self, member: _Member) -> None:
        member.busy -= 1
        if not member.live and not member.dead and member.busy == 0:
            self._remove(member)
        self._hand_out()

    def _free(self) -> _Member | None:
        """The live actor with the fewest calls, if it has a slot free."""
        best = min((m for m in self._members if m.live), key=lambda m: m.busy, default=None)
        return best if best is not None and best.busy < self._slots else None

    def _hand_out(self) -> None:
        """Gives free slots to waiting calls, first come first served."""
        while self._waiting:
            if self._waiting[0].done():
                self._waiting.popleft()
                continue
            member = self._free()
            if member is None:
                return
            member.busy += 1
            self._waiting.popleft().set_result(member)

    # ---- losing and replacing actors --------------------------------------------------------------------------------

    def _add(self, *, failures: int) -> None:
        name = f"{self.name}-{self._made}"
        self._made += 1
        self._members.append(_Member(name=name, handle=self._factory(name), failures=failures))

    def _remove(self, member: _Member) -> None:
        import ray

        member.live = False
        member.dead = True
        if member in self._members:
            self._members.remove(member)
        member.gone.set()
        ray.kill(member.handle)

    def _lose(self, member: _Member, reason: str) -> None:
        """Takes a dead actor out once, however many of its calls notice, and has it replaced after a pause."""
        if member.dead:
            return
        replace = member.live
        self._last_failure = f"{member.name}: {reason}"
        self._remove(member)
        failures = member.failures + 1
        if not replace or self._closed or failures > self._max_failures:
            self._fail_if_hopeless()
            return
        self._pending += 1
        self._spawn(self._replace(failures))

    async def _replace(self, failures: int) -> None:
        try:
            await asyncio.sleep(min(_LAST_BACKOFF_S, self._first_backoff_s * 2 ** (failures - 1)))
        finally:
            self._pending -= 1
        if sum(m.live for m in self._members) < self._size:
            self.restarts += 1
            self._add(failures=failures)
            self._hand_out()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hopeless(self) -> bool:
        return self._closed or (self._pending == 0 and not any(m.live for m in self._members))

    def _fail_if_hopeless(self) -> None:
        if self._hopeless():
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_exception(ActorLost(self.name, "waiting", f"no actor is left ({self._last_failure})"))


async def _value(ref: Any) -> Any:
    return await ref


def _cancel(ref: Any) -> None:
    import ray

    ray.cancel(ref)


def _lost_errors() -> tuple[type[BaseException], ...]:
    """What Ray raises for a call on an actor that is gone; some of it is no RayActorError, such as the memory monitor's
    kill."""
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


def _is_task_error(error: BaseException) -> bool:
    from ray.exceptions import RayTaskError

    return isinstance(error, RayTaskError)


def _reason(error: BaseException) -> str:
    """The line of Ray's long message that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
