"""What this process may use of its host: a container's share, and the limits of its user."""

from __future__ import annotations

import os
import resource
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cores(root: Path = CGROUP) -> float:
    """Cores that this process may keep busy: those that it may run on, and a container's quota on them."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota, _, period = _read(root / "cpu.max").partition(" ")
    if not quota:  # version 1
        quota, period = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    if quota.isdecimal() and period.isdecimal() and int(period) > 0:
        return min(allowed, int(quota) / int(period))
    return allowed


def memory_left_bytes(root: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that this process may still take: what the host has available, and a container's limit less its use.
    Pages that hold files only count as free. 0 where nothing says."""
    available = _field(meminfo, "MemAvailable:") * 1024
    limit, used = _read(root / "memory.max"), _read(root / "memory.current")
    cached = _field(root / "memory.stat", "inactive_file")
    if not limit:  # version 1
        limit, used = _read(root / "memory/memory.limit_in_bytes"), _read(root / "memory/memory.usage_in_bytes")
        cached = _field(root / "memory/memory.stat", "total_inactive_file")
    if limit.isdecimal() and used.isdecimal():
        return max(0, min(available, int(limit) - int(used) + cached))
    return available


def open_files() -> int:
    """Files and sockets that one process may have open; -1: any number."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def processes() -> int:
    """Processes and threads that this user may have; -1: any number."""
    return resource.getrlimit(resource.RLIMIT_NPROC)[0]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _field(path: Path, name: str) -> int:
    """A number behind a name at the begin of a line; 0 where there is none."""
    for line in _read(path).splitlines():
        fields = line.split()
        if len(fields) > 1 and fields[0] == name and fields[1].isdecimal():
            return int(fields[1])
    return 0
