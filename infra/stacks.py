"""What every process of a run is doing: stacks, written where a person who meets a hang can read them.

Each process of a run announces itself on its node (`register`) and then answers a signal with the stacks of all its
threads, even while it holds the interpreter's lock. One that does not answer, because it is stopped or deep in the
kernel, is described from /proc. `collect` asks all processes of one node; `collect_all` asks all nodes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import os
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SIGNAL = signal.SIGUSR2
ANSWER_S = 3.0
"""How long a process gets to write its stacks."""
NODE_S = 20.0
"""How long a node gets to answer for its processes."""
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in the kernel, not to be interrupted"}

_held: list[io.TextIOWrapper] = []
"""The file that the signal writes into stays open as long as the process lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of the run, as it was found."""

    actor_id: str
    """Ray's, in hexadecimal; "" for one that is no actor."""
    pid: int
    node: str
    """Ray's id of its node, in hexadecimal."""
    host: str
    title: str
    """Its command line: Ray writes the actor's class and method there."""
    state: str
    """Of /proc: "S (sleeping)", "T (stopped by a signal)"."""
    waits_in: str
    """The kernel function that it sleeps in, where the kernel tells."""
    stacks: str
    """Of all threads; "" if it did not answer."""

    def text(self) -> str:
        """As it stands in its file."""
        head = (
            f"{self.title}\npid {self.pid} on {self.host} (node {self.node}), actor {self.actor_id or '-'}\n"
            f"state {self.state}, kernel function {self.waits_in or 'unknown'}\n\n"
        )
        silent = f"It did not write its stacks within {ANSWER_S:g} s: it is stopped, or stuck in the kernel.\n"
        return head + (self.stacks or silent)


# ---- in every process of a run ---------------------------------------------------------------------------------------


def register() -> bool:
    """Announce this Ray actor to whoever collects stacks on its node; returns whether this process is an actor's. Never
    fails: a node without a writable temporary folder has no stacks, but runs."""
    import ray

    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    if actor is None:
        return False
    if _held:
        return True
    try:
        folder = _folder(context.get_node_id(), make=True)
        path = folder / f"{context.get_job_id()}-{actor}-{os.getpid()}-{_started(os.getpid())}"
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        print(f"no stacks of this process: {error}", file=sys.stderr)
        return True
    _held.append(file)
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    return True


# ---- on a node -------------------------------------------------------------------------------------------------------


def collect(node: str, job: str) -> list[Process]:
    """Stacks of every process of the job that registered on this node and lives. Runs on that node."""
    asked: list[tuple[Path, str, int, int]] = []
    for path in _registered(node):
        job_id, actor, pid_text, started = path.name.split("-")
        pid = int(pid_text)
        if _started(pid) != started:  # it ended; another process may have its number now, and must not get the signal
            path.unlink(missing_ok=True)
            continue
        if job_id == job:
            size = path.stat().st_size
            os.kill(pid, SIGNAL)
            asked.append((path, actor, pid, size))
    deadline_s = time.monotonic() + ANSWER_S
    return [
        Process(
            actor_id=actor,
            pid=pid,
            node=node,
            host=os.uname().nodename,
            title=_title(pid),
            state=_state(pid),
            waits_in=_read(pid, "wchan").strip("0\n"),
            stacks=_answer(path, size, deadline_s),
        )
        for path, actor, pid, size in asked
    ]


def _answer(path: Path, size: int, deadline_s: float) -> str:
    """What was written behind `size`, once it has not grown for a moment."""
    last = size
    while True:
        now = path.stat().st_size
        if (now == last and now > size) or time.monotonic() > deadline_s:
            break
        last = now
        time.sleep(0.05)
    with path.open("rb") as file:
        file.seek(size)
        return file.read().decode(errors="replace")


def _folder(node: str, *, make: bool = False) -> Path:
    """Of this user alone: whoever could write there could have signals sent."""
    root = Path(tempfile.gettempdir()) / f"gagar-stacks-{os.getuid()}"
    folder = root / node
    if make:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (root, folder):
        about = place.lstat()
        if about.st_uid != os.getuid() or not stat.S_ISDIR(about.st_mode):
            raise OSError(f"{place} belongs to somebody else; remove it, or set TMPDIR")
    return folder


def _registered(node: str) -> list[Path]:
    try:
        return sorted(path for path in _folder(node).iterdir() if path.name.count("-") == 3)
    except OSError:
        return []


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in kernel ticks; "" if it is gone."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return "" if not fields or fields[0] == "Z" else fields[19]


def _state(pid: int) -> str:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    if not fields:
        return "gone"
    return f"{fields[0]} ({_STATES.get(fields[0], 'running' if fields[0] == 'R' else 'sleeping')})"


def _title(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ").strip() or _read(pid, "comm").strip()


# ---- on all nodes ----------------------------------------------------------------------------------------------------


def collect_all() -> tuple[list[Process], list[str]]:
    """Every registered process of the driver's job, and a line for each node that did not answer. Runs in the driver,
    in any thread; its own node is asked without Ray, which may itself be what hangs."""
    import ray

    if not ray.is_initialized():
        return [], []
    context = ray.get_runtime_context()
    here, job = context.get_node_id(), context.get_job_id()
    found, silent = collect(here, job), []
    asked = {}
    for node in (n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here):
        place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(collect)
        asked[task.remote(node, job)] = node
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_S) if asked else ([], [])
    for ref in done:
        try:
            found += ray.get(ref)
        except ray.exceptions.RayError as error:
            silent.append(f"node {asked[ref]}: {type(error).__name__}")
    silent += [f"node {asked[ref]}: no answer within {NODE_S:g} s" for ref in late]
    return found, silent


def driver_stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Stacks of all threads of this process, and where every task of `loop` waits; equal ones once, with their number.
    Can be called from any thread."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = file.read()
    if loop is None:
        return threads
    tasks = Counter(_task_stack(task) for task in _tasks(loop))
    parts = [f"{count} x task\n{where}" for where, count in tasks.most_common()]
    return threads + "\nTasks of the event loop\n\n" + "\n".join(parts)


def _tasks(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    try:
        return list(asyncio.all_tasks(loop))
    except RuntimeError:  # the set kept changing under another thread
        return []


def _task_stack(task: asyncio.Task[Any]) -> str:
    """`Task.print_stack` shows the outermost coroutine of a task that waits; the innermost is the one that matters."""
    lines = []
    for code, line in _awaits(task.get_coro()):
        lines.append(f'  File "{code.co_filename}", line {line} in {code.co_qualname}\n')
    return "".join(lines) or "  (no frame)\n"


def _awaits(coroutine: Any) -> Iterator[tuple[CodeType, int]]:
    """Down the chain of what awaits what."""
    while coroutine is not None:
        frame: FrameType | None = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is None:
            return
        yield frame.f_code, frame.f_lineno
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
