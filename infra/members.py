"""The actors of a pool as data: where one stands, and what others see of it and of the pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class ActorState(StrEnum):
    """Where an actor stands."""

    STARTING = "starting"
    LIVE = "live"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLoad:
    """One actor, as others see it."""

    name: str
    state: ActorState
    busy: int
    """Slots in use."""
    state_s: float
    """Seconds that it has been in this state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The sizes of a pool, in actors, and its slots."""

    target: int
    """What it was told to be."""
    live: int
    starting: int
    """Starting now, or soon again after a loss."""
    draining: int
    busy: int
    """Slots of live actors that are in use."""
    slots: int
    """Slots of live actors."""

    @property
    def settled(self) -> bool:
        """As large as it was told to be, and nothing on its way in or out."""
        return self.live == self.target and not self.starting and not self.draining


@dataclass(frozen=True, slots=True, kw_only=True)
class OldestCall:
    """The call of a pool that has run longest."""

    actor: str
    actor_id: str
    """Ray's, in hexadecimal; "" for a scripted one."""
    method: str
    age_s: float


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One actor of the pool."""

    name: str
    handle: Any
    failures: int
    """Actors lost in a row in this place, without a finished call between."""
    state: ActorState = ActorState.STARTING
    since_s: float = field(default_factory=time.monotonic)
    busy: int = 0
    calls: dict[Any, tuple[str, float]] = field(default_factory=dict)
    """Its calls in flight, the oldest first: first result -> method, and since when on `time.monotonic`."""
    revoked: bool = False
    """Its drain is over: what it still runs is handed back."""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is live or dead."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it drains and has no calls left."""
    reason: str = ""
    """Why it was lost."""

    def turn(self, state: ActorState) -> None:
        """Enters a state."""
        self.state = state
        self.since_s = time.monotonic()
        if state is not ActorState.STARTING:
            self.started.set()


def pool_state(
    members: Collection[Member], draining: Collection[Member], *, target: int, pending: int, slots: int
) -> PoolState:
    """See `ActorPool.state`. `pending`: replacements that are about to start; `slots`: of one actor."""
    live = [m for m in members if m.state is ActorState.LIVE]
    return PoolState(
        target=target,
        live=len(live),
        starting=min(target, len(members) + pending) - len(live),
        draining=len(draining),
        busy=sum(m.busy for m in live),
        slots=len(live) * slots,
    )


def actor_loads(members: Sequence[Member]) -> list[ActorLoad]:
    """See `ActorPool.loads`."""
    now_s = time.monotonic()
    return [ActorLoad(name=m.name, state=m.state, busy=m.busy, state_s=now_s - m.since_s) for m in members]


def oldest_call(members: Sequence[Member], identity: Callable[[Any], str]) -> OldestCall | None:
    """See `ActorPool.oldest_call`; `identity` is that of `Actors`."""
    running = [(since_s, m, method) for m in members for method, since_s in list(m.calls.values())[:1]]
    if not running:
        return None
    since_s, member, method = min(running, key=lambda call: call[0])
    age_s = time.monotonic() - since_s
    return OldestCall(actor=member.name, actor_id=identity(member.handle), method=method, age_s=age_s)
