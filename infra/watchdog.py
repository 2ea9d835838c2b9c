"""A thread that sees when a run stands still, says who waits for whom, and ends the run if it stays so.

    moved() within stall_after_s                -> nothing
    nothing moved for stall_after_s,
    or the event loop is blocked for 30 s       -> a report, once every stall_after_s; stacks once a stall
    nothing moved for abort_after_s             -> the scheduler ends the run by itself (Stalled); if the event loop is
                                                   blocked, or the run is still there `leave_s` later, the thread ends
                                                   the process. Both give the exit code EXIT_STALLED

It is a thread, because a blocked event loop cannot watch itself. Should even this thread not get to run, because native
code holds the interpreter's lock, the C runtime writes the stacks and ends the process with code 1, `leave_s` later.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from infra import stacks
from infra.errors import GagarError, StorageError
from infra.scrub import scrub
from infra.waits import Wait, Waits

EXIT_STALLED = 3
"""The process's exit code when the run was ended because nothing moved."""
STACKS = "stacks"
"""Folder of the run with a folder of every stall."""
_SHOWN = 20
"""Waits that a report lists."""
_BLOCKED_S = 30.0
"""Without a sign of the event loop for this long it counts as blocked; that is told at once, however patient
`stall_after_s` is, since nothing that a loop does may take so long."""
_KEPT = 20
"""Folders of stacks that a run keeps, the newest."""


class Stalled(GagarError):
    """Nothing moved for `scheduler.abort_after_s`."""

    exit_code = EXIT_STALLED


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """One pool, when a run stands still."""

    name: str
    sizes: str
    """"2 live, 0 starting, 0 draining; 3 of 4 slots busy, 7 calls wait"."""
    actor: str = ""
    """Of its oldest call; "" where none runs."""
    method: str = ""
    age_s: float = 0.0
    actor_id: str = ""
    """Ray's, to find the process by."""


class Watchdog:
    """Watches one run from `start` to `close`. `moved`, `beat` and `waits` belong to the event loop's thread."""

    def __init__(
        self,
        run_dir: Path,
        waits: Waits,
        *,
        stall_after_s: float,
        abort_after_s: float,
        say: Callable[[str], None],
        ended: Callable[[str], None],
        leave_s: float = 60.0,
        collect: Callable[[], tuple[list[stacks.Process], list[str]]] = stacks.collect_all,
    ) -> None:
        """`say` prints a text, `ended` writes down why the run was ended; both are called by the watchdog's thread.
        `leave_s`: what the run gets to leave by itself once it was told to."""
        self.waits = waits
        self.pools: Callable[[], Sequence[PoolReport]] = tuple
        self.headline: Callable[[float], str] = lambda still_s: f"no progress for {still_s:.0f} s"
        """One line on what the run as a whole waits for, after so many seconds."""
        self._run_dir = run_dir
        self._stall_after_s = stall_after_s
        self._abort_after_s = abort_after_s
        self._leave_s = leave_s
        self._say = say
        self._ended = ended
        self._collect = collect
        self._moved_s = self._beat_s = time.monotonic()
        self._told_s = 0.0
        self._folder: Path | None = None
        """Of the stall that lasts."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._closed = threading.Event()
        self._last_resort = run_dir / STACKS / "interpreter.txt"
        self._last_file: IO[str] | None = None

    # ---- the event loop's side --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch. Raises StorageError: the run's folder cannot be written."""
        try:
            self._last_resort.parent.mkdir(exist_ok=True)
            self._last_file = self._last_resort.open("w", encoding="utf-8")
        except OSError as e:
            raise StorageError(f"{self._last_resort}: cannot be written ({e}); free space and resume the run") from e
        self.moved()
        self._arm()
        self._thread.start()

    def moved(self) -> None:
        """Something has moved."""
        self._moved_s = self._beat_s = time.monotonic()

    def still(self, still_s: float) -> None:
        """The event loop runs; nothing has moved for `still_s`."""
        self._beat_s = time.monotonic()
        self._moved_s = self._beat_s - still_s

    async def attended(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`; meanwhile the thread is shown that the event loop runs."""
        self._loop = asyncio.get_running_loop()

        async def beat() -> None:
            while True:
                self._beat_s = time.monotonic()
                await asyncio.sleep(min(1.0, self._stall_after_s / 4.0))

        beating = asyncio.create_task(beat())
        try:
            await work
        finally:
            beating.cancel()
            self._loop = None

    def close(self) -> None:
        """The run has ended, and left everything behind."""
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        if self._thread.ident is not None:
            self._thread.join(1.0)
        if self._last_file is not None:
            self._last_file.close()
            self._last_resort.unlink(missing_ok=True)  # nothing stands in it, or the process would have ended
            with contextlib.suppress(OSError):  # stalls have left their folders there
                self._last_resort.parent.rmdir()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        tick_s = min(1.0, self._stall_after_s / 4.0)
        while not self._closed.wait(tick_s):
            self._arm()
            now_s = time.monotonic()
            still_s, silent_s = now_s - self._moved_s, now_s - self._beat_s
            blocked = self._loop is not None and silent_s > min(_BLOCKED_S, self._stall_after_s)
            if still_s < self._stall_after_s and not blocked:
                self._told_s, self._folder = 0.0, None
                continue
            if self._told_s == 0.0 or still_s - self._told_s >= self._stall_after_s:
                self._told_s = still_s
                self._report(still_s, silent_s if blocked else None)
            late_s = still_s - self._abort_after_s
            if late_s > (0.0 if blocked else self._leave_s):
                self._end(still_s, silent_s if blocked else None)

    def _report(self, still_s: float, silent_s: float | None) -> None:
        """Never raises: a report that cannot be made must not end the watch."""
        try:
            pools = self.pools()
            found: list[stacks.Process] = []
            silent: list[str] = []
            first = self._folder is None
            if first:
                found, silent = self._collect()
            text = report(self.headline(still_s), self.waits.now(), pools, found, silent_s=silent_s)
            self._say(text)
            if first:
                self._folder = self._write(text, found, silent)
                self._say(f"stacks of {len(found) + 1} processes: {self._folder}")
        except Exception as error:
            self._say(f"no progress for {still_s:.0f} s; no full report ({type(error).__name__}: {error})")

    def _write(self, text: str, found: Sequence[stacks.Process], silent: Sequence[str]) -> Path:
        folder = self._run_dir / STACKS / datetime.now().strftime("%Y%m%d-%H%M%S")
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(path for path in folder.parent.iterdir() if path.is_dir())[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        files = {"waits.txt": "\n".join([text, *silent]), "driver.txt": stacks.driver_stacks(self._loop)}
        files |= {f"{p.host}-{p.pid}.txt": p.text() for p in found}
        for name, content in files.items():
            (folder / name).write_text(scrub(content) + "\n", encoding="utf-8")
        return folder

    def _verdict(self, still_s: float) -> str:
        return (
            f"nothing moved for {still_s:.0f} s (scheduler.abort_after_s); see the waits above and "
            f"{self._folder or self._run_dir / STACKS}; the last checkpoint is intact, the same command with --resume "
            "goes on from it"
        )

    def _end(self, still_s: float, silent_s: float | None) -> None:
        """Files are written line by line and checkpoints in one piece, so nothing is lost that was not lost already.
        Processes of a Ray that this run started end with it (the kernel tells them); a cluster ends its job's."""
        why = "the event loop is blocked" if silent_s is not None else f"it did not end within {self._leave_s:g} s"
        message = f"{self._verdict(still_s)} ({why}: the process was ended)"
        try:
            self._ended(message)
        finally:
            with contextlib.suppress(OSError):
                self._last_resort.unlink()
            sys.stderr.write(f"gagar: {scrub(message)}\n")
            sys.stderr.flush()
            os._exit(EXIT_STALLED)

    def _arm(self) -> None:
        """The C runtime's own timer goes off only if this thread did not get to set it anew."""
        assert self._last_file is not None
        faulthandler.dump_traceback_later(self._abort_after_s + self._leave_s, exit=True, file=self._last_file)


def report(
    headline: str,
    waits: Sequence[Wait],
    pools: Sequence[PoolReport],
    processes: Sequence[stacks.Process],
    *,
    silent_s: float | None = None,
) -> str:
    """Who waits for whom, as lines. `silent_s`: since when the event loop has given no sign of life, where it is
    blocked."""
    now_s = time.monotonic()
    lines = [headline]
    if silent_s is not None:
        lines.append(f"  the event loop is blocked since {silent_s:.0f} s: see driver.txt for what holds it")
    lines += [
        f"  {wait.loop} waits for {wait.on} since {now_s - wait.since_s:.0f} s" + _in_brackets(_detail(wait))
        for wait in waits[:_SHOWN]
    ]
    if len(waits) > _SHOWN:
        lines.append(f"  and {len(waits) - _SHOWN} more, all shorter")
    by_actor = {process.actor_id: process for process in processes}
    for pool in pools:
        line = f"  pool {pool.name}: {pool.sizes}"
        if pool.actor:
            line += f"; its oldest call: {pool.method} on {pool.actor} since {pool.age_s:.0f} s"
            if (process := by_actor.get(pool.actor_id)) is not None:
                line += f", pid {process.pid} on {process.host}, {process.state}"
        lines.append(line)
    lines += [
        f"  {process.title} (pid {process.pid} on {process.host}) did not write its stacks: {process.state}"
        for process in processes
        if not process.stacks
    ]
    return "\n".join(lines)


def _detail(wait: Wait) -> str:
    try:
        return wait.detail()
    except Exception as error:  # figures that change under another thread
        return f"unknown: {type(error).__name__}"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
