"""Whether what a run writes reaches its disk: who cannot write, why, and since when.

A full disk, a folder that became read-only, an I/O error: whoever meets one keeps what it could not write and reports
itself here. The run then holds still (orchestrator/storage_hold.py) and all of them try again, until the disk takes it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from infra.errors import StorageError

T = TypeVar("T")
logger = logging.getLogger("gagar.storage")
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 15.0
"""The wait between two tries doubles up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A place that cannot be written now."""

    path: Path
    error: str
    since_s: float
    """On `time.monotonic`."""


class Storage:
    """The disk of one run. Reports come from any thread; `retry` is called in the driver's."""

    def __init__(self) -> None:
        self.faults_total = 0
        """Places that went down, counted each time."""
        self._lock = threading.Lock()
        self._faults: dict[Path, Fault] = {}
        self._retries: dict[Path, Callable[[], None]] = {}
        self._on_change: Callable[[], None] = lambda: None
        self._given_up = threading.Event()
        self._down_s = 0.0

    def listen(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called, in the reporting thread, when a place goes down or comes back."""
        self._on_change = on_change

    def failed(self, path: Path, error: Exception, retry: Callable[[], None] | None = None) -> None:
        """`path` could not be written. `retry` tries again, in the driver's thread, and reports what came of it;
        without it, whoever reports also tries again."""
        with self._lock:
            known = self._faults.get(path)
            since_s = known.since_s if known else time.monotonic()
            self._faults[path] = Fault(path=path, error=_text(error), since_s=since_s)
            self.faults_total += known is None
            if retry is not None:
                self._retries[path] = retry
        if known is None:
            self._on_change()

    def recovered(self, path: Path) -> None:
        """`path` was written. Nothing happens if it was not down."""
        with self._lock:
            first_s = min((f.since_s for f in self._faults.values()), default=0.0)
            known = self._faults.pop(path, None)
            self._retries.pop(path, None)
            if known is not None and not self._faults:
                self._down_s += time.monotonic() - first_s
        if known is not None:
            self._on_change()

    def scalars(self) -> dict[str, float]:
        """Metrics, over the session so far."""
        with self._lock:
            now_s = time.monotonic()
            running_s = now_s - min((f.since_s for f in self._faults.values()), default=now_s)
            return {"storage/faults_total": float(self.faults_total), "storage/down_s": self._down_s + running_s}

    def faults(self) -> tuple[Fault, ...]:
        """The places that cannot be written, the oldest first."""
        with self._lock:
            return tuple(sorted(self._faults.values(), key=lambda f: f.since_s))

    def message(self) -> str:
        """What is wrong and what helps, for a person."""
        faults = self.faults()
        if not faults:
            return "all is written"
        first, more = faults[0], len(faults) - 1
        others = f", and {more} more" if more else ""
        return (
            f"{first.path} cannot be written ({first.error}){others} for {time.monotonic() - first.since_s:.0f} s; "
            "free space or make it writable, the run then goes on by itself"
        )

    def retry(self) -> None:
        """Have those that gave a `retry` try again."""
        with self._lock:
            retries = list(self._retries.values())
        for again in retries:
            again()

    def give_up(self) -> None:
        """The run ends: whoever insists gets its error."""
        self._given_up.set()

    def insist(self, path: Path, work: Callable[[], T]) -> T:
        """work(), again and again while it raises StorageError or OSError. For threads of their own.

        Raises:
            StorageError: it still failed when the run gave up.
        """
        wait_s = FIRST_RETRY_S
        while True:
            try:
                value = work()
            except (StorageError, OSError) as error:
                self.failed(path, error)
                if self._given_up.wait(wait_s):
                    raise _as_storage_error(path, error) from error
                wait_s = min(2 * wait_s, LAST_RETRY_S)
            else:
                self.recovered(path)
                return value

    async def insist_async(self, path: Path, work: Callable[[], Awaitable[T]]) -> T:
        """As `insist`, for the event loop; ends when it is cancelled."""
        wait_s = FIRST_RETRY_S
        while True:
            try:
                value = await work()
            except (StorageError, OSError) as error:
                self.failed(path, error)
                if self._given_up.is_set():
                    raise _as_storage_error(path, error) from error
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_RETRY_S)
            else:
                self.recovered(path)
                return value


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StorageError) else f"{getattr(error, 'strerror', None) or error}"


def _as_storage_error(path: Path, error: Exception) -> StorageError:
    if isinstance(error, StorageError):
        return error
    return StorageError(f"{path}: cannot be written ({error}); free space and resume the run")
