"""The tests of real repositories, judged test by test (M1.2)."""

from __future__ import annotations

import base64
import secrets
import shlex

from envs.protected import files_of, tampered
from envs.reports import Status, read_json, read_junit, read_log
from envs.sandbox import CommandResult, Sandbox
from envs.shell import file_commands, unpack_commands
from envs.task import RepositoryTests, Results, Task
from envs.verification import (
    INFRA,
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
from envs.workspace import BASE_REF

REPORT_BYTES = 6 * 2**20
"""A longer report cannot be read, and so fails."""
REWARD = "/logs/verifier/reward.txt"
NAMED_TESTS = 20
_TESTS_PATH = "/tmp/.tests.patch"
_PASSES = (Status.PASSED, Status.XFAIL)


async def judge_repository(sandbox: Sandbox, task: Task, tests: RepositoryTests, patch: str) -> Verification:
    """Apply a patch in a prepared sandbox, put back what decides how it is tested, apply and run the tests.

    Raises SandboxError when the sandbox is lost, and where the patch of the tests does not apply to the task's base:
    then the task is broken, whatever the policy did (M1.3).
    """
    changed, base, failure = await _apply(sandbox, tests, patch)
    if failure is not None:
        return failure
    asked_for = files_of(task.reference_patch or "")
    of_tests = files_of(tests.patch)
    touched = set(tampered(task, tests, changed, base))
    touched |= {path for path in changed if path in of_tests or any(file.startswith(f"{path}/") for file in of_tests)}
    # Compiled files run instead of the source beside them; attributes rewrite what git puts back.
    touched |= {path for path in changed if path.endswith((".pyc", ".gitattributes")) and path not in asked_for}
    touched |= {path for path in changed if any(other.startswith(f"{path}/") for other in touched)}
    named = tuple(sorted(touched))
    folder = f"/tmp/.{secrets.token_hex(8)}"
    failure = await _put_in_place(sandbox, tests, named, base, folder)
    if failure is not None:
        return mark(failure, named)
    script = f"export GAGAR_REPORT={folder}/report\n{tests.command}"
    result = await sandbox.run(script, timeout_s=tests.timeout_s)
    return mark(await _judge(sandbox, tests, result, f"{folder}/report"), named)


async def _apply(
    sandbox: Sandbox, tests: RepositoryTests, patch: str
) -> tuple[list[str], frozenset[str], Verification | None]:
    """Paths that the patch changes, paths of the base, and the verdict if the patch does not apply."""
    steps: list[tuple[str, int]] = []
    if tests.patch.strip():
        steps += [(command, INFRA) for command in file_commands(_TESTS_PATH, _bytes(tests.patch))]
        steps.append((f"git apply --check --whitespace=nowarn {_TESTS_PATH}", INFRA))
    listing = f"git ls-tree -r -z --name-only {BASE_REF} | base64 -w0"
    steps.append((f"printf '\\n=%s\\n' \"$({listing})\"", INFRA))
    result, _ = await run_steps(sandbox, steps)
    base = frozenset(_listed(result.output))
    if not patch.strip():
        return [], base, None
    steps = [(command, INFRA) for command in file_commands(PATCH_PATH, _bytes(patch))]
    steps.append((f"git apply --whitespace=nowarn {PATCH_PATH}", NO_PATCH))
    numbers = f"git apply --numstat -z {PATCH_PATH} | base64 -w0"
    steps.append((f"printf '\\n=%s\\n' \"$({numbers})\"", NO_TESTS))
    result, failure = await run_steps(sandbox, steps)
    if failure is not None:
        return [], base, failure
    return [line.split("\t", 2)[2] for line in _listed(result.output)], base, None


async def _put_in_place(
    sandbox: Sandbox, tests: RepositoryTests, touched: tuple[str, ...], base: frozenset[str], folder: str
) -> Verification | None:
    """The verdict if the tests cannot be put in place, which the patch answers for."""
    known = tuple(path for path in sorted({*touched, *files_of(tests.patch)}) if path in base)
    steps = [(f"rm -rf -- {' '.join(quoted(path) for path in part)}", NO_TESTS) for part in parts(touched)]
    # Attributes first: git puts the others back as they say.
    first = tuple(path for path in known if path.endswith(".gitattributes"))
    for some in (first, tuple(path for path in known if path not in first)):
        for part in parts(some):
            words = " ".join(quoted(path) for path in part)
            steps.append((f"git --literal-pathspecs checkout -q {BASE_REF} -- {words}", NO_TESTS))
    steps += [(command, NO_TESTS) for command in unpack_commands(tests.files)]
    for place, files in {**tests.outside, folder: {}, "/logs/verifier": {}}.items():
        # The place itself may be a link to where a jail can be written.
        steps.append((f'mkdir -p "$(readlink -m {shlex.quote(place)})"', NO_TESTS))
        steps += [(f"( cd {shlex.quote(place)} && {command}\n)", NO_TESTS) for command in unpack_commands(files)]
    if tests.patch.strip():
        steps.append((f"git apply --whitespace=nowarn {_TESTS_PATH}", NO_TESTS))
    return (await run_steps(sandbox, steps))[1]


async def _judge(sandbox: Sandbox, tests: RepositoryTests, result: CommandResult, report: str) -> Verification:
    if result.timed_out:
        return verdict(False, transcript(tests, result, result.output))
    if tests.results is Results.EXIT_CODE:
        return verdict(result.exit_code == 0, transcript(tests, result, result.output))
    if tests.results is Results.LOG:
        return _by_status(tests, result, read_log(result.output, tests.parser))
    path = REWARD if tests.results is Results.REWARD_FILE else report
    text = await _read(sandbox, path)
    if text is None:
        return verdict(False, transcript(tests, result, f"{result.output}\nno readable {_called(tests)}"))
    if tests.results is Results.REWARD_FILE:
        return _by_reward(tests, result, text)
    reader = read_junit if tests.results is Results.JUNIT else read_json
    try:
        found = reader(text)
    except ValueError as error:
        return verdict(False, transcript(tests, result, f"{result.output}\n{_called(tests)}: {error}"))
    return _by_status(tests, result, found)


def _called(tests: RepositoryTests) -> str:
    return REWARD if tests.results is Results.REWARD_FILE else f"{tests.results.value} report in $GAGAR_REPORT"


async def _read(sandbox: Sandbox, path: str) -> str | None:
    """A file that the tests wrote; None where there is none, or one that is too long."""
    size = f'[ -f {path} ] && [ "$(stat -L -c %s {path})" -le {REPORT_BYTES} ] || exit 1'
    found = await sandbox.run(f"{size}\nprintf '\\n=%s\\n' \"$(base64 -w0 < {path})\"", timeout_s=SETUP_TIMEOUT_S)
    if found.exit_code != 0:
        return None
    try:
        data = base64.b64decode(found.output.rpartition("\n=")[2].strip(), validate=True)
    except ValueError:  # cut in its middle
        return None
    return data.decode("utf-8", errors="replace")


def _by_reward(tests: RepositoryTests, result: CommandResult, text: str) -> Verification:
    try:
        reward = float(text.strip())
    except ValueError:
        return verdict(False, transcript(tests, result, f"{result.output}\n{REWARD} holds {text.strip()[:100]!r}"))
    return verdict(reward >= 1.0, transcript(tests, result, f"{result.output}\nreward {reward:g}"))


def _by_status(tests: RepositoryTests, result: CommandResult, found: dict[str, Status]) -> Verification:
    """Pass if every test that must pass did; without any named, if all that ran did and the command ended well."""
    wanted = tests.must_pass or tuple(found)
    short = [f"{name}: {found[name].value if name in found else 'did not run'}"
             for name in wanted if found.get(name) not in _PASSES]  # fmt: skip
    if not tests.must_pass:
        short = [line for line in short if not line.endswith(f": {Status.SKIPPED.value}")]
    summary = f"{len(wanted) - len(short)} of {len(wanted)} tests that must pass did"
    more = [f"and {len(short) - NAMED_TESTS} more"] if len(short) > NAMED_TESTS else []
    passed = bool(wanted) and not short and any(found.get(name) in _PASSES for name in wanted)
    if not tests.must_pass and result.exit_code != 0:
        passed = False
    log = "\n".join([result.output.rstrip(), summary, *short[:NAMED_TESTS], *more])
    return verdict(passed, transcript(tests, result, log))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogateescape")


def _listed(output: str) -> list[str]:
    listing = base64.b64decode(output.rpartition("\n=")[2]).decode("utf-8", errors="surrogateescape")
    return [entry for entry in listing.split("\0") if entry]
