"""`gagar doctor`: whether this host can run a configuration. Each finding says what to do about it.

The look at sandboxes is `orchestrator.probe`, since this package knows nothing of them; other machines are looked at by
`infra.reach`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from configs.schema import EngineConfig, RunConfig, VllmGraderBackend, WandbConfig
from infra import allowance
from infra.findings import Finding, Level
from infra.lock import check, read_lock
from infra.reach import reachable
from infra.scrub import key_variables
from infra.wandb_sink import wandb_mode

GIB = 1024**3
CHECKPOINT_BYTES = 17
"""A parameter in a checkpoint: the policy, and the learner's master weights and two moments, all at most 4 bytes; and
what the formats add."""
ROLLOUT_BYTES = 13
"""A token of a finished rollout (rollout/spool.py)."""
LOCKS = Path(__file__).resolve().parent.parent / "requirements"


def diagnose(config: RunConfig | None) -> list[Finding]:
    """Look at everything a run needs on this host; with a configuration, judge by what it asks for."""
    checks: tuple[Callable[[RunConfig | None], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _cores,
        _memory,
        _shared_memory,
        _limits,
        _host,
        _disk,
        _git,
        _gpus,
        _secrets,
        _wandb,
        reachable,
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
    cores, wanted = allowance.cores(), 2
    if cores >= wanted:
        yield Finding(name="cores", level=Level.OK, detail=f"{cores:g}")
    else:
        yield Finding(
            name="cores",
            level=Level.WARN,
            detail=f"{cores:g}",
            remedy=f"give it {wanted} cores or more (docker run --cpus), or expect a long start",
        )


def _memory(config: RunConfig | None) -> Iterator[Finding]:
    available = allowance.memory_left_bytes()
    wanted = 8 * GIB + int(sum(e.kv_cache_gib for e in _engines(config) if e.device == "cpu") * GIB)
    detail = f"{available / GIB:.1f} GiB available"
    if available >= wanted:
        yield Finding(name="memory", level=Level.OK, detail=detail)
    else:
        yield Finding(
            name="memory",
            level=Level.WARN,
            detail=f"{detail}, about {wanted / GIB:.0f} GiB wanted on one host",
            remedy="close other programs, raise the container's limit, or lower engine.kv_cache_gib, replicas and "
            "rollout.slots_per_worker",
        )


def _limits(config: RunConfig | None) -> Iterator[Finding]:
    """Ray opens a few hundred files and threads a process; every sandbox is a few processes more."""
    slots = config.rollout.workers * config.rollout.slots_per_worker if config is not None else 16
    for name, found, wanted, option in (
        ("open files", allowance.open_files(), 4096 + 8 * slots, "-n"),
        ("processes", allowance.processes(), 4096 + 32 * slots, "-u"),
    ):
        if found == -1 or found >= wanted:
            yield Finding(name=name, level=Level.OK, detail="no limit" if found == -1 else f"{found:,} allowed")
        else:
            yield Finding(
                name=name,
                level=Level.WARN,
                detail=f"{found:,} allowed, {wanted:,} wanted",
                remedy=f"ulimit {option} {wanted}, or raise it in limits.conf or by docker run --ulimit",
            )


def _host(config: RunConfig | None) -> Iterator[Finding]:
    """Ranks and nodes find each other by the host's name."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        yield Finding(
            name="host name",
            level=Level.WARN,
            detail=f"{name} does not resolve ({error})",
            remedy=f"add {name} to /etc/hosts",
        )
        return
    clustered = config is not None and config.ray.address is not None
    if clustered and str(address).startswith("127."):
        yield Finding(
            name="host name",
            level=Level.WARN,
            detail=f"{name} resolves to {address}, which other nodes cannot reach",
            remedy=f"give {name} its network address in /etc/hosts",
        )
    else:
        yield Finding(name="host name", level=Level.OK, detail=f"{name} resolves to {address}")


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
        return
    wanted = GIB + (_kept_bytes(config) if config is not None else GIB)
    detail = f"{free / GIB:.1f} GiB free at {folder}, a run keeps up to about {wanted / GIB:.1f} GiB"
    if free < wanted:
        yield Finding(
            name="disk",
            level=Level.WARN,
            detail=detail,
            remedy="free some space, choose another output=FOLDER, or lower checkpoint.keep",
        )
    else:
        yield Finding(name="disk", level=Level.OK, detail=detail)


def _kept_bytes(config: RunConfig) -> int:
    """Checkpoints, the one being written included, and the rollouts that none covers yet, at full length."""
    parameters = _parameters(Path(config.learner.model))
    checkpoints = (config.checkpoint.keep + 1) * parameters * CHECKPOINT_BYTES
    if not config.checkpoint.rollouts:
        return checkpoints
    groups = config.checkpoint.every_steps * sum(source.groups_per_step for source in config.sources.values())
    groups += config.scheduler.max_inflight_groups
    tokens = groups * config.algorithm.group_size * config.rollout.limits.max_total_tokens
    return checkpoints + tokens * ROLLOUT_BYTES


def _parameters(model: Path) -> int:
    """Of a checkpoint folder; 0 where it is none on this host."""
    try:
        values = json.loads((model / "config.json").read_text(encoding="utf-8"))
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    except (OSError, ValueError):
        return 0
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    return size // (4 if name.endswith("32") else 2)


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
    for variable in key_variables(config):
        if os.environ.get(variable):
            yield Finding(name="key", level=Level.OK, detail=f"{variable} is set")
        else:
            yield Finding(
                name="key", level=Level.WARN, detail=f"{variable} is not set", remedy=f"export {variable}=... first"
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
