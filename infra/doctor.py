"""`gagar doctor`: whether this host can run a configuration. Each finding says what to do about it.

The look at sandboxes is `orchestrator.probe`, since this package knows nothing of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from configs.schema import (
    EndpointGraderBackend,
    EngineConfig,
    RemoteSandbox,
    RunConfig,
    VllmGraderBackend,
    WandbConfig,
)
from infra.lock import check, read_lock
from infra.sinks import wandb_mode

GIB = 1024**3
LOCKS = Path(__file__).resolve().parent.parent / "requirements"


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    detail: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def diagnose(config: RunConfig | None) -> list[Finding]:
    """Look at everything a run needs on this host; with a configuration, judge by what it asks for."""
    checks: tuple[Callable[[RunConfig | None], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _cores,
        _memory,
        _shared_memory,
        _disk,
        _git,
        _gpus,
        _secrets,
        _wandb,
    )
    return [finding for look in checks for finding in look(config)]


def _python(_: RunConfig | None) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == (3, 11):
        yield Finding(name="python", level=Level.OK, detail=version)
    else:
        yield Finding(
            name="python", level=Level.FAIL, detail=version, remedy="install Python 3.11 and run make clean-venv train"
        )


def _packages(config: RunConfig | None) -> Iterator[Finding]:
    device = config.engine.device if config is not None else "cpu"
    lock = LOCKS / ("gpu.txt" if device == "cuda" else "cpu.txt")
    if not lock.is_file():
        yield Finding(
            name="packages", level=Level.OK, detail="no lock beside the installed package: nothing to compare"
        )
        return
    problems = check(read_lock(lock))
    if not problems:
        yield Finding(name="packages", level=Level.OK, detail=f"as in requirements/{lock.name}")
        return
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    yield Finding(
        name="packages",
        level=Level.WARN,
        detail="; ".join(map(str, problems[:3])) + more,
        remedy="make setup" if lock.name == "cpu.txt" else "pip install -r requirements/gpu.txt",
    )


def _cores(_: RunConfig | None) -> Iterator[Finding]:
    cores, wanted = len(os.sched_getaffinity(0)), 2
    if cores >= wanted:
        yield Finding(name="cores", level=Level.OK, detail=str(cores))
    else:
        yield Finding(
            name="cores",
            level=Level.WARN,
            detail=str(cores),
            remedy=f"use a machine with {wanted} cores or more, or expect a long start",
        )


def _memory(config: RunConfig | None) -> Iterator[Finding]:
    available = _meminfo("MemAvailable")
    wanted = 8 * GIB + int(sum(e.kv_cache_gib for e in _engines(config) if e.device == "cpu") * GIB)
    detail = f"{available / GIB:.1f} GiB available"
    if available >= wanted:
        yield Finding(name="memory", level=Level.OK, detail=detail)
    else:
        yield Finding(
            name="memory",
            level=Level.WARN,
            detail=f"{detail}, about {wanted / GIB:.0f} GiB wanted on one host",
            remedy="close other programs, or lower engine.kv_cache_gib, replicas and rollout.slots_per_worker",
        )


def _shared_memory(config: RunConfig | None) -> Iterator[Finding]:
    if config is not None and config.ray.address is not None:
        return
    wanted = (config.ray.object_store_mib if config is not None else None) or 512
    try:
        free = shutil.disk_usage("/dev/shm").free / 2**20
    except OSError as error:
        yield Finding(
            name="/dev/shm", level=Level.WARN, detail=str(error), remedy="mount a tmpfs there; Ray is slow without it"
        )
        return
    if free >= wanted:
        yield Finding(name="/dev/shm", level=Level.OK, detail=f"{free:,.0f} MiB free")
    else:
        yield Finding(
            name="/dev/shm",
            level=Level.WARN,
            detail=f"{free:,.0f} MiB free, the object store takes {wanted:,} MiB",
            remedy=f"docker run --shm-size={wanted + 64}m, or lower ray.object_store_mib",
        )


def _disk(config: RunConfig | None) -> Iterator[Finding]:
    folder = Path(config.output if config is not None else ".").absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        yield Finding(
            name="disk", level=Level.FAIL, detail=f"{folder} is not writable", remedy="choose another output=FOLDER"
        )
    elif free < 2 * GIB:
        yield Finding(
            name="disk",
            level=Level.WARN,
            detail=f"{free / GIB:.1f} GiB free at {folder}",
            remedy="free some space, or choose another output=FOLDER",
        )
    else:
        yield Finding(name="disk", level=Level.OK, detail=f"{free / GIB:.0f} GiB free at {folder}")


def _git(_: RunConfig | None) -> Iterator[Finding]:
    """Code tasks are git repositories; patches come from git diff inside the sandbox."""
    git = shutil.which("git")
    if git is None:
        yield Finding(name="git", level=Level.FAIL, detail="not found", remedy="apt-get install git")
        return
    done = subprocess.run([git, "--version"], capture_output=True, text=True, timeout=20, check=False)
    yield Finding(name="git", level=Level.OK, detail=f"{done.stdout.strip()} ({git})")


def _gpus(config: RunConfig | None) -> Iterator[Finding]:
    if config is None or (config.learner.device == "cpu" and all(e.device == "cpu" for e in _engines(config))):
        yield Finding(name="gpu", level=Level.OK, detail="none asked for")
        return
    smi = shutil.which("nvidia-smi")
    found = []
    if smi is not None:
        query = [smi, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
        found = [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
    if found:
        yield Finding(name="gpu", level=Level.OK, detail=f"{len(found)} on this host: {found[0]}")
    else:
        yield Finding(
            name="gpu",
            level=Level.FAIL if config.ray.address is None else Level.WARN,
            detail="none visible on this host",
            remedy="check nvidia-smi and the driver; on a cluster run `gagar doctor` on a GPU node",
        )


def _secrets(config: RunConfig | None) -> Iterator[Finding]:
    """Only whether the variables exist; their values are never read into a message."""
    if config is None:
        return
    names = []
    if config.grader is not None and isinstance(config.grader.backend, EndpointGraderBackend):
        names.append(("grader key", config.grader.backend.api_key_env))
    if isinstance(config.rollout.sandbox, RemoteSandbox):
        names.append(("sandbox token", config.rollout.sandbox.token_env))
    for what, variable in names:
        if os.environ.get(variable):
            yield Finding(name=what, level=Level.OK, detail=f"{variable} is set")
        else:
            yield Finding(
                name=what, level=Level.WARN, detail=f"{variable} is not set", remedy=f"export {variable}=... first"
            )


def _wandb(config: RunConfig | None) -> Iterator[Finding]:
    wanted = config.telemetry.wandb if config is not None else WandbConfig()
    mode = wandb_mode(wanted, environ=os.environ, home=Path.home())
    if mode == "offline":
        yield Finding(
            name="wandb",
            level=Level.OK,
            detail="offline: runs are kept in the run folder",
            remedy="wandb login, or WANDB_API_KEY, to see runs online",
        )
    else:
        yield Finding(name="wandb", level=Level.OK, detail=mode)


def _engines(config: RunConfig | None) -> list[EngineConfig]:
    if config is None:
        return []
    engines = [config.engine] * config.engine.replicas
    if config.grader is not None and isinstance(config.grader.backend, VllmGraderBackend):
        engines += [config.grader.backend.engine] * config.grader.backend.engine.replicas
    return engines


def _meminfo(field: str) -> int:
    """A line of /proc/meminfo, in bytes; 0 where there is none."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return 0
    return 0
