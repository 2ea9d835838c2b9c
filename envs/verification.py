"""A verifier's word, and the steps that lead to it in a fresh sandbox."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from envs.sandbox import CommandResult, Sandbox
from envs.shell import batch
from envs.task import HiddenTests
from infra.errors import SandboxError

SETUP_TIMEOUT_S = 60.0
LOG_CHARS = 4000
"""A log keeps this many characters: half from its head, half from its tail."""
MAX_NAMED = 20
NAME_CHARS = 200

PATCH_PATH = "/tmp/.patch"
INFRA, NO_PATCH, NO_TESTS = 90, 91, 92
"""Exit codes of the steps before the tests: only the first says that the sandbox, not the patch, is at fault. Nothing
that can end with it comes after the patch: a patch that fills the disk, say, is the policy's own doing (M1.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The verifier's word."""

    passed: bool
    reward: float
    """1 for a pass, 0 for a failure."""
    log: str
    """What was run and printed, middle cut; for the grader and for people."""
    tampered: tuple[str, ...] = ()
    """Files that decide how the code is tested and that the patch changed, at most MAX_NAMED; they were put back
    before the tests ran."""


async def run_steps(sandbox: Sandbox, steps: list[tuple[str, int]]) -> tuple[CommandResult, Verification | None]:
    """The last result, and the verdict where a step failed that the patch answers for."""
    result = CommandResult(output="", exit_code=0, timed_out=False, duration_s=0.0)
    for script in batch(steps):
        result = await sandbox.run(script, timeout_s=SETUP_TIMEOUT_S)
        if result.exit_code == INFRA:
            raise SandboxError(f"the sandbox did not take the tests: {result.output[-500:]}")
        if result.exit_code != 0:
            what = "the patch does not apply" if result.exit_code == NO_PATCH else "the tests cannot be put in place"
            return result, verdict(False, f"{what}:\n{result.output}")
    return result, None


def verdict(passed: bool, log: str) -> Verification:
    """Pass or fail, with the middle of a long log cut out."""
    if len(log) > LOG_CHARS:
        half = LOG_CHARS // 2
        log = f"{log[:half]}\n[{len(log) - 2 * half} characters cut]\n{log[-half:]}"
    return Verification(passed=passed, reward=float(passed), log=log)


def quoted(path: str) -> str:
    """A path as a word of bash in ASCII: a name may hold any bytes, and a command only text."""
    if path.isascii():
        return shlex.quote(f"./{path}")
    data = path.encode("utf-8", errors="surrogateescape")
    return "./$'" + "".join(f"\\x{byte:02x}" for byte in data) + "'"


def parts(paths: tuple[str, ...], size: int = 100) -> list[tuple[str, ...]]:
    """The paths in portions that fit into one command."""
    return [paths[at : at + size] for at in range(0, len(paths), size)]


def mark(verdict: Verification, touched: tuple[str, ...]) -> Verification:
    """The same verdict, with the names of what was put back."""
    if not touched:
        return verdict
    # Names are the policy's, too.
    shown = [path.encode("utf-8", errors="surrogateescape").decode(errors="backslashreplace") for path in touched]
    named = tuple(repr(path)[1:-1][:NAME_CHARS] for path in shown[:MAX_NAMED])
    more = f" and {len(touched) - len(named)} more" if len(touched) > len(named) else ""
    what = "[the patch changed what decides how it is tested; put back before the tests ran:"
    return replace(verdict, log=f"{what} {', '.join(named)}{more}]\n{verdict.log}", tampered=named)


def transcript(tests: HiddenTests, result: CommandResult, output: str) -> str:
    """The command of the tests and what came of it."""
    ending = f"\nkilled after {tests.timeout_s:g} s" if result.timed_out else ""
    return f"$ {tests.command}\n{output.rstrip()}{ending}"
