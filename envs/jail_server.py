"""The program inside a jail: one SWE-ReX server that runs every command in a second jail of its own.

The server holds the token and must outlive whatever a command does, so no command may see or signal it: each gets its
own process space, network and view of the files, with workspace, /tmp and /dev/shm the only writable places: folders
of one file system in memory, of bounded size and number of files. A command that uses more memory than it may, all its
processes together, is killed. When a command ends, or is killed, the kernel ends that process space and with it
everything the command started.

Started by `envs.jail` as a plain file (nothing of ours can be imported in here), with the settings as one JSON line on
standard input and a listening socket as an inherited descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import shutil
import socket
import sys
import threading
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from pathlib import Path
from typing import Any

from swerex import server
from swerex.runtime.abstract import CloseResponse, Command, CommandResponse
from swerex.runtime.local import LocalRuntime

LEASES = Path("/lease")
HEAD_BYTES = 8 * 2**20
TAIL_BYTES = 64 * 2**10
CHUNK_BYTES = 64 * 2**10
LOOK_S = 0.1
"""How often the memory of a running command is added up; how long it can be over its limit."""
PASSWD = "user:x:1000:1000::/tmp:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n"
GROUP = "user:x:1000:\nnobody:x:65534:\n"


class JailRuntime(LocalRuntime):
    """SWE-ReX's runtime with `execute` jailed, killed as a whole on time-out, and bounded in output.

    A command that was killed for time answers with exit code None and the output so far.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self._bwrap: str = settings["bwrap"]
        self._view: list[str] = settings["view"]
        self._limits: str = settings["limits"]
        self._env: dict[str, str] = settings["env"]
        self._memory_bytes: int = settings["memory_bytes"]
        self._filter_fd = _in_memory(bytes.fromhex(settings["seccomp"])) if settings["seccomp"] else None
        self._lock = asyncio.Lock()
        self._serial = 0
        (LEASES / "passwd").write_text(PASSWD)
        (LEASES / "group").write_text(GROUP)
        self._open_lease()

    async def execute(self, command: Command) -> CommandResponse:
        """Run one command; `timeout` in seconds, None for no limit."""
        words = ["bash", "-c", command.command] if isinstance(command.command, str) else command.command
        async with self._lock:
            kept = () if self._filter_fd is None else (self._filter_fd,)
            for fd in kept:
                os.lseek(fd, 0, os.SEEK_SET)  # bubblewrap reads it to the end, each time
            process = await asyncio.create_subprocess_exec(
                *self._jail(), "bash", "-c", f'{self._limits}; exec "$0" "$@"', *words,
                stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, pass_fds=kept,
            )  # fmt: skip
            output = _Output()
            assert process.stdout is not None
            watch = asyncio.create_task(self._watch(process, output))
            try:
                async with asyncio.timeout(command.timeout):
                    # The end of the stream, not of the process: it comes when the whole process space is gone.
                    await output.drain(process.stdout)
                    code = await process.wait()
                    return CommandResponse(stdout=output.text(), exit_code=code if code >= 0 else 128 - code)
            except TimeoutError:
                process.kill()
                await output.drain(process.stdout)
                await process.wait()
                return CommandResponse(stdout=output.text(), exit_code=None)
            finally:
                watch.cancel()
                if process.returncode is None:
                    process.kill()

    async def _watch(self, process: asyncio.subprocess.Process, output: _Output) -> None:
        """Kill the command when it uses more memory than it may."""
        while True:
            await asyncio.sleep(LOOK_S)
            if used_bytes(self._memory_bytes) > self._memory_bytes:
                output.note = f"\n[killed: more than {self._memory_bytes >> 20} MiB of memory in all]\n"
                process.kill()
                return

    async def close(self) -> CloseResponse:
        """Forget the workspace: what runs next finds an empty one."""
        async with self._lock:
            await asyncio.to_thread(self._drop_lease)
            self._open_lease()
        return CloseResponse()

    def _jail(self) -> list[str]:
        env = [word for name, value in self._env.items() for word in ("--setenv", name, value)]
        seccomp = [] if self._filter_fd is None else ["--seccomp", str(self._filter_fd)]
        return [
            self._bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
            # The outer jail's /dev is its own, and read-only: quicker than making another one.
            *seccomp, "--proc", "/proc", "--dev-bind", "/dev", "/dev", "--bind", str(self._lease / "shm"), "/dev/shm",
            # Before the view: Python itself may be installed in /tmp.
            "--bind", str(self._lease / "tmp"), "/tmp", "--bind", str(self._lease / "workspace"), "/workspace",
            *self._view,
            "--ro-bind", str(LEASES / "passwd"), "/etc/passwd", "--ro-bind", str(LEASES / "group"), "/etc/group",
            "--remount-ro", "/", "--chdir", "/workspace", "--clearenv", *env, "--",
        ]  # fmt: skip

    def _open_lease(self) -> None:
        self._serial += 1
        self._lease = LEASES / str(self._serial)
        (self._lease / "workspace").mkdir(parents=True)
        (self._lease / "tmp").mkdir()
        (self._lease / "shm").mkdir()

    def _drop_lease(self) -> None:
        for folder, names, _ in os.walk(self._lease):
            os.chmod(folder, 0o700)
            for name in names:
                path = os.path.join(folder, name)
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(self._lease)


class _Output:
    """Head and tail of a stream, in bounded memory."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._cut_bytes = 0
        self.note = ""
        """What the server adds at the end."""

    async def drain(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(CHUNK_BYTES):
            room = max(HEAD_BYTES - len(self._head), 0)
            self._head += chunk[:room]
            self._tail += chunk[room:]
            if (surplus := len(self._tail) - TAIL_BYTES) > 0:
                del self._tail[:surplus]
                self._cut_bytes += surplus

    def text(self) -> str:
        cut = b"\n[%d bytes cut]\n" % self._cut_bytes if self._cut_bytes else b""
        return (bytes(self._head) + cut + bytes(self._tail)).decode(errors="backslashreplace") + self.note


def used_bytes(enough: int) -> int:
    """Memory of all processes of the running command, in bytes; not exact where it is certainly below `enough`.

    What they could use by their address spaces, if that is no more than `enough`. Else what is theirs alone, their
    share of what forks have in common, what is swapped out, and shared mappings in full, of which pages may be used
    that no process has mapped just now. Files in memory are bounded by their file system, and no part of this.
    """
    spaces: dict[str, int] = {}
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in (1, os.getpid()):
            with contextlib.suppress(OSError):
                spaces[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * PAGE_BYTES
    if sum(spaces.values()) <= enough:
        return sum(spaces.values())
    total = 0
    shared: dict[str, int] = {}
    for pid, space in spaces.items():
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            total += space if os.path.exists(f"/proc/{pid}") else 0
            continue
        total += sum(int(kib) * 1024 for kib in _OWN.findall(rollup))
        for start, end, inode in _SHARED.findall(maps):
            shared[inode] = max(shared.get(inode, 0), int(end, 16) - int(start, 16))
    return total + sum(shared.values())


PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OWN = re.compile(r"^(?:Pss_Anon|SwapPss): +(\d+) kB", re.MULTILINE)
_SHARED = re.compile(r"^(\w+)-(\w+) \S+ \w+ \S+ (\d+) +/dev/zero \(deleted\)", re.MULTILINE)


def mount_leases(size_bytes: int, max_files: int) -> None:
    """Mount the file system of the sandbox, and give up the right to. Raises OSError.

    bubblewrap bounds the size of one, but not how many files it takes. The mounts that it made belong to a user
    namespace above ours, so this one is made in a copy of them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size_bytes},nr_inodes={max_files},mode=0755".encode()
    place = os.fsencode(LEASES)
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.mount(b"lease", place, b"tmpfs", _MS_NOSUID_NODEV, options) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount {LEASES}")
    header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.prctl(_PR_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0) != 0 or libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "cannot give up capabilities")


_CLONE_NEWNS = 0x20000
_MS_NOSUID_NODEV = 2 | 4
_PR_CAP_AMBIENT, _CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522


def _in_memory(content: bytes) -> int:
    fd = os.memfd_create("seccomp")
    os.write(fd, content)
    return fd


def main() -> None:
    """Serve on the inherited socket until standard input ends, which it does when the parent dies."""
    import uvicorn

    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    mount_leases(settings["workspace_bytes"], settings["max_files"])
    server.AUTH_TOKEN = settings["token"]
    server.runtime = JailRuntime(settings)
    listener = socket.socket(fileno=settings["socket_fd"])
    config = uvicorn.Config(
        server.app, log_config=None, access_log=False, lifespan="off", ws="none", loop="asyncio",
        timeout_keep_alive=365 * 86400,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
