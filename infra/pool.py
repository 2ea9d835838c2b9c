"""An elastic pool of actors, driven from one asyncio loop.

Knows nothing of what its actors do. Every actor has a number of slots; a call waits for a free slot on the live actor
that has the fewest calls. An actor that dies, or does not answer in time, loses the calls it was running and is
replaced. All methods belong to one event loop; nothing here is thread-safe.

    starting --constructor has run--> live --resize--> draining --its calls are done, or handed back--> dead
        \\-- cannot start, or its node left: dead, and another one starts in its place --/

An actor whose node will leave, as the cluster was told, drains too, while another one starts in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from infra.actors import ActorDrained, ActorLost, Actors, ActorTimeout, RayActors, reason_of
from infra.members import (
    ActorLoad,
    ActorState,
    Member,
    OldestCall,
    PoolState,
    actor_loads,
    oldest_call,
    pool_state,
)

__all__ = ["ActorDrained", "ActorLoad", "ActorLost", "ActorPool", "ActorState", "ActorTimeout", "PoolState"]

_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 30.0
_GRACE_S = 5.0
"""What cancelled calls of a drained actor get to leave engines and sandboxes tidy, before the actor is ended."""
_DRAIN_S = 120.0


class ActorPool:
    """`size` actors made by `factory`, each with `slots` slots.

    `factory(name)` creates one actor and returns its handle; names are "<pool>-<n>", none used twice. An actor takes
    calls once its constructor has run. In any one place of the pool at most `max_failures` actors in a row are
    replaced, with growing pauses; a finished call starts the count anew. A pool that has no actor left and may start
    none fails its calls with ActorLost. `say` is told, in a line, of losses and of starts that fail.
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
        ping_s: float = 10.0,
        silent_after_s: float = 60.0,
        actors: Actors | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`ping_s`: how often a live actor is asked whether it lives; one that does not answer within `silent_after_s`
        hangs, and is lost. Its methods must be coroutines, with room for one call more than it has slots."""
        self.name = name
        self.slots = slots
        self.restarts = 0
        """Actors replaced so far."""
        self.handed_back = 0
        """Calls that drained actors gave back, so far."""
        self.say = say
        self._factory = factory
        self._size = size
        self._max_failures = max_failures
        self._first_backoff_s = first_backoff_s
        self._ping_s = ping_s
        self._silent_after_s = silent_after_s
        self._actors = actors or RayActors()
        self._members: list[Member] = []
        self._draining: dict[Member, asyncio.Task[None]] = {}
        self._waiting: deque[tuple[asyncio.Future[Member], float]] = deque()
        self._pending = 0
        """Replacements that wait for their backoff to pass."""
        self._listeners: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._made = 0
        self._closed = False
        self._last_failure = "it was never started"

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Creates the actors; does not wait for their constructors."""
        if self._made == 0:
            self._spawn(self._mind_nodes())
        while len(self._members) < self._size:
            self._add(failures=0)

    async def ready(self, timeout_s: float = 300.0) -> None:
        """Returns when every actor's constructor has run. Raises ActorLost, naming the actor and the reason."""
        if not self._members:
            self.start()
        deadline = time.monotonic() + timeout_s
        for member in list(self._members):
            try:
                await asyncio.wait_for(member.started.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise ActorLost(
                    member.name,
                    "its start",
                    f"not ready after {timeout_s:g} s; does the cluster have the resources that the pool asks for?",
                ) from None
            if member.state is ActorState.DEAD:
                raise ActorLost(member.name, "its start", member.reason)

    def resize(self, size: int, *, drain_s: float = _DRAIN_S) -> None:
        """Makes the pool `size` actors large, in the background; returns at once.

        New actors take calls once they are ready. Surplus ones, those with the fewest calls, get no new calls; what
        they have not finished after `drain_s` is handed back: those calls raise ActorDrained. Raises ValueError below
        one actor.
        """
        if size < 1:
            raise ValueError(f"a pool needs at least one actor, not {size}")
        self._size = size
        surplus = max(0, len(self._members) - size)
        for member in sorted(self._members, key=lambda m: (m.state is ActorState.LIVE, m.busy))[:surplus]:
            self._drain(member, drain_s)
        for member in list(self._draining):
            if len(self._members) + self._pending < size and not member.revoked:  # it is wanted after all
                self._draining.pop(member).cancel()
                member.idle.clear()
                member.turn(ActorState.LIVE)
                self._members.append(member)
        while len(self._members) + self._pending < size:
            self._add(failures=0)
        self._notify()
        self._hand_out()

    async def shutdown(self) -> None:
        """Ends every actor at once. Calls still running raise ActorLost."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        for member in [*self._members, *self._draining]:
            self._remove(member)
        self._last_failure = "the pool was shut down"
        self._fail_waiting()

    # ---- what others see --------------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Slots of live actors now; follow it with `on_change`."""
        return self.slots * sum(m.state is ActorState.LIVE for m in self._members)

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Has `listener` called, in the loop, whenever the capacity or the state of an actor may have changed;
        returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def occupancy(self) -> tuple[int, int]:
        """(busy slots, all slots) of the pool; actors that start or are about to be replaced count, and of those that
        drain the slots that are still in use. (0, 0) means that nobody is left and nobody will come."""
        coming = min(self._size, len(self._members) + self._pending)
        if coming == 0:
            return 0, 0
        leaving = sum(m.busy for m in self._draining)
        return sum(m.busy for m in self._members) + leaving, coming * self.slots + leaving

    def state(self) -> PoolState:
        """Sizes now."""
        return pool_state(self._members, self._draining, target=self._size, pending=self._pending, slots=self.slots)

    def loads(self) -> list[ActorLoad]:
        """Every actor, those that drain last."""
        return actor_loads([*self._members, *self._draining])

    def oldest_call(self) -> OldestCall | None:
        """The call that has run longest, whichever actor has it; None where none runs."""
        return oldest_call([*self._members, *self._draining], self._actors.identity)

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot."""
        return sum(not future.done() for future, _ in self._waiting)

    def queue_s(self) -> float:
        """Seconds that the oldest of them has waited; 0 where none does."""
        oldest = next((since_s for future, since_s in self._waiting if not future.done()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    # ---- calls ------------------------------------------------------------------------------------------------------

    async def call(
        self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Runs `method` on an actor and waits until it is done.

        With `num_returns` 1, returns its value. With n > 1 the method returns n values: the first is fetched, the
        others stay in the object store, and `(first, [n - 1 ObjectRefs])` is returned. `timeout_s` counts from the
        moment the actor gets the call. Raises what the method raises, ActorLost, ActorDrained, or ActorTimeout; a
        cancelled call is cancelled in the actor too.
        """
        member = await self._acquire(method)
        try:
            if member.revoked:
                raise ActorDrained(member.name, method)
            first, *rest = self._actors.call(member.handle, method, args, kwargs, num_returns)
            member.calls[first] = (method, time.monotonic())
            try:
                value = await self._wait(member, method, first, timeout_s)
            finally:
                member.calls.pop(first, None)
        finally:
            self._release(member)
        return (value, rest) if num_returns > 1 else value

    def broadcast(self, method: str, *args: Any) -> None:
        """Calls `method` on every actor, those that start or drain included; nobody waits for it, and its errors are
        the actors' own."""
        for member in [*self._members, *self._draining]:
            self._actors.call(member.handle, method, args, {}, 1)

    async def _wait(self, member: Member, method: str, ref: Any, timeout_s: float | None) -> Any:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:  # wait_for can lose a cancellation that meets the result
                value = await ref
        except TimeoutError:
            if timeout_s is None or not deadline.expired():  # raised by the method itself
                raise
            self._lose(member, f"{method} did not finish within {timeout_s:g} s")
            raise ActorTimeout(member.name, method, timeout_s) from None
        except self._actors.cancelled():
            if member.revoked:
                raise ActorDrained(member.name, method) from None
            raise
        except self._actors.lost() as e:
            if member.revoked:
                raise ActorDrained(member.name, method) from None
            self._lose(member, reason_of(e))
            raise ActorLost(member.name, method, reason_of(e)) from None
        except asyncio.CancelledError:
            self._actors.cancel(ref)
            raise
        member.failures = 0
        return value

    async def _acquire(self, method: str) -> Member:
        member = self._free()
        if member is not None and not self._waiting:
            member.busy += 1
            return member
        if self._hopeless():
            raise ActorLost(self.name, method, f"no actor is left ({self._last_failure})")
        future: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, time.monotonic()))
        self._hand_out()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._release(future.result())
            raise
        except ActorLost as e:
            raise ActorLost(e.actor, method, e.detail) from None

    def _release(self, member: Member) -> None:
        member.busy -= 1
        if member.state is ActorState.DRAINING:
            self._notify()
            if member.busy == 0:
                member.idle.set()
        self._hand_out()

    def _free(self) -> Member | None:
        """The live actor with the fewest calls, if it has a slot free."""
        live = (m for m in self._members if m.state is ActorState.LIVE)
        best = min(live, key=lambda m: m.busy, default=None)
        return best if best is not None and best.busy < self.slots else None

    def _hand_out(self) -> None:
        """Gives free slots to waiting calls, first come first served."""
        while self._waiting:
            future, _ = self._waiting[0]
            if future.done():
                self._waiting.popleft()
                continue
            member = self._free()
            if member is None:
                return
            member.busy += 1
            self._waiting.popleft()
            future.set_result(member)

    # ---- actors come, leave, and are lost ---------------------------------------------------------------------------

    def _add(self, *, failures: int) -> None:
        name = f"{self.name}-{self._made}"
        self._made += 1
        member = Member(name=name, handle=self._factory(name), failures=failures)
        self._members.append(member)
        self._spawn(self._watch(member))

    async def _watch(self, member: Member) -> None:
        """Makes an actor live once it is ready; then asks it now and then, for one whose process hangs, or an idle one
        whose node left, tells nobody by itself."""
        while member.state is not ActorState.DEAD:
            starting = member.state is ActorState.STARTING  # may wait for its node for as long as that takes
            deadline = asyncio.timeout(None if starting else self._silent_after_s)
            try:
                async with deadline:
                    await self._actors.ready(member.handle)
            except TimeoutError:
                if not deadline.expired():
                    raise
                self._lose(member, f"no sign of life for {self._silent_after_s:g} s")
                return
            except self._actors.lost() as e:
                self._lose(member, reason_of(e))
                return
            if member.state is ActorState.STARTING:
                member.turn(ActorState.LIVE)
                self._notify()
                self._hand_out()
            await asyncio.sleep(self._ping_s)

    async def _mind_nodes(self) -> None:
        """Takes actors off nodes that will leave: calls end there or are handed back in time, new ones go elsewhere."""
        while True:
            await asyncio.sleep(self._ping_s)
            members = list(self._members)
            for member, left_s in zip(members, await self._actors.leaving([m.handle for m in members]), strict=True):
                if left_s is None or member not in self._members:
                    continue
                what = f"its node leaves in {left_s:.0f} s" if math.isfinite(left_s) else "its node leaves"
                self.say(f"{member.name} drains: {what}; another one starts in its place")
                # What it hands back takes up to _GRACE_S to end, and the node must still be there then.
                self._drain(member, min(max(0.0, left_s - 2 * _GRACE_S), _DRAIN_S))
                self._add(failures=member.failures)
                self._notify()

    def _drain(self, member: Member, drain_s: float) -> None:
        if member.busy == 0:
            self._remove(member)
            return
        self._members.remove(member)
        member.turn(ActorState.DRAINING)
        self._draining[member] = self._spawn(self._retire(member, drain_s))

    async def _retire(self, member: Member, drain_s: float) -> None:
        """Waits for a draining actor's calls, takes back those that outlast the deadline, and ends it."""
        try:
            await asyncio.wait_for(member.idle.wait(), drain_s)
        except TimeoutError:
            member.revoked = True
            self.handed_back += member.busy
            self.say(
                f"{member.name} drains: {member.busy} of its calls outlast {drain_s:g} s and start again elsewhere"
            )
            for ref in list(member.calls):
                self._actors.cancel(ref)
            with contextlib.suppress(TimeoutError):  # ended all the same; its calls say that they were handed back
                await asyncio.wait_for(member.idle.wait(), _GRACE_S)
        self._remove(member)
        self._notify()

    def _remove(self, member: Member) -> None:
        member.turn(ActorState.DEAD)
        if member in self._members:
            self._members.remove(member)
        self._draining.pop(member, None)
        self._actors.kill(member.handle)

    def _lose(self, member: Member, reason: str) -> None:
        """Takes a dead actor out once, however many of its calls notice, and has it replaced after a pause."""
        if member.state is ActorState.DEAD:
            return
        member.reason = reason
        draining = self._draining.get(member)
        if draining is not None:
            draining.cancel()
        was, started = member.state, member.state is not ActorState.STARTING
        self._last_failure = f"{member.name}: {reason}"
        self._remove(member)
        failures = member.failures + 1
        what = f"{member.name} " + (f"was lost: {reason}" if started else f"did not start: {reason}")
        if was is ActorState.DRAINING or self._closed or len(self._members) + self._pending >= self._size:
            self._fail_if_hopeless()
        elif failures > self._max_failures:
            self.say(f"{what}; given up after {failures} in a row, the {self.name} pool stays smaller")
            self._fail_if_hopeless()
        else:
            self.say(f"{what}; it is replaced")
            self._pending += 1
            self._spawn(self._replace(failures))
        self._notify()

    async def _replace(self, failures: int) -> None:
        try:
            await asyncio.sleep(min(_LAST_BACKOFF_S, self._first_backoff_s * 2 ** (failures - 1)))
        finally:
            self._pending -= 1
        if len(self._members) < self._size:
            self.restarts += 1
            self._add(failures=failures)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def _hopeless(self) -> bool:
        return self._closed or (self._pending == 0 and not self._members)

    def _fail_if_hopeless(self) -> None:
        if self._hopeless():
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(ActorLost(self.name, "waiting", f"no actor is left ({self._last_failure})"))
