"""Did it work? The outcome reward of a finished trajectory (M1.2), for each kind of verifier."""

from __future__ import annotations

import json
import posixpath
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path

from envs import workspace
from envs.sandbox import CommandResult, Sandbox, SandboxProvider
from envs.shell import batch, file_commands, parse_read, read_command, unpack_commands
from envs.task import ExactAnswer, FinalState, HiddenTests, Task
from infra.errors import SandboxError, VerifierError

SETUP_TIMEOUT_S = 60.0
LOG_CHARS = 4000
"""A log keeps this many characters: half from its head, half from its tail."""

_PATCH_PATH = "/tmp/.patch"
_INFRA, _NO_PATCH, _NO_TESTS = 90, 91, 92
"""Exit codes of the steps before the tests: only the first says that the sandbox, not the patch, is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verifier's word."""

    passed: bool
    reward: float
    """1 for a pass, 0 for a failure."""
    log: str
    """What was run and printed, middle cut; for the grader and for people."""


async def verify_patch(task: Task, patch: str, provider: SandboxProvider) -> Verification:
    """Apply a patch to the task's base in a fresh sandbox and run the hidden tests over it (M1.2).

    A patch that does not apply fails, and so do tests that run out of time. The hidden files and the task's own test
    files are written after the patch, so editing tests changes nothing. Raises VerifierError if the sandbox was not to
    be had, or was lost.
    """
    tests = task.verifier
    if not isinstance(tests, HiddenTests):
        raise TypeError(f"{task.task_id} has no hidden tests")
    try:
        sandbox = await provider.start()
        try:
            await workspace.prepare(sandbox, task)
            return await _judge(sandbox, task, tests, patch)
        finally:
            await sandbox.close()
    except SandboxError as error:
        raise VerifierError(f"verification of {task.task_id} could not run: {error.message}") from error


async def verify_state(task: Task, sandbox: Sandbox) -> Verification:
    """Compare the files that the task names with what is in the rollout's own sandbox.

    Raises VerifierError if the sandbox is lost.
    """
    state = task.verifier
    if not isinstance(state, FinalState):
        raise TypeError(f"{task.task_id} has no final state")
    limit = max((len((content or "").encode()) for content in state.files.values()), default=0) + 1
    try:
        result = await sandbox.run(read_command(list(state.files), max_bytes=limit), timeout_s=SETUP_TIMEOUT_S)
    except SandboxError as error:
        raise VerifierError(f"verification of {task.task_id} could not run: {error.message}") from error
    found = parse_read(result.output)
    if len(found) != len(state.files):
        # The sandbox answers but its files cannot be read: the policy's own doing, so no reason to mask.
        return _verdict(False, f"the workspace cannot be read: {result.output[-500:]}")
    lines: list[str] = []
    for (path, wanted), got in zip(state.files.items(), found, strict=True):
        if (None if wanted is None else wanted.encode()) != got:
            lines.append(f"{path}: {'must not exist' if wanted is None else _describe(got)}")
    return _verdict(not lines, "\n".join(lines) or "the workspace is as wanted")


def verify_answer(task: Task, answer: str) -> Verification:
    """The last message, stripped, must equal the answer."""
    exact = task.verifier
    if not isinstance(exact, ExactAnswer):
        raise TypeError(f"{task.task_id} has no exact answer")
    passed = answer.strip() == exact.answer
    return _verdict(passed, "right" if passed else f"answered {answer.strip()[:200]!r}")


def _verdict(passed: bool, log: str) -> Verification:
    if len(log) > LOG_CHARS:
        half = LOG_CHARS // 2
        log = f"{log[:half]}\n[{len(log) - 2 * half} characters cut]\n{log[-half:]}"
    return Verification(passed=passed, reward=float(passed), log=log)


def _describe(got: bytes | str | None) -> str:
    if got is None:
        return "is missing"
    return "differs" if isinstance(got, bytes) else "is no readable file"


async def _judge(sandbox: Sandbox, task: Task, tests: HiddenTests, patch: str) -> Verification:
    key, key_path = secrets.token_hex(16), f"/tmp/.{secrets.token_hex(8)}"
    runner_path = f"{key_path}.py"
    steps: list[tuple[str, int]] = []
    if patch.strip():
        writes = file_commands(_PATCH_PATH, patch.encode("utf-8", errors="surrogateescape"))
        steps += [(command, _INFRA) for command in writes]
        steps.append((f"git apply --whitespace=nowarn {_PATCH_PATH}", _NO_PATCH))
    visible = {path: content for path, content in task.files.items() if is_test_file(path)}
    steps += [(command, _NO_TESTS) for command in unpack_commands({**visible, **tests.files})]
    # Compiled files that a patch smuggled in would run instead of the source beside them.
    steps.append(("find . -name __pycache__ -prune -exec rm -rf {} +", _NO_TESTS))
    if tests.modules:
        runner = Path(__file__).with_name("unittest_runner.py").read_bytes()
        placed = [*file_commands(key_path, key.encode()), *file_commands(runner_path, runner)]
        steps += [(command, _INFRA) for command in placed]
    for script in batch(steps):
        result = await sandbox.run(script, timeout_s=SETUP_TIMEOUT_S)
        if result.exit_code == _INFRA:
            raise SandboxError(f"the sandbox did not take the tests: {result.output[-500:]}")
        if result.exit_code != 0:
            what = "the patch does not apply" if result.exit_code == _NO_PATCH else "the tests cannot replace its files"
            return _verdict(False, f"{what}:\n{result.output}")
    if not tests.modules:
        result = await sandbox.run(tests.command, timeout_s=tests.timeout_s)
        return _verdict(result.exit_code == 0, _transcript(tests, result, result.output))
    command = shlex.join(["python3", "-I", "-B", runner_path, key_path, *tests.modules])
    return _read_report(tests, await sandbox.run(command, timeout_s=tests.timeout_s), key)


def is_test_file(path: str) -> bool:
    """Whether a file is part of the tests by the usual names: test_*.py, *_test.py, conftest.py, tests/*."""
    folders, name = path.split("/")[:-1], posixpath.basename(path)
    return name == "conftest.py" or name.startswith("test_") or name.endswith("_test.py") or "tests" in folders


def _read_report(tests: HiddenTests, result: CommandResult, key: str) -> Verification:
    body, found, rest = result.output.rpartition(f"\n{key} ")
    try:
        report = json.loads(rest.partition("\n")[0]) if found else None
    except ValueError:
        report = None
    if not isinstance(report, dict):
        return _verdict(False, _transcript(tests, result, f"{body if found else result.output}\nno test report"))
    counts = f"{report['passed']} of {report['run']} tests passed, {report['skipped']} skipped"
    passed = 0 < report["passed"] == report["run"] and not report["bad"] and not report["changed"]
    return _verdict(passed, _transcript(tests, result, f"{body}\n{counts}"))


def _transcript(tests: HiddenTests, result: CommandResult, output: str) -> str:
    ending = f"\nkilled after {tests.timeout_s:g} s" if result.timed_out else ""
    return f"$ {tests.command}\n{output.rstrip()}{ending}"
