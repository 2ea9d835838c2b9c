"""A semaphore whose size follows an elastic pool."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """`size` slots, given out in turn. With fewer than are taken, none is given out until enough came back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Wait for a slot; `release` gives it back."""
        if self.taken < self.size and not self._waiting:
            self.taken += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # the slot had been handed over already
                self.release()
            raise

    def release(self) -> None:
        """Give a slot back."""
        self.taken -= 1
        self._hand_out()

    def resize(self, size: int) -> None:
        """The pool has grown or shrunk. One slot always stays: a call to an empty pool fails and says why."""
        self.size = max(size, 1)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and self.taken < self.size:
            future = self._waiting.popleft()
            if not future.done():
                self.taken += 1
                future.set_result(None)
