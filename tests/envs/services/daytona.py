"""Daytona's client, as far as it is used."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machine
import recorded

from envs.jail import find_bwrap

PACKAGE = "daytona 0.226.1"
GROUPS: list[int] = []
CREATED: list[dict[str, Any]] = []


class DaytonaError(Exception):
    pass


class DaytonaRateLimitError(DaytonaError):
    pass


def _record(name: str) -> Any:
    return lambda *args, **kwargs: SimpleNamespace(**recorded.bound(PACKAGE, name, *args, **kwargs))


DaytonaConfig = _record("DaytonaConfig")
CreateSandboxFromImageParams = _record("CreateSandboxFromImageParams")
Resources = _record("Resources")
SessionExecuteRequest = _record("SessionExecuteRequest")


class _Process:
    def __init__(self, sandbox: _Sandbox) -> None:
        self._sandbox = sandbox

    async def create_session(self, *args: Any, **kwargs: Any) -> None:
        recorded.bound(PACKAGE, "AsyncProcess.create_session", *args, **kwargs)

    async def execute_session_command(self, *args: Any, **kwargs: Any) -> None:
        given = recorded.bound(PACKAGE, "AsyncProcess.execute_session_command", *args, **kwargs)
        assert given["req"].run_async is True
        box = self._sandbox
        folder = Path(tempfile.mkdtemp(dir=os.environ["FAKE_SERVICE"]))
        words = ["/bin/sh", "-c", given["req"].command]
        box.group = machine.start(folder, words, {}, ("127.0.0.1", box.port), find_bwrap(), kept=True)
        GROUPS.append(box.group)


class _Sandbox:
    def __init__(self) -> None:
        self.port = machine.free_port()
        self.group: int | None = None
        self.process = _Process(self)

    async def get_preview_link(self, *args: Any, **kwargs: Any) -> SimpleNamespace:
        recorded.bound(PACKAGE, "AsyncSandbox.get_preview_link", *args, **kwargs)
        return SimpleNamespace(url=f"http://127.0.0.1:{self.port}", token="preview")


class AsyncDaytona:
    def __init__(self, config: SimpleNamespace) -> None:
        assert config.api_key == "daytona-key"

    async def create(self, *args: Any, **kwargs: Any) -> _Sandbox:
        given = vars(recorded.bound(PACKAGE, "AsyncDaytona.create", *args, **kwargs)["params"])
        CREATED.append(given)
        tries = sum(call["image"] == given["image"] for call in CREATED)
        if given["image"].startswith("missing"):
            raise DaytonaError(f"Failed to create sandbox: manifest unknown: {given['image']}")
        if given["image"].startswith("never") or (given["image"].startswith("busy") and tries < 3):
            raise DaytonaRateLimitError("Failed to create sandbox: slow down")
        return _Sandbox()

    async def delete(self, sandbox: _Sandbox, **kwargs: Any) -> None:
        recorded.bound(PACKAGE, "AsyncDaytona.delete", sandbox, **kwargs)
        if sandbox.group is not None:
            machine.stop(sandbox.group)

    async def close(self) -> None:
        recorded.bound(PACKAGE, "AsyncDaytona.close")
