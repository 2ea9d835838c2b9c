"""The parts of a real run that can be hit, how they are found from outside, how they are hit, and when."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import driven
from tests.bench.cluster import Node, Wire
from tests.bench.driven import Driven, Process

SLOW_S = 20.0
"""How long a part, or a wire, is slowed down."""
STOPPED_S, RUNNING_S = 0.8, 0.2
"""One cycle of slowing down: a fifth of the time is left."""
BLIP_S = 8.0
"""How long a wire is cut that is then mended."""
SLOW_WIRE = "256kbit"

PARTS: Mapping[str, Sequence[str]] = {
    "rollout": ("rolling", "learning", "publishing"),
    "policy-engine": ("rolling", "learning", "publishing"),
    "grader": ("grading", "publishing"),
    "grader-engine": ("grading",),
    "learner": ("learning", "publishing", "checkpointing", "rolling"),
    "wandb": ("rolling",),
    "node": ("rolling", "learning"),
    "link": ("rolling", "learning"),
    "driver": ("rolling", "grading", "learning", "publishing", "checkpointing"),
}
"""Part -> the phases in which it is hit."""
FAULTS = ("killed", "hung", "slow")
LINK_FAULTS = ("cut", "blip", "slow")
ON_CLUSTER = ("node", "link")
"""Parts that need a cluster."""
ROLE = {"rollout": "rollout worker", "grader": "grader worker", "learner": "learner rank", "wandb": "wandb"}


class Engines:
    """Tells the policy's engines from the grader's, which look alike: before the first group is complete only the
    policy's work. One that starts later takes the place of the one that is gone."""

    def __init__(self) -> None:
        self._place: dict[int, str] = {}

    def learn(self, run_dir: Path, run: Driven, timeout_s: float) -> bool:
        """Whether both were told apart, within the time, while rollouts run and nothing is graded."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s and not run.ended:
            engines = [p for p in driven.descendants() if p.role == "engine"]
            before = {p.pid: _cpu_s(p) for p in engines}
            quiet = _busy(run_dir, "rollout") > 0 and _busy(run_dir, "grader") == 0
            time.sleep(0.7)
            if quiet and len(engines) == 2 and _busy(run_dir, "grader") == 0:
                first, second = sorted(engines, key=lambda p: _cpu_s(p) - before[p.pid], reverse=True)
                if _cpu_s(first) - before[first.pid] > 0.1 + 5.0 * (_cpu_s(second) - before[second.pid]):
                    self._place = {first.pid: "policy-engine", second.pid: "grader-engine"}
                    return True
        return False

    def find(self, part: str, processes: Sequence[Process]) -> list[Process]:
        """The living engines of a part."""
        engines = [p for p in processes if p.role == "engine"]
        gone = [place for pid, place in self._place.items() if pid not in {p.pid for p in engines}]
        self._place = {p.pid: self._place[p.pid] for p in engines if p.pid in self._place}
        for process in engines:
            if process.pid not in self._place and gone:
                self._place[process.pid] = gone.pop()
        for place in gone:  # not there yet; the next one that starts is it
            self._place[-len(self._place) - 1] = place
        return [p for p in engines if self._place.get(p.pid) == part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A fault that was done."""

    pids: tuple[int, ...]
    at_s: float
    """On time.monotonic, which is the clock of the run's spans too."""


def faults_of(part: str) -> Sequence[str]:
    """What can be done to it."""
    return LINK_FAULTS if part == "link" else FAULTS


def victims(part: str, run: Driven, run_dir: Path, engines: Engines, node: Node | None) -> list[Process]:
    """The processes of a part, now. `node`: the one on which the rollouts live; its raylet comes first."""
    processes = driven.descendants()
    if part in ("policy-engine", "grader-engine"):
        return engines.find(part, processes)
    if part == "driver":
        pid = _status(run_dir).get("pid", run.process.pid)
        return [p for p in processes if p.pid == pid]
    if node is not None:
        return sorted(node.processes(), key=lambda p: p.role != "raylet")
    found = [p for p in processes if p.role == ROLE[part]]
    return [p for p in found if "wandb-core" in p.command] if part == "wandb" else found[:1]


def hit(fault: str, part: str, processes: Sequence[Process], wire: Wire | None = None) -> Hit:
    """Do it. Of a node, only the raylet is killed: the rest must go by itself. `wire`: of a link."""
    chosen = processes[:1] if fault == "killed" else processes
    pids = tuple(p.pid for p in chosen)
    at_s = time.monotonic()
    if part == "link" and wire is not None:
        pids = ()
        if fault == "slow":
            wire.slow(SLOW_WIRE)
            threading.Timer(SLOW_S, wire.fast).start()
        else:
            wire.cut()
            if fault == "blip":
                threading.Timer(BLIP_S, wire.mend).start()
    elif fault == "slow":
        threading.Thread(target=_slow, args=(pids,), daemon=True).start()
    else:
        _signal(pids, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    return Hit(pids=pids, at_s=at_s)


def still_stopped(pids: Sequence[int]) -> list[int]:
    """Those that are there and stopped."""
    return [p.pid for p in driven.descendants() if p.pid in pids and p.state == "T"]


def release(pids: Sequence[int]) -> None:
    """Let stopped ones go on."""
    _signal(pids, signal.SIGCONT)


def _slow(pids: Sequence[int]) -> None:
    end_s = time.monotonic() + SLOW_S
    try:
        while time.monotonic() < end_s:
            _signal(pids, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            _signal(pids, signal.SIGCONT)
            time.sleep(RUNNING_S)
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


class Watch:
    """Sees the phase of a run within milliseconds of its begin, from the files that the driver writes."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._spans = Tail(run_dir / "spans.jsonl")
        self._ended: list[str] = []

    def until(self, phase: str, run: Driven, timeout_s: float) -> bool:
        """Whether the phase began in time; returns at once when it does."""
        end_s = time.monotonic() + timeout_s
        self._spans.rows()
        parts = set(self._parts())
        while time.monotonic() < end_s and not run.ended:
            ended = [row.get("name") for row in self._spans.rows()]
            if phase == "publishing" and "learn" in ended:
                return True
            if phase == "checkpointing" and set(self._parts()) - parts:
                return True
            parts &= set(self._parts())
            if phase == "learning" and _status(self._run_dir).get("snapshot", {}).get("activity") == "learning":
                return True
            if phase == "rolling" and _busy(self._run_dir, "rollout") >= 4:
                return True
            if phase == "grading" and _busy(self._run_dir, "grader") >= 1:
                return True
            time.sleep(0.005)
        return False

    def _parts(self) -> list[Path]:
        return list((self._run_dir / "checkpoints").glob(".step-*.part"))


class Tail:
    """The lines that a log gets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def rows(self) -> list[dict[str, Any]]:
        """Whole lines since the last call. A log that was cut is read on from its new end."""
        with suppress(OSError):
            if self._path.stat().st_size < self._at:
                self._at = self._path.stat().st_size
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._at += len(data)
            rows = []
            for line in data.splitlines():
                with suppress(ValueError):
                    rows.append(json.loads(line))
            return rows
        return []


def _status(run_dir: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        status = json.loads((run_dir / "status.json").read_text())
        return status if isinstance(status, dict) else {}
    return {}


def _busy(run_dir: Path, pool: str) -> int:
    """Calls that a pool works on."""
    return int(_status(run_dir).get("snapshot", {}).get("pools", {}).get(pool, {}).get("busy", 0))


def _cpu_s(process: Process) -> float:
    with suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{process.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


_EVENT = re.compile(r"^\[(\d+:)?\d+:\d\d\] ")
NOTICED = re.compile(
    r"lost|replaced|drains|hang|not answer|does not|died|started again|starts again|serves again|ALARM|no progress|"
    r"nothing moved|Weights & Biases|resum",
    re.IGNORECASE,
)


def noticed(line: str) -> bool:
    """Whether a line of the console says that something is wrong, and is no line of progress or of a step."""
    text = _EVENT.sub("", line)
    event = text != line or line.startswith("gagar")  # else it is Ray's
    return event and NOTICED.search(text) is not None and not text.startswith("step ")
