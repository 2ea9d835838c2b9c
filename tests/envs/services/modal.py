"""Modal's client, as far as it is used."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import recorded

from envs.jail import find_bwrap

PACKAGE = "modal 1.6.4"
GROUPS: list[int] = []
"""Of all sandboxes that were ever made."""
CREATED: list[dict[str, Any]] = []


class exception:  # as Modal names it
    class Error(Exception):
        pass

    class RemoteError(Error):
        pass

    class NotFoundError(Error):
        pass

    class ResourceExhaustedError(Error):
        pass


class _Both:
    """A function that Modal offers as `f()` and `f.aio()`."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self.aio = function


class Image:
    def __init__(self, name: str, steps: tuple[str, ...] = ()) -> None:
        self.name = name
        self.steps = steps

    @staticmethod
    def from_registry(*args: Any, **kwargs: Any) -> Image:
        return Image(recorded.bound(PACKAGE, "Image.from_registry", *args, **kwargs)["tag"])

    def apt_install(self, *args: Any, **kwargs: Any) -> Image:
        recorded.bound(PACKAGE, "Image.apt_install", *args, **kwargs)
        return Image(self.name, (*self.steps, f"apt {' '.join(args)}"))

    def run_commands(self, *args: Any, **kwargs: Any) -> Image:
        recorded.bound(PACKAGE, "Image.run_commands", *args, **kwargs)
        return Image(self.name, (*self.steps, *args))

    def dockerfile_commands(self, *args: Any, **kwargs: Any) -> Image:
        recorded.bound(PACKAGE, "Image.dockerfile_commands", *args, **kwargs)
        return Image(self.name, (*self.steps, *args))


async def _lookup(*args: Any, **kwargs: Any) -> str:
    return str(recorded.bound(PACKAGE, "App.lookup", *args, **kwargs)["name"])


class App:
    lookup = _Both(_lookup)


@dataclass
class Tunnel:
    url: str


class Sandbox:
    create: _Both

    def __init__(self, group: int, port: int) -> None:
        self.group = group
        self.port = port
        self.tunnels = _Both(self._tunnels)
        self.poll = _Both(self._poll)
        self.terminate = _Both(self._terminate)

    async def _tunnels(self, *args: Any, **kwargs: Any) -> dict[int, Tunnel]:
        recorded.bound(PACKAGE, "Sandbox.tunnels", *args, **kwargs)
        return {8000: Tunnel(f"http://127.0.0.1:{self.port}")}

    async def _poll(self, *args: Any, **kwargs: Any) -> int | None:
        recorded.bound(PACKAGE, "Sandbox.poll", *args, **kwargs)
        return None if machine.runs(self.group) else 3

    async def _terminate(self, *args: Any, **kwargs: Any) -> None:
        recorded.bound(PACKAGE, "Sandbox.terminate", *args, **kwargs)
        machine.stop(self.group)


async def _create(*args: Any, **kwargs: Any) -> Sandbox:
    given = recorded.bound(PACKAGE, "Sandbox.create", *args, **kwargs)
    CREATED.append(given)
    image = given["image"].name
    tries = sum(call["image"].name == image for call in CREATED)
    if image.startswith("missing"):
        raise exception.RemoteError(f"Image build failed: manifest for {image} not found: manifest unknown")
    if image.startswith("never") or (image.startswith("busy") and tries < 3):
        raise exception.ResourceExhaustedError("no room")
    assert given["app"] == "gagar" and given["encrypted_ports"] == [8000]
    command = ["/bin/sh", "-c", "exit 3"] if image == "ends:1" else list(given["args"])
    port = machine.free_port()
    folder = Path(tempfile.mkdtemp(dir=os.environ["FAKE_SERVICE"]))
    group = machine.start(folder, command, given["env"], ("127.0.0.1", port), find_bwrap(), kept=True)
    GROUPS.append(group)
    return Sandbox(group, port)


Sandbox.create = _Both(_create)
