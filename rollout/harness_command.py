"""A harness that is a command: it runs inside the sandbox, where the gateway is all of the network that it finds.

command -> 127.0.0.1 of the jail -> [forwarder, in the jail] -> unix socket, bound into the jail -> [gateway]
"""

from __future__ import annotations

import os
import shlex

from configs.schema import CommandHarness
from envs.task import Task
from infra.errors import HarnessError
from rollout.gateway.server import Endpoint
from rollout.harness import Commands
from rollout.trajectory import Status

PORT = 8711
"""Of the forwarder; each command has a network of its own."""
MAX_STATEMENT_BYTES = 64 * 1024
"""Linux takes no longer word than 128 KiB on a command line."""
_FORWARDER = f"""
import contextlib, socket, subprocess, sys, threading
path, command = sys.argv[1:]
def pump(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
def bridge(client):
    with client, socket.socket(socket.AF_UNIX) as gateway:
        gateway.connect(path)
        back = threading.Thread(target=pump, args=(gateway, client), daemon=True)
        back.start()
        pump(client, gateway)
        back.join()
def serve():
    while True:
        threading.Thread(target=bridge, args=(server.accept()[0],), daemon=True).start()
server = socket.create_server(("127.0.0.1", {PORT}))
threading.Thread(target=serve, daemon=True).start()
sys.exit(subprocess.run(["bash", "-c", command]).returncode & 255)
"""


class CommandLine:
    """Implements `Harness`."""

    def __init__(self, config: CommandHarness) -> None:
        self._config = config

    async def run(self, *, task: Task, endpoint: Endpoint, commands: Commands) -> Status:
        """See `Harness.run`. Its time is no command time: it waits for the policy, so only the wall clock bounds it."""
        statement = os.fsencode(task.statement)
        if endpoint.socket is None or len(statement) > MAX_STATEMENT_BYTES:
            raise HarnessError(
                f"a statement of {len(statement)} bytes is longer than the {MAX_STATEMENT_BYTES} it takes"
            )
        base_url = f"http://127.0.0.1:{PORT}"
        settings = {
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_KEY": endpoint.token,
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": endpoint.token,
            "GAGAR_TASK": task.statement,
        }
        words = ["env", *(f"{name}={value}" for name, value in settings.items())]
        words += ["python3", "-I", "-c", _FORWARDER, endpoint.socket, self._config.command]
        result = await commands.sandbox.run(shlex.join(words), timeout_s=commands.limits.wall_s)
        if result.exit_code != 0:
            raise HarnessError(f"the harness's command ended with {result.exit_code}: {result.output[-500:]}")
        return Status.SUBMITTED
