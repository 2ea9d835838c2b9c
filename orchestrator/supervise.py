"""`supervision.driver_restarts`: a small process that starts the driver and watches it.

    supervisor --starts--> driver (gagar train ...) --a byte a second, through a pipe--> supervisor
        the driver died, or no byte came for silent_after_s: what is left of its processes is ended,
        and the next one goes on with --resume, from the last checkpoint

The supervisor imports neither Ray nor torch. It adopts whatever the driver leaves behind (PR_SET_CHILD_SUBREAPER), so
that a killed driver's engines and workers hold no memory that the next one needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from infra.errors import GagarError
from orchestrator.runfiles import STATUS

HEARTBEAT_FD = "GAGAR_HEARTBEAT_FD"
_BEAT_S = 1.0
_LEAVE_S = 15.0
"""What the processes of a driver that ended get to end by themselves."""
_PAUSE_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36
FINAL = (0, 2, 130)
"""Exit codes after which there is nothing to start again: finished, a bad configuration, stopped by hand."""


def beat() -> None:
    """In the driver: tell a supervisor, if there is one, that this process lives. A thread does it, so that a busy
    event loop is no dead driver: for that one there is the watchdog."""
    fd = os.environ.pop(HEARTBEAT_FD, None)  # it is no business of the processes that are started from here
    if fd is None:
        return
    os.set_inheritable(int(fd), False)

    def run() -> None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone
            while True:
                with contextlib.suppress(BlockingIOError):  # it is stopped, and has enough to read
                    os.write(int(fd), b".")
                time.sleep(_BEAT_S)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


def supervised() -> bool:
    """Whether this process is a driver that a supervisor has started."""
    return HEARTBEAT_FD in os.environ


def supervise(
    command: Sequence[str], run_dir: Path, *, restarts: int, silent_after_s: float, say: Callable[[str], None]
) -> int:
    """Run `command`, a `gagar train`, until it has finished; returns its exit code.

    A driver that fails, dies or hangs is started again with --resume, `restarts` times in a row without a new
    checkpoint between. SIGTERM and SIGINT are passed on, and end it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resume, in_a_row, checkpoint = "--resume" in command, 0, _status(run_dir).get("checkpoint")
    with _stops() as stop:
        while True:
            driver = stop.driver = _Driver([*command, *(["--resume"] if resume and "--resume" not in command else [])])
            if stop.number == signal.SIGTERM:  # it came while there was nobody to pass it on to
                driver.end()
            why = driver.wait(silent_after_s)
            left = _end_descendants(_LEAVE_S)
            code = driver.code
            if stop.number or code in FINAL:
                return code if code >= 0 else 128 - code
            status = _status(run_dir)
            if status.get("pid") == driver.pid:  # it got as far as its folder, else another run's may stand there
                resume = True
            in_a_row = in_a_row + 1 if status.get("checkpoint") == checkpoint else 1
            checkpoint = status.get("checkpoint")
            ended = f"; {left} of its processes were left and ended" if left else ""
            if in_a_row > restarts:
                say(f"the driver {why}{ended}; given up after {in_a_row} in a row without a new checkpoint between")
                return code if code > 0 else 1
            say(f"the driver {why}{ended}; it is started again from {checkpoint or 'the start'}")
            time.sleep(_PAUSE_S)
            if stop.number:
                return 128 + stop.number


class _Stop:
    """A signal that ends the supervisor and whatever driver it has at that moment."""

    number: int = 0
    driver: _Driver | None = None


@contextlib.contextmanager
def _stops() -> Iterator[_Stop]:
    """Meanwhile SIGTERM and SIGINT end no more than the driver; the supervisor follows it."""
    stop = _Stop()

    def pass_on(number: int, _: FrameType | None) -> None:
        stop.number = number
        if number == signal.SIGTERM and stop.driver is not None:  # a terminal's interrupt has reached it already
            stop.driver.end()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Driver:
    """One driver process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        try:
            env = {**os.environ, HEARTBEAT_FD: str(write)}
            self._process = subprocess.Popen(command, pass_fds=(write,), env=env)
        except OSError as e:
            raise GagarError(f"{command[0]} cannot be started ({e})") from e
        finally:
            os.close(write)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int:
        """Exit code; minus the signal that ended it."""
        return self._process.wait()

    def end(self) -> None:
        """Tell it to stop; one that has ended hears nothing."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, silent_after_s: float) -> str:
        """Until it has ended, or was killed because it hung; returns which."""
        silent_s, looked_s = 0.0, time.monotonic()
        try:
            while self._process.poll() is None:
                ready, _, _ = select.select([self._read], [], [], _BEAT_S)
                now_s = time.monotonic()
                # What is longer is time in which this process was stopped itself (Ctrl-Z), and the driver with it.
                silent_s += min(now_s - looked_s, 2 * _BEAT_S)
                looked_s = now_s
                if ready and os.read(self._read, 4096):
                    silent_s = 0.0
                elif ready:  # closed: it has ended, or closes its files
                    time.sleep(0.1)
                if silent_s > silent_after_s:
                    self._process.kill()
                    self._process.wait()
                    return f"gave no sign of life for {silent_after_s:g} s and was ended"
        finally:
            os.close(self._read)
        if self.code < 0:
            return f"was ended by {_signal_name(-self.code)}"
        return f"ended with exit code {self.code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has a number only
        return f"signal {number}"


def _end_descendants(leave_s: float) -> int:
    """Waits for whatever a driver has left behind, and ends the rest; returns how many that were."""
    import psutil

    deadline_s = time.monotonic() + leave_s
    while True:
        left = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
                elif process.ppid() == os.getpid():
                    os.waitpid(process.pid, os.WNOHANG)
        if not left or time.monotonic() > deadline_s:
            break
        time.sleep(0.2)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=leave_s)
    return len(left)


def _status(run_dir: Path) -> dict[str, Any]:
    try:
        status = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def command_of(
    config: Path, overrides: Sequence[str], arms: Sequence[Path], name: str | None, resume: bool
) -> list[str]:
    """The driver's command line."""
    words = [sys.executable, "-m", "orchestrator.cli", "train", str(config), *overrides]
    for arm in arms:
        words += ["--arm", str(arm)]
    return [*words, *(["--name", name] if name is not None else []), *(["--resume"] if resume else [])]
