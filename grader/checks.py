"""Checks: commands that the grader runs where reading cannot settle something (M2.2), in a sandbox of its own.

The sandbox holds the task's base with one candidate's patch. Another candidate gets a fresh one: what the code of one
left behind must not colour what is seen of the next. Nothing of the record (patches, logs, turns) is ever written.
"""

from __future__ import annotations

import asyncio
import re

from envs import workspace
from envs.sandbox import Sandbox, SandboxProvider
from envs.shell import batch, file_commands
from grader.candidates import Candidate, CandidateGroup
from grader.evidence import CheckResult
from infra.errors import SandboxError
from rollout.chat import truncate_middle

_PATCH_PATH = "/tmp/.patch"
_INFRA, _NO_PATCH = 90, 91
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class CheckError(ValueError):
    """The check cannot be run; the message says why to the model."""


class Checker:
    """Runs the checks of one group, one at a time even if several ask; numbers its results from 1."""

    def __init__(
        self, group: CandidateGroup, provider: SandboxProvider, *, limit: int, timeout_s: float, output_chars: int
    ) -> None:
        """`limit` bounds the commands of the group, `timeout_s` each of them, `output_chars` what is kept of each."""
        self.results: tuple[CheckResult, ...] = ()
        self.limit = limit
        self.timeout_s = timeout_s
        self.output_chars = output_chars
        self._group = group
        self._provider = provider
        self._sandbox: Sandbox | None = None
        self._holds = ""
        self._tries = 0
        self._lock = asyncio.Lock()

    @property
    def left(self) -> int:
        """How many more commands may be run."""
        return max(self.limit - self._tries, 0)

    async def run(self, label: str, command: str) -> CheckResult:
        """Run a command in a candidate's tree.

        Raises:
            CheckError: no command is left, no such candidate, the command cannot be passed on, or the patch does not
                apply.
            SandboxError: the sandbox was not to be had or was lost; the next check tries a fresh one.
        """
        candidate = next((c for c in self._group.candidates if c.label == label), None)
        if candidate is None:
            raise CheckError(f"there is no candidate {label}")
        if not command.strip() or "\0" in command or _LONE_SURROGATE.search(command):
            raise CheckError("the command is empty, or holds a NUL character or half of a surrogate pair")
        async with self._lock:
            return await self._run(candidate, command)

    async def _run(self, candidate: Candidate, command: str) -> CheckResult:
        if not self.left:
            raise CheckError(f"all {self.limit} checks of this group are used up")
        self._tries += 1
        try:
            sandbox = await self._ready(candidate)
            result = await sandbox.run(command, timeout_s=self.timeout_s)
        except SandboxError:
            await self.close()
            raise
        output = result.output.encode("utf-8", "replace").decode("utf-8")
        check = CheckResult(
            number=len(self.results) + 1,
            candidate=candidate.label,
            command=command,
            exit_code=None if result.timed_out else result.exit_code,
            output=truncate_middle(output, self.output_chars),
        )
        self.results += (check,)
        return check

    async def close(self) -> None:
        """Give the sandbox up. Never raises; may be called twice."""
        sandbox, self._sandbox, self._holds = self._sandbox, None, ""
        if sandbox is not None:
            await sandbox.close()

    async def _ready(self, candidate: Candidate) -> Sandbox:
        if self._sandbox is not None and self._holds == candidate.label:
            return self._sandbox
        await self.close()
        self._sandbox = sandbox = await workspace.start(self._provider, self._group.task)
        await workspace.prepare(sandbox, self._group.task)
        patch = candidate.transcript.patch
        if patch.strip():
            writes = file_commands(_PATCH_PATH, patch.encode("utf-8", errors="surrogateescape"))
            steps = [
                *((command, _INFRA) for command in writes),
                (f"git apply --whitespace=nowarn {_PATCH_PATH}", _NO_PATCH),
            ]
            for script in batch([*steps, (f"rm -f {_PATCH_PATH}", _INFRA)]):
                result = await sandbox.run(script, timeout_s=workspace.SETUP_TIMEOUT_S)
                if result.exit_code == _NO_PATCH:
                    await self.close()
                    raise CheckError(f"{candidate.label}'s patch does not apply: {result.output[-300:]}")
                if result.exit_code != 0:
                    raise SandboxError(f"the sandbox did not take the patch: {result.output[-500:]}")
        self._holds = candidate.label
        return sandbox
