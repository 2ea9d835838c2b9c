"""Stands for what a service runs an image on: a real SWE-ReX server in a jail with a file system of its own.

The service's command line, environment and port are what the code under test gave; `swerex-remote` there is a script
that listens where the test can reach it, instead of on the port that a container would have to itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SWEREX_REMOTE = f"""#!/bin/bash
[ "$1 $2 $3" = "--port 8000 --auth-token" ] && [ -n "$4" ] && [ $# = 4 ] || {{ echo "bad arguments: $*"; exit 64; }}
exec {sys.executable} -c "from swerex.server import main; main()" \\
    --host "$REACHED_AT_HOST" --port "$REACHED_AT_PORT" --auth-token "$4"
"""


def host_mounts() -> list[str]:
    """bubblewrap's arguments for the host's files, read-only, without those that a sandbox has of its own."""
    words = []
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            words += ["--symlink", str(entry.readlink()), str(entry)]
        elif entry.name not in ("proc", "dev", "tmp", "workspace"):
            words += ["--ro-bind", str(entry), str(entry)]
    return words


def start(
    folder: Path,
    command: Sequence[str],
    environment: Mapping[str, str],
    address: tuple[str, int],
    bwrap: str,
    *,
    kept: bool = False,
) -> int:
    """Process group of a machine that runs the command with this environment alone.

    Args:
        folder: the machine's own on the host, for its log and programs.
        address: host and port where its server is to be reached.
        kept: whether the caller lives as long as the machine, and takes it along.
    """
    programs = folder / "server" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    (programs / "swerex-remote").write_text(SWEREX_REMOTE)
    (programs / "swerex-remote").chmod(0o755)
    inside = {"PATH": "/gagar-server/bin:/usr/bin:/bin", **environment}
    inside |= {"REACHED_AT_HOST": address[0], "REACHED_AT_PORT": str(address[1])}
    words = [word for name, value in inside.items() for word in ("--setenv", name, value)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [bwrap, *(["--die-with-parent"] if kept else []), *host_mounts(), "--unshare-pid", "--proc", "/proc",
             "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/workspace",
             "--ro-bind", str(folder / "server"), "/gagar-server", "--ro-bind", sys.prefix, sys.prefix, "--clearenv",
             *words, "--", *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return process.pid


def stop(group: int) -> None:
    """End a machine with everything in it: a signal is on its way for a moment."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(group, 0)
    deadline_s = time.monotonic() + 30.0
    while runs(group) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def runs(group: int) -> bool:
    """Whether anything of a machine still runs; what nobody has waited for yet does not."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, members = (entry / "stat").read_text().rpartition(") ")[2].split()[:3]
                if int(members) == group and state != "Z":
                    return True
    return False


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
