"""How long the parts of an optimiser step take on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PACK = "pack"
"""Rows are laid out and go to the device."""
FORWARD = "forward"
"""The model, log-probabilities and loss."""
BACKWARD = "backward"
"""Gradients, the exchange between ranks included."""
OPTIMIZER = "optimizer"
"""Clipping and AdamW."""


class PhaseClock:
    """Seconds by part, added up over the micro-batches. A GPU works through a queue of its own, so there the parts are
    timed by events in that queue, which are read only at the end: timing makes nobody wait."""

    def __init__(self, *, cuda: bool) -> None:
        self._cuda = cuda
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body. An exception is not timed."""
        if not self._cuda:
            start_s = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start_s
            return
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((name, begin, end))

    def take(self) -> dict[str, float]:
        """The seconds since the last `take`."""
        seconds = dict(self._seconds)
        for name, begin, end in self._events:
            end.synchronize()
            seconds[name] = seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000.0
        self._seconds.clear()
        self._events.clear()
        return seconds
