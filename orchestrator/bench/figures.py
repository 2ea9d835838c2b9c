"""What a benchmark returns, and how it is shown."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user asked for."""

    repeat: int | None
    """Repetitions; None: each benchmark's own number."""
    config: Path
    """Where those that run models or sandboxes take them from."""

    def times(self, own: int) -> int:
        """Repetitions of a benchmark that does `own` by itself."""
        return own if self.repeat is None else self.repeat

    def load(self) -> RunConfig:
        """Raises ConfigError."""
        from configs.check import load_run

        return load_run(self.config, []).config


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity, measured several times in one run."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def record(self) -> dict[str, Any]:
        """For --json."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "repetitions": len(self.values),
            "values": list(self.values),
        }


def figure(name: str, unit: str, values: Iterable[float]) -> Figure:
    """A figure of at least one value."""
    return Figure(name=name, unit=unit, values=tuple(values))


def ratios(name: str, above: Figure, below: Figure) -> Figure:
    """The ratio of two quantities that were measured in turn, repetition by repetition."""
    return figure(name, "x", (a / b for a, b in zip(above.values, below.values, strict=True)))


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def timed(work: Callable[[], object], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call. Garbage of what ran before is not collected on its time."""
    gc.collect()
    start_s = clock()
    work()
    return clock() - start_s


@contextmanager
def local_ray(object_store_mib: int = 1024) -> Iterator[None]:
    """A Ray of its own, on this machine."""
    import ray

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=object_store_mib * 2**20,
        log_to_driver=False,
        logging_level="error",
        configure_logging=True,
    )
    try:
        yield
    finally:
        ray.shutdown()
