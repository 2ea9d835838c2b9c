"""A real `gagar train` in processes of its own, seen from outside: its processes by role, its console, what it leaves.

The harness makes itself the one to whom the kernel hands processes whose parent has died. So all that a run started
and that still lives is a descendant of the harness, however often it forked or moved to another session: nothing is
searched by name. The run gets a temporary folder of its own, so what it leaves there can be counted.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PR_SET_CHILD_SUBREAPER = 36

LINGERS = "ray node agent"
"""Two processes a node that look every 2 s whether their raylet is there, leave at the fifth time that it is not, and
before that try for a minute to tell the dead GCS."""

ROLES: Sequence[tuple[str, str]] = (
    (r"^\S*/gcs_server ", "gcs"),
    (r"^\S*/raylet/raylet ", "raylet"),  # its command line has those of its workers
    (r"bin/ray start ", "ray node"),
    (r"-m orchestrator\.cli", "driver"),
    (r"^ray::RolloutWorker", "rollout worker"),
    (r"^ray::GraderWorker", "grader worker"),
    (r"^ray::EngineActor", "engine"),
    (r"^ray::LearnerRank", "learner rank"),
    (r"^ray::(DashboardAgent|RuntimeEnvAgent)", LINGERS),
    (r"^ray::", "ray worker"),
    (r"default_worker\.py|setup_worker\.py", "ray worker"),
    (r"ray/_private|ray/dashboard|ray/autoscaler|ray-dashboard|-m ray\.util\.client", "ray agent"),
    (r"wandb-core|gpu_stats|wandb", "wandb"),
    (r"jail_server|bwrap", "jail server"),
)
"""What a command line says about a process; the first that matches. Of what runs in a jail nothing matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process at one moment."""

    pid: int
    start: int
    """When it started, in kernel ticks: with `pid` it names a process for ever."""
    parent: int
    state: str
    """R, S, D, T (stopped), Z (ended, not yet waited for)."""
    command: str
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """How a run's processes vanished."""

    took_s: float
    """Seconds until none was left but Ray's node agents."""
    last: list[str]
    """Roles of those that were there a second after the driver."""
    agents_s: float | None
    """Seconds until they had left too; None where nobody waited for them."""
    left: list[Process]
    """Those that had not vanished in time."""


_started: set[int] = set()


def adopt_orphans() -> None:
    """From now on orphaned descendants become children of this process.

    Raises:
        OSError: the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def descendants(root: int | None = None) -> list[Process]:
    """Living processes below `root` (this process), oldest first. Those that have ended are waited for."""
    root = os.getpid() if root is None else root
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError, IndexError):  # it ended while it was looked at
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                found[int(entry.name)] = Process(
                    pid=int(entry.name),
                    start=int(fields[19]),
                    parent=int(fields[1]),
                    state=fields[0],
                    command=command,
                    role=role(command),
                )
    children: dict[int, list[Process]] = {}
    for process in found.values():
        children.setdefault(process.parent, []).append(process)
    below: list[Process] = []
    todo = [root]
    while todo:
        for child in children.get(todo.pop(), []):
            below.append(child)
            todo.append(child.pid)
    for process in below:
        # Of those that this process started itself, subprocess wants to know how they ended.
        if process.state == "Z" and process.parent == os.getpid() and process.pid not in _started:
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
    living = [p for p in below if p.state != "Z"]
    return sorted(living, key=lambda p: (p.start, p.pid))


def role(command: str) -> str:
    """What a process is to a run, from its command line."""
    return next((name for pattern, name in ROLES if re.search(pattern, command)), "other")


def by_role(processes: Iterable[Process]) -> dict[str, int]:
    """How many there are of each role."""
    return dict(sorted(Counter(p.role for p in processes).items()))


def wait_for(condition: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> bool:
    """Whether the condition came true in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(every_s)
    return True


class Driven:
    """One session of a run. Its output goes to a file; the harness owns all its processes."""

    def __init__(self, command: Sequence[str], *, console: Path, environment: Mapping[str, str] | None = None) -> None:
        """Starts `command` in a session and process group of its own, with a temporary folder of its own."""
        # Unix sockets have names of at most 107 bytes, and Ray makes long ones below this folder.
        self.temp = Path(tempfile.mkdtemp(prefix="gd-", dir="/tmp"))
        self.console = console
        self.shm_before = set(os.listdir(SHM))
        console.parent.mkdir(parents=True, exist_ok=True)
        self._out: IO[bytes] = console.open("ab")
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._out,
            start_new_session=True,
            env={**os.environ, **(environment or {}), "TMPDIR": str(self.temp), "PYTHONUNBUFFERED": "1"},
        )

        _started.add(self.process.pid)

    @property
    def age_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_s

    @property
    def ended(self) -> bool:
        """Whether the driver has ended by itself or by a signal."""
        return self.process.poll() is not None

    def text(self) -> str:
        """What it has printed."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def signal(self, number: int) -> None:
        """To the driver alone; nothing once it has ended, when its number may be another's."""
        self.process.send_signal(number)

    def gone(self, timeout_s: float, agents_s: float = 0.0, keep: Collection[str] = ()) -> Gone:
        """Waits for the driver and for all that it started. Ray's node agents get `agents_s` more; roles in `keep` are
        not the run's.

        What is there after that is killed: it would disturb what comes next.
        """
        begin_s = time.monotonic()

        def living() -> list[Process]:
            self.process.poll()
            return [p for p in descendants() if p.role != LINGERS and p.role not in keep]

        last: list[str] = []
        if not wait_for(lambda: not living(), min(timeout_s, 1.0)):
            last = sorted({p.role for p in living()})
            wait_for(lambda: not living(), timeout_s - 1.0)
        left = living()
        took_s = time.monotonic() - begin_s
        agents = None
        if agents_s and not left:
            wait_for(lambda: not descendants(), agents_s)
            left = descendants()
            agents = time.monotonic() - begin_s
        end_all(left if keep else descendants())
        self._out.close()
        return Gone(took_s=took_s, last=last, agents_s=agents, left=left)

    def leftovers(self) -> dict[str, int]:
        """What it left outside its folder, by kind; only after `gone`. `shm`: segments that no process has open."""
        kinds = Counter(kind(path.name) for path in self.temp.iterdir())
        sessions = [p for p in (self.temp / "ray").glob("session_*") if not p.is_symlink()]
        kinds.pop("ray", None)
        size = sum(p.lstat().st_size for p in (self.temp / "ray").rglob("*") if p.is_file() and not p.is_symlink())
        new = [name for name in os.listdir(SHM) if name not in self.shm_before]
        shm = sum(not _is_open(SHM / name) for name in new)
        return {"ray_sessions": len(sessions), "ray_bytes": size, "shm": shm, **dict(sorted(kinds.items()))}

    def clean(self) -> None:
        """Removes its temporary folder."""
        shutil.rmtree(self.temp, ignore_errors=True)


def end_all(processes: Iterable[Process]) -> None:
    """Kills these very processes, and waits until none of them is there."""
    those = {(p.pid, p.start) for p in processes}
    for pid, _ in those:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not those & {(p.pid, p.start) for p in descendants()}, 10.0)


def kind(name: str) -> str:
    """`gagar-jail-ucga5h2d` -> `gagar-jail`, `vllm_dist_0027...` -> `vllm_dist`."""
    name = re.sub(r"^tmp[a-z0-9_]{8}", "tmp", name)
    return re.sub(r"[-_.]?[A-Za-z0-9]*[0-9][A-Za-z0-9_]*$|[-_][a-z0-9_]{8}$", "", name) or name


def _is_open(path: Path) -> bool:
    """Whether some process has the file open or mapped."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if str(path) in (entry / "maps").read_text(errors="replace"):
                    return True
                if any(os.readlink(fd) == str(path) for fd in (entry / "fd").iterdir()):
                    return True
    return False


def lines(path: Path) -> int:
    """Whole lines of a file; 0 if there is none."""
    with suppress(OSError):
        return path.read_bytes().count(b"\n")
    return 0


def train(config: Path, *overrides: str, resume: bool = False) -> list[str]:
    """The command line of `gagar train`."""
    command = [sys.executable, "-m", "orchestrator.cli", "train", str(config), *overrides]
    return [*command, "--resume"] if resume else command
