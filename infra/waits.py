"""Who waits for what, since when: a small table that a thread of its own can read while the event loop is stuck.

with waits.on("admission", "room under the bounds", lambda: "12 of 12 groups in flight"):
    await room.wait()
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


def _nothing() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Wait:
    """One loop or task that is blocked."""

    loop: str
    """Whose it is: `admission`, `rollouts`, `grading`, `training`, `checkpoint`, `start-up`, `evaluation`."""
    on: str
    """The queue, pool or actor."""
    since_s: float
    """On `time.monotonic`."""
    detail: Callable[[], str] = _nothing
    """What to say of it when somebody looks: sizes, free and busy counts. Called by another thread; must not block."""


class Waits:
    """The waits of one driver. `on` belongs to the event loop, `now` to anybody."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._ids = itertools.count()

    @contextmanager
    def on(self, loop: str, on: str, detail: Callable[[], str] = _nothing) -> Iterator[None]:
        """The body waits."""
        key = next(self._ids)
        self._waits[key] = Wait(loop, on, time.monotonic(), detail)
        try:
            yield
        finally:
            del self._waits[key]

    def now(self) -> list[Wait]:
        """Those that last, the longest first."""
        while True:
            try:
                return sorted(self._waits.values(), key=lambda wait: wait.since_s)
            except RuntimeError:  # the loop changed the table meanwhile
                continue
