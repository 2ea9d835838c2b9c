"""An asyncio event loop whose clock jumps: where nothing is ready, it is at once the time of the next timer.

Code that takes its times from the running loop (`loop.time()`, `asyncio.sleep`, `asyncio.timeout`) runs unchanged, and
hours of it pass in as long as its callbacks take. What waits for the real world has no place here: threads and
executors are refused, and a loop in which nothing could ever happen again says so instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from infra.errors import GagarError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_RESOLUTION_S = 1e-6
"""Timers this close to each other are due together. Above the rounding of times of up to 1e9 s."""


class ClockStopped(GagarError):
    """Every task waits for something that no timer and no other task will bring."""


class _Selector(selectors.SelectSelector):
    """Instead of waiting for its files, moves the clock on by as long as it was to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise ClockStopped(
                "the simulation stands still: no timer is set and every task waits for another one; this is a fault of "
                "the scheduler or of a simulated part"
            )
        self.now_s += max(timeout, 0.0)
        return []  # the loop's only file is its own wake-up pipe, which threads and signals write to


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. `time()` starts at 0, in seconds."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = _RESOLUTION_S

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now_s

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Refused: a thread's work takes real time, and the clock would run away from it."""
        name = getattr(func, "__qualname__", repr(func))
        raise GagarError(
            f"{name} asks for a thread in a loop with a virtual clock; call it directly, or simulate how long it takes"
        )


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a loop of its own with a virtual clock.

    Raises:
        ClockStopped: nothing is left that could happen.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
