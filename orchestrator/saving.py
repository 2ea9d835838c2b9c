"""The scheduler's side of the disk: it holds still while the disk takes nothing, and writes checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from infra.errors import LearnerError, StorageError
from infra.storage import Storage
from learner.group import LearnerGroup
from orchestrator.alarms import Alarm
from orchestrator.checkpoint import Checkpoints
from orchestrator.ledger import Ledger
from orchestrator.ledger_store import LedgerStore
from orchestrator.mixer import Mixer
from orchestrator.pause import Pauses

REASON = "storage"
RETRY_S = 1.0


class Saving:
    """What `Scheduler` knows of the run's disk."""

    def __init__(
        self,
        *,
        storage: Storage,
        checkpoints: Checkpoints,
        pauses: Pauses,
        ledger: Ledger,
        mixer: Mixer,
        abort_after_s: float,
        on_alarm: Callable[[Alarm], None],
    ) -> None:
        self.storage = storage
        self._checkpoints = checkpoints
        self._pauses = pauses
        self._ledger = ledger
        self._mixer = mixer
        self._abort_after_s = abort_after_s
        self._on_alarm = on_alarm
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Consumes reports of places that cannot be written; produces the pause `storage`, and its end. Unblocked by a
        report, and while something is down by a second that passed.

        Raises:
            StorageError: something was down for `abort_after_s`.
        """
        loop = asyncio.get_running_loop()
        self.storage.listen(lambda: _tell(loop, self._changed))
        try:
            while True:
                self._changed.clear()
                if self._look():
                    await _either(self._changed, RETRY_S)
                    self.storage.retry()
                else:
                    await self._changed.wait()
        finally:
            self.storage.listen(lambda: None)

    def blame(self) -> None:
        """The run is about to end because nothing moves. Raises StorageError: that is because of the disk."""
        if self.storage.faults():
            raise _waited(self.storage, self._abort_after_s)

    def _look(self) -> bool:
        """Whether anything is down; the pause follows."""
        faults, message = self.storage.faults(), self.storage.message()
        paused = REASON in self._pauses.reasons()
        if faults:
            self._pauses.set(REASON, message)
            refuse_after(self.storage, self._abort_after_s)
        else:
            self._pauses.clear(REASON)
        if paused is not bool(faults):
            text = f"the run holds still: {message}" if faults else "the disk takes everything again; the run goes on"
            self._on_alarm(Alarm(name=REASON, on=bool(faults), text=text))
        return bool(faults)

    async def checkpoint(self, step: int, learner: LearnerGroup) -> Path:
        """Write one. State, logs and the ledger's mark are of one moment, at which nothing waits to be written; what
        the ledger holds of it is on the disk first. Afterwards what the oldest one on disk covers is forgotten.

        Raises:
            StorageError: it could not be written.
        """
        while self.storage.faults():  # noqa: ASYNC110  # else its sizes of the logs would leave out what still waits
            await asyncio.sleep(RETRY_S)
        log = self._ledger.log
        state = {"mixer": self._mixer.state(self._ledger.pending()), "ledger": log.mark() if log is not None else None}
        before = log.flush if log is not None else None
        path = await self._checkpoints.save(step, learner, state, before=before)
        if log is not None:
            log.forget(self._checkpoints.oldest_mark())
        return path


async def settle(storage: Storage, *, abort_after_s: float) -> None:
    """The end of a run: until everything that waits is written.

    Raises:
        StorageError: something was down for `abort_after_s`.
    """
    while storage.faults():
        refuse_after(storage, abort_after_s)
        await asyncio.sleep(RETRY_S)
        storage.retry()


@asynccontextmanager
async def closing(store: LedgerStore, storage: Storage, *, abort_after_s: float) -> AsyncIterator[None]:
    """The log of a session's ledger, closed at its end when the disk has taken all of it. A lost learner ends the
    session, not the run; where something else did, that is the message, not a disk that takes nothing as well.

    Raises:
        StorageError: the disk took nothing for `abort_after_s`.
    """
    try:
        yield
    except BaseException as error:
        if _is_lost_learner(error):
            with suppress(StorageError):
                await settle(storage, abort_after_s=abort_after_s)
        if storage.faults() or not _is_lost_learner(error):
            storage.give_up()
        with suppress(StorageError):
            store.close()
        raise
    await settle(storage, abort_after_s=abort_after_s)
    store.close()


def _is_lost_learner(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_lost_learner, error.exceptions))
    return isinstance(error, LearnerError)


def refuse_after(storage: Storage, abort_after_s: float) -> None:
    """Raises StorageError when something has been down for longer."""
    faults = storage.faults()
    if faults and time.monotonic() - faults[0].since_s > abort_after_s:
        raise _waited(storage, abort_after_s)


def _waited(storage: Storage, abort_after_s: float) -> StorageError:
    return StorageError(
        f"{storage.message()} (waited scheduler.abort_after_s = {abort_after_s:g} s); the last checkpoint is intact, "
        "the same command with --resume goes on from it"
    )


def _tell(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(changed.set)


async def _either(event: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
