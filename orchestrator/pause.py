"""Why a run holds still: named reasons, and the gate that waits until none is left.

While any reason stands nothing is admitted and no step is begun; what rolls out, is graded or is learned goes on to its
end. Only under a pause for lost rollouts a few probes are still admitted, to learn when it is over (masking.py).
Whoever sets a reason clears it, or ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from orchestrator.clock import Clock


class Pauses:
    """Used from one thread, the driver's."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._reasons: dict[str, str] = {}
        self._since_s: dict[str, float] = {}
        self._total_s = 0.0
        self._begun_s = 0.0
        self._changed = asyncio.Event()
        """Set, and replaced, when a reason is cleared."""

    def set(self, reason: str, message: str) -> None:
        """Hold still for `reason`, such as "storage"; `message` says what is wrong and what helps. Again: the message
        is replaced, the beginning stays."""
        if not self._reasons:
            self._begun_s = self._clock.now()
        self._reasons[reason] = message
        self._since_s.setdefault(reason, self._clock.now())

    def clear(self, reason: str) -> None:
        """`reason` is over; nothing happens if it was not set."""
        if self._reasons.pop(reason, None) is None:
            return
        del self._since_s[reason]
        if not self._reasons:
            self._total_s += self._clock.now() - self._begun_s
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, *, but: str | None = None) -> None:
        """Until no reason is left, or none but `but`; returns at once if there is none."""
        while self._reasons.keys() - {but}:  # one may be set again before the waiter runs
            await self._changed.wait()

    def reasons(self) -> Mapping[str, str]:
        """Reason -> message, those that stand now, oldest first."""
        return dict(self._reasons)

    def text(self) -> str:
        """All of them in a line."""
        return "; ".join(f"{reason}: {message}" for reason, message in self._reasons.items())

    def since_s(self, reason: str) -> float | None:
        """When a standing reason was first set, on the driver's clock; None if it does not stand."""
        return self._since_s.get(reason)

    def total_s(self) -> float:
        """Seconds that the run has held still so far, for any reason."""
        return self._total_s + (self._clock.now() - self._begun_s if self._reasons else 0.0)
