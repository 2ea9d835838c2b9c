"""An endpoint of the graders that cannot be reached: their groups wait for it, and fall back only if it stays away.

An outage is no property of the group that met it (M1.10 is for those): while one endpoint serves all graders, each
group in turn would lose its grade. So whoever meets it waits, one probe at a time asks whether it is over, and then
all are graded after all. Nothing else waits: what is not graded goes on, and admission stops by itself
(`GradingStage.full`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tenacity import AsyncRetrying, retry_if_result
from tenacity.wait import wait_base, wait_random_exponential

from orchestrator.alarms import Alarm
from orchestrator.clock import Clock

_NAME = "endpoint_lost"
_PROBES = wait_random_exponential(multiplier=1.0, max=30.0)
"""Pauses between two probes, seconds."""


class Outage:
    """Of one endpoint. Used from the driver's loop."""

    def __init__(
        self,
        *,
        probe: Callable[[], Awaitable[str | None]],
        wait_s: float,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_alarm: Callable[[Alarm], None],
        pauses: wait_base = _PROBES,
    ) -> None:
        """`probe` tells what is wrong with the endpoint, or None; `wait_s`: how long groups wait for it."""
        self._probe = probe
        self._wait_s = wait_s
        self._clock = clock
        self._spawn = spawn
        self._on_alarm = on_alarm
        self._pauses = pauses
        self._end: asyncio.Future[bool] | None = None
        """While an outage lasts: whether it ended by itself."""
        self._given_up = False
        self._waiting = 0

    @property
    def alarms(self) -> tuple[str, ...]:
        """Its name while the endpoint is away."""
        return (_NAME,) if self._end is not None or self._given_up else ()

    async def over(self, detail: str) -> bool:
        """The endpoint was lost, as `detail` says. Returns True once it answers again, False when it has been away for
        `wait_s`: then at once, until `answered`."""
        if self._given_up:
            return False
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
            self._tell(
                f"the graders' endpoint cannot be used ({detail}); grading waits and asks again for at most "
                f"{self._wait_s:g} s (grader.endpoint_wait_s), then groups fall back to outcome advantages; see that "
                "it serves, that this network reaches it, and that its key is valid"
            )
            self._spawn(self._watch(self._end))
        self._waiting += 1
        try:
            return await asyncio.shield(self._end)
        finally:
            self._waiting -= 1

    def answered(self) -> None:
        """The endpoint gave an answer: whoever loses it from now on waits again."""
        if self._given_up:
            self._given_up = False
            self._tell("the graders' endpoint answers again: groups are graded as before", on=False)

    async def _watch(self, end: asyncio.Future[bool]) -> None:
        """Probes until the endpoint answers, or the time is up."""
        since_s = self._clock.now()
        retrying = AsyncRetrying(wait=self._pauses, retry=retry_if_result(lambda wrong: wrong is not None))
        try:
            async with asyncio.timeout(self._wait_s):
                await retrying(self._probe)
        except TimeoutError:
            self._given_up = True
            self._tell(
                f"the graders' endpoint was away for {self._wait_s:g} s: {self._waiting} groups that waited, and those "
                "that come, fall back to outcome advantages (M1.10) until it answers"
            )
        else:
            away_s = self._clock.now() - since_s
            said = f"the graders' endpoint answers again after {away_s:.0f} s: {self._waiting} groups that waited go on"
            self._tell(said, on=False)
        self._end = None
        end.set_result(not self._given_up)

    def _tell(self, text: str, *, on: bool = True) -> None:
        self._on_alarm(Alarm(name=_NAME, on=on, text=text))
