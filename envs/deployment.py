"""Sandboxes that some service starts: how a command is kept in hand there, and how often a start is tried.

SWE-ReX's server runs a command as a plain child process, so a guard around each command does what the jail's server
does: it kills the whole tree on time-out and afterwards, keeps output bounded, and hides the server's environment.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import secrets
from dataclasses import dataclass
from typing import Protocol

from swerex.runtime.abstract import AbstractRuntime, Command
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from configs.schema import ServiceSandbox
from envs.rex import RexSandbox
from envs.sandbox import WORKSPACE
from envs.task import Image, Task
from infra.errors import BusyError, ImageError, SandboxError

PORT = 8000
"""Where the server listens inside."""
SERVER = "/gagar-server"
"""Where the server and its Python lie in `server_image`, and then in a sandbox."""
SWEREX = "swe-rex==1.4.0"
FIRST_WAIT_S, LAST_WAIT_S = 1.0, 60.0
_NO_IMAGE = re.compile(
    r"manifest unknown|not found|no such image|does not exist|pull access denied|repository name must be|"
    r"invalid ?(?:image)? ?(?:reference|name)|unauthorized|authentication required|denied: requested access",
    re.IGNORECASE,
)
_BUSY = re.compile(
    r"too ?many ?requests|rate ?limit|time[d ]?out|timeout|temporar|unavailable|capacity|quota|throttl|try again|"
    r"connection ?(?:error|refused|reset)|exhausted|insufficient|no route to host|i/o",
    re.IGNORECASE,
)
KILLED = 137
GUARD = r"""
name=$1 limit=$2 command=$3
exec 2>/dev/null
mkdir -p /workspace && cd -P /workspace || exit 125
eval "$4"
out=$(mktemp) || exit 125
env -i PATH="$PATH" HOME=/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 GAGAR_RUN="$name" \
    timeout --signal=KILL "$limit" bash -c "$command" > "$out" 2>&1 < /dev/null
code=$?
for file in $(grep -lsz "^GAGAR_RUN=$name\$" /proc/[0-9]*/environ); do
    pid=${file#/proc/}; kill -KILL "${pid%/environ}" 2>/dev/null
done
size=$(stat -c %s "$out")
if [ "$size" -gt 8454144 ]; then
    head -c 8388608 "$out"; printf '\n[%d bytes cut]\n' $((size - 8454144)); tail -c 65536 "$out"
else
    cat "$out"
fi
rm -f "$out"
exit $code
""".replace("/workspace", WORKSPACE)


class Release(Protocol):
    """Gives back what stands behind a sandbox."""

    async def __call__(self, sandbox: GuardedSandbox) -> None:
        """Called once; must not raise for a lost sandbox."""
        ...


class GuardedSandbox(RexSandbox):
    """A sandbox on a server that runs commands as plain children."""

    def __init__(self, runtime: AbstractRuntime, *, name: str, release: Release, before: str = "") -> None:
        """`before`: what is run outside of each command, and before it."""
        super().__init__(runtime, name=name)
        self._before = before
        self._release = release
        self._closed = False

    async def close(self) -> None:
        """See `Sandbox.close`."""
        if not self._closed:
            self._closed = True
            await self._release(self)
            self._lost = f"{self.name} is closed"

    def _command(self, command: str, timeout_s: float) -> Command:
        words = ["bash", "-c", GUARD, "guard", secrets.token_hex(8), f"{timeout_s:g}", command, self._before]
        return Command(command=words, timeout=timeout_s + self._reply_margin_s / 2, merge_output_streams=True)

    def _outcome(self, exit_code: int | None, duration_s: float, timeout_s: float) -> tuple[int | None, bool]:
        timed_out = exit_code == KILLED and duration_s >= timeout_s
        return (None if timed_out else exit_code), timed_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one sandbox is made of: the task's own wishes where it has any, else those of the configuration."""

    image: str
    cpus: float | None
    memory_mib: int | None
    disk_mib: int | None
    label: str
    """The record or task, for people; empty for a sandbox that is of none."""


def order_of(config: ServiceSandbox, task: Task | None) -> Order:
    """What the source's configuration says goes before what the task's image says."""
    if task is None:
        return Order(image=config.image, cpus=None, memory_mib=None, disk_mib=None, label="")
    image = task.image or Image(name=config.image, folder=WORKSPACE)
    return Order(
        image=image.name,
        cpus=task.needs.cpus or image.cpus,
        memory_mib=task.needs.memory_mib or image.memory_mib,
        disk_mib=task.needs.disk_mib,
        label=task.meta.get("record", task.task_id),
    )


class ServiceProvider:
    """Starts a sandbox by `launch`, and tries again where the service is busy."""

    def __init__(self, config: ServiceSandbox) -> None:
        self._start_retries = config.start_retries
        self._default = config

    async def launch(self, order: Order) -> GuardedSandbox:
        """One try, which leaves nothing behind if it fails. Raises SandboxError, BusyError, ImageError."""
        raise NotImplementedError

    async def fetch(self, image: str) -> None:
        """One try to have an image where sandboxes of it will start. Raises ImageError, BusyError, SandboxError."""
        raise SandboxError(
            f"sandboxes of type {self._default.type} have no place to pull {image} to; the service keeps it from the "
            "first start on"
        )

    async def start(self, task: Task | None = None) -> GuardedSandbox:
        """See `SandboxProvider.start`."""
        sandbox: GuardedSandbox = await self._tries()(self.launch, order_of(self._default, task))
        return sandbox

    async def pull(self, image: str) -> None:
        """Have an image where sandboxes of it will start, before they do. Raises SandboxError, ImageError."""
        await self._tries()(self.fetch, image)

    def _tries(self) -> AsyncRetrying:
        return AsyncRetrying(
            retry=retry_if_exception_type(BusyError),
            stop=stop_after_attempt(self._start_retries + 1),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=LAST_WAIT_S),
            before_sleep=lambda state: logging.getLogger(__name__).warning(
                "%s; trying again", state.outcome.exception() if state.outcome else ""
            ),
            reraise=True,
        )

    async def close(self) -> None:
        """See `SandboxProvider.close`: nothing is kept."""


def refused(kind: str, image: str, text: str, *, pulling: bool = False) -> SandboxError:
    """The error of a start that failed with `text`, by the class that decides whether it is tried again.

    `pulling`: the text is about the image alone, so what is not found there is the image.
    """
    text = text.strip()[-1000:]
    if _BUSY.search(text):
        return BusyError(f"no {kind} sandbox of {image} could be had now: {text}")
    if pulling and _NO_IMAGE.search(text):
        return ImageError(f"the image {image} cannot be had ({kind}): {text}")
    return SandboxError(f"a {kind} sandbox of {image} did not start: {text}")


def needs_package(kind: str, error: ImportError) -> SandboxError:
    """The error where the optional package of a kind of sandbox is missing."""
    return SandboxError(
        f"sandboxes of type {kind} need a package that is not installed ({error}); "
        f"pip install --no-deps -r requirements/sandboxes.txt, or pip install 'gagar[{kind}]'"
    )


def server_command(server_image: str | None) -> str:
    """Shell command that runs the sandbox's server with the token of $GAGAR_TOKEN: the copied one, else what the image
    has, else from PyPI."""
    arguments = f'--port {PORT} --auth-token "$GAGAR_TOKEN"'
    if server_image is not None:
        return f"exec {SERVER}/bin/swerex-remote {arguments}"
    return (
        f"if command -v swerex-remote > /dev/null; then exec swerex-remote {arguments}; fi; "
        f"python3 -m pip install -q pipx && exec python3 -m pipx run --spec {SWEREX} swerex-remote {arguments}"
    )


def new_token() -> str:
    """A token for one server. Of letters and digits alone: one that begins with "-" would be taken for an option."""
    return secrets.token_hex(24)


def worker_name() -> str:
    """Of this process, on what it starts elsewhere: host and process id."""
    return f"{platform.node()}.{os.getpid()}"


def is_leftover(worker: str) -> bool:
    """Whether the worker of that name was on this host and is gone. Nobody can tell of other hosts."""
    host, _, pid = worker.rpartition(".")
    return host == platform.node() and pid.isdigit() and not os.path.exists(f"/proc/{pid}")
