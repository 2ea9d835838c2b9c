"""The driver's clock: the running event loop's, so that a loop with virtual time drives everything that waits."""

from __future__ import annotations

import asyncio
import time


class Clock:
    """Seconds on an event loop's clock, which is `time.monotonic` in a real run; and the wall clock."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop that ran when the time was first asked for; its clock can be read after its end too."""

    def now(self) -> float:
        """Seconds; only differences mean something. The first call needs a running loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()

    def unix(self) -> float:
        """Seconds since 1970, for what other machines read."""
        return time.time()


class Paused:
    """How long generation stood still so far, so that rollout times can leave it out (M6: effective time)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._total_s = 0.0
        self._since_s: float | None = None

    def begin(self) -> None:
        """Generation stops."""
        self._since_s = self._clock.now()

    def end(self) -> None:
        """Generation goes on."""
        if self._since_s is not None:
            self._total_s += self._clock.now() - self._since_s
            self._since_s = None

    def total_s(self) -> float:
        """Paused seconds up to now; the difference of two readings is the pause between them."""
        running_s = 0.0 if self._since_s is None else self._clock.now() - self._since_s
        return self._total_s + running_s
