"""Did it work? The outcome reward of a finished trajectory (M1.2), for each kind of verifier."""

from __future__ import annotations

import base64
import json
import secrets
from hashlib import blake2b
from pathlib import Path

from envs import remote_calls, unittest_runner, workspace
from envs.protected import importable, is_test_file, tampered
from envs.repository_judge import judge_repository
from envs.sandbox import CommandResult, Sandbox, SandboxProvider
from envs.shell import file_commands, parse_read, read_command, unpack_commands
from envs.task import ExactAnswer, FinalState, HiddenTests, RepositoryTests, Task
from envs.verification import (
    INFRA,
    LOG_CHARS,
    MAX_NAMED,
    NO_PATCH,
    NO_TESTS,
    PATCH_PATH,
    SETUP_TIMEOUT_S,
    Verification,
    mark,
    parts,
    quoted,
    run_steps,
    transcript,
    verdict,
)
from infra.errors import SandboxError, VerifierError

__all__ = ["LOG_CHARS", "MAX_NAMED", "Verification", "is_test_file", "verify_answer", "verify_patch", "verify_state"]

# Nobody's program runs here: the repository's settings are ours, and a patch cannot reach them. Compiled files that a
# patch smuggled in would run instead of the source beside them.
_CHANGES = """
find . -name __pycache__ -prune -exec rm -rf {} + &&
printf '\\n=%s\\n' "$(git status --porcelain -z --no-renames --untracked-files=all --ignored=traditional | base64 -w0)"
"""


async def verify_patch(task: Task, patch: str, provider: SandboxProvider) -> Verification:
    """Apply a patch to the task's base in a fresh sandbox and run the hidden tests over it (M1.2).

    A patch that does not apply fails, and so do tests that run out of time. What decides how the code is tested is put
    back after the patch (`envs.protected`), so editing tests changes nothing. With `modules`, tested code neither sees
    the hidden tests nor runs in the process that judges; with `command` alone it can end that command as it likes, and
    with RepositoryTests forge the results.
    Raises VerifierError if the sandbox was not to be had, or was lost.
    """
    tests = task.verifier
    if not isinstance(tests, HiddenTests):
        raise TypeError(f"{task.task_id} has no hidden tests")
    try:
        sandbox = await workspace.start(provider, task)
        try:
            await workspace.prepare(sandbox, task)
            if isinstance(tests, RepositoryTests):
                return await judge_repository(sandbox, task, tests, patch)
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
        return verdict(False, f"the workspace cannot be read: {result.output[-500:]}")
    lines: list[str] = []
    for (path, wanted), got in zip(state.files.items(), found, strict=True):
        if (None if wanted is None else wanted.encode()) != got:
            lines.append(f"{path}: {'must not exist' if wanted is None else _describe(got)}")
    return verdict(not lines, "\n".join(lines) or "the workspace is as wanted")


def verify_answer(task: Task, answer: str) -> Verification:
    """The last message, stripped, must equal the answer."""
    exact = task.verifier
    if not isinstance(exact, ExactAnswer):
        raise TypeError(f"{task.task_id} has no exact answer")
    passed = answer.strip() == exact.answer
    return verdict(passed, "right" if passed else f"answered {answer.strip()[:200]!r}")


def _describe(got: bytes | str | None) -> str:
    if got is None:
        return "is missing"
    return "differs" if isinstance(got, bytes) else "is no readable file"


async def _judge(sandbox: Sandbox, task: Task, tests: HiddenTests, patch: str) -> Verification:
    key, folder = secrets.token_hex(32), f"/tmp/.{secrets.token_hex(8)}"
    steps: list[tuple[str, int]] = []
    if tests.modules:
        steps += [(command, INFRA) for command in _runner(task, tests, key, folder)]
    if patch.strip():
        writes = file_commands(PATCH_PATH, patch.encode("utf-8", errors="surrogateescape"))
        steps += [(command, INFRA) for command in writes]
        steps.append((f"git apply --whitespace=nowarn {PATCH_PATH}", NO_PATCH))
    steps.append((_CHANGES, NO_TESTS))
    result, failure = await run_steps(sandbox, steps)
    if failure is not None:
        return failure
    changed = _changed(result.output)
    touched = tampered(task, tests, changed)
    # What the patch put there goes first: it may be a folder, or a link, in the place of a file.
    restored = {path: task.files[path] for path in changed if path in touched and path in task.files}
    steps = [(f"rm -rf -- {' '.join(quoted(path) for path in part)}", NO_TESTS) for part in parts(touched)]
    written = restored if tests.modules else {**restored, **tests.files}
    steps += [(command, NO_TESTS) for command in unpack_commands(written)]
    _, failure = await run_steps(sandbox, steps)
    if failure is not None:
        return mark(failure, touched)
    if not tests.modules:
        result = await sandbox.run(tests.command, timeout_s=tests.timeout_s)
        return mark(verdict(result.exit_code == 0, transcript(tests, result, result.output)), touched)
    result = await sandbox.run(f"python3 -I -S -B {folder} {folder}.json", timeout_s=tests.timeout_s)
    return mark(_read_report(tests, result, bytes.fromhex(key)), touched)


def _runner(task: Task, tests: HiddenTests, key: str, folder: str) -> list[str]:
    """Commands that place the runner, and the tests in a file that it deletes once it has read it."""
    visible = {path: content for path, content in task.files.items() if is_test_file(path)}
    bundle = {
        "key": key,
        "modules": tests.modules,
        "sources": {path: content for path, content in {**visible, **tests.files}.items() if path.endswith(".py")},
        "roots": sorted(importable(task.files)),
    }
    return [
        f"mkdir -p {folder}/envs",
        *file_commands(f"{folder}/__main__.py", Path(unittest_runner.__file__).read_bytes()),
        *file_commands(f"{folder}/envs/remote_calls.py", Path(remote_calls.__file__).read_bytes()),
        *file_commands(f"{folder}.json", json.dumps(bundle).encode()),
    ]


def _changed(output: str) -> list[str]:
    """Paths that differ from the base, new ones included, as `_CHANGES` prints them."""
    listing = base64.b64decode(output.rpartition("\n=")[2]).decode("utf-8", errors="surrogateescape")
    return [entry[3:].rstrip("/") for entry in listing.split("\0") if entry]


def _read_report(tests: HiddenTests, result: CommandResult, key: bytes) -> Verification:
    body, _, line = result.output.rstrip("\n").rpartition("\n")
    code, _, text = line.partition(" ")
    if not secrets.compare_digest(code.encode(), blake2b(text.encode(), key=key).hexdigest().encode()):
        return verdict(False, transcript(tests, result, f"{result.output}\nno test report"))
    report = json.loads(text)
    if "cannot" in report:
        raise SandboxError(f"tests cannot be kept apart from tested code there: {report['cannot']}")
    counts = f"{report['passed']} of {report['run']} tests passed, {report['skipped']} skipped"
    passed = 0 < report["passed"] == report["run"] and not report["bad"]
    return verdict(passed, transcript(tests, result, f"{body}\n{counts}"))
