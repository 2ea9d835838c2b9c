"""The program inside a jail: one SWE-ReX server that runs every command in a second jail of its own.

The server holds the token and must outlive whatever a command does, so no command may see or signal it: each gets its
own process space, network and view of the files, with workspace and /tmp the only writable places. When a command
ends, or is killed for time, the kernel ends that process space and with it everything the command started.

Started by `envs.jail` as a plain file (nothing of ours can be imported in here), with the settings as one JSON line on
standard input and a listening socket as an inherited descriptor.
"""

from __future__ import annotations

import asyncio
import json
import os
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
        self._lock = asyncio.Lock()
        self._serial = 0
        (LEASES / "passwd").write_text(PASSWD)
        (LEASES / "group").write_text(GROUP)
        self._open_lease()

    async def execute(self, command: Command) -> CommandResponse:
        """Run one command; `timeout` in seconds, None for no limit."""
        words = ["bash", "-c", command.command] if isinstance(command.command, str) else command.command
        async with self._lock:
            process = await asyncio.create_subprocess_exec(
                *self._jail(), "bash", "-c", f'{self._limits}; exec "$0" "$@"', *words,
                stdin=DEVNULL, stdout=PIPE, stderr=STDOUT,
            )  # fmt: skip
            output = _Output()
            assert process.stdout is not None
            try:
                async with asyncio.timeout(command.timeout):
                    # The end of the stream, not of the process: it comes when the whole process space is gone.
                    await output.drain(process.stdout)
                    return CommandResponse(stdout=output.text(), exit_code=await process.wait())
            except TimeoutError:
                process.kill()
                await output.drain(process.stdout)
                await process.wait()
                return CommandResponse(stdout=output.text(), exit_code=None)
            finally:
                if process.returncode is None:
                    process.kill()

    async def close(self) -> CloseResponse:
        """Forget the workspace: what runs next finds an empty one."""
        async with self._lock:
            await asyncio.to_thread(self._drop_lease)
            self._open_lease()
        return CloseResponse()

    def _jail(self) -> list[str]:
        env = [word for name, value in self._env.items() for word in ("--setenv", name, value)]
        return [
            self._bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
            "--proc", "/proc", "--dev", "/dev",
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
        return (bytes(self._head) + cut + bytes(self._tail)).decode(errors="backslashreplace")


def main() -> None:
    """Serve on the inherited socket until standard input ends, which it does when the parent dies."""
    import uvicorn

    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
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
