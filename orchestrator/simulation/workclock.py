"""Work that takes time and can be held up: a pool's rollouts, which all stand still while weights are published."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class WorkClock:
    """Counts the seconds in which work goes on. One timer, whatever number of pieces of work there are."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[float, int, asyncio.Future[None]]] = []
        """(end on this clock, order, who waits for it), a heap."""
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._holds = 0
        self._worked_s = 0.0
        self._since_s = self._loop.time()

    def time(self) -> float:
        """Seconds of work so far."""
        return self._worked_s if self._holds else self._worked_s + self._loop.time() - self._since_s

    async def work(self, duration_s: float) -> None:
        """Returns when so many seconds of work have passed."""
        future = self._loop.create_future()
        entry = (self.time() + duration_s, next(self._order), future)
        heapq.heappush(self._due, entry)
        if self._due[0] is entry:
            self._set_timer()
        await future

    def hold(self) -> None:
        """Everything stands still until `release` was called as often."""
        self._worked_s = self.time()
        self._holds += 1
        self._set_timer()

    def release(self) -> None:
        """Ends one `hold`."""
        self._holds -= 1
        self._since_s = self._loop.time()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._due and self._due[0][2].done():  # cancelled
            heapq.heappop(self._due)
        if self._due and not self._holds:
            self._timer = self._loop.call_later(max(self._due[0][0] - self.time(), 0.0), self._end)

    def _end(self) -> None:
        now_s = self.time() + 1e-6
        while self._due and self._due[0][0] <= now_s:
            future = heapq.heappop(self._due)[2]
            if not future.done():
                future.set_result(None)
        self._timer = None
        self._set_timer()
