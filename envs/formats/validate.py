"""Whether tasks are what they should be, by running them: without a patch they fail, with the reference they pass."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from envs import workspace
from envs.formats.records import Record, Solution
from envs.sandbox import SandboxProvider
from envs.shell import batch, unpack_commands
from envs.verifier import Verification, verify_patch
from infra.errors import SandboxError, VerifierError

LOG_TAIL_CHARS = 1500


class Judgement(StrEnum):
    """What came of a record."""

    SOUND = "sound"
    """The start fails and the reference passes, each time."""
    UNPROVED = "unproved"
    """The start fails each time; there is no reference."""
    FLAKY = "flaky"
    """The same patch passed and failed."""
    START_PASSES = "start_passes"
    """Nothing has to be done to pass."""
    REFERENCE_FAILS = "reference_fails"
    LOST = "lost"
    """A sandbox was lost, or the task cannot be set up in one; running again tries again."""


GOOD = (Judgement.SOUND, Judgement.UNPROVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One line of the output."""

    record: str
    digest: str
    """Of all that the task says; another one means that the task changed."""
    times: int
    judgement: Judgement
    start: tuple[bool, ...] = ()
    """Whether the tests passed without a patch, each time."""
    reference: tuple[bool, ...] = ()
    detail: str = ""
    """Of one that is not good: the end of the log."""


async def validate(
    records: Sequence[Record],
    provider: SandboxProvider,
    *,
    times: int,
    at_once: int,
    output: Path | None,
    say: Callable[[int, int, Outcome], None],
) -> list[Outcome]:
    """Run every record that `output` does not hold yet; in the order of the records.

    Args:
        times: how often each patch is verified.
        output: JSON lines, one an outcome, added to as they come; lost ones are run again the next time.
        say: called with the number done, the number in all and the outcome.

    Raises ConfigError if `output` holds something else.
    """
    known = read_outcomes(output)
    done: dict[str, Outcome] = {}
    gate = asyncio.Semaphore(at_once)
    lock = asyncio.Lock()

    async def one(record: Record) -> None:
        digest = digest_of(record)
        old = known.get(record.record_id)
        if old is not None and (old.digest, old.judgement is Judgement.LOST) == (digest, False) and old.times >= times:
            outcome = old
        else:
            async with gate:
                outcome = await judge(record, provider, times=times)
            if output is not None:
                async with lock:
                    with output.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(asdict(outcome)) + "\n")
        done[record.record_id] = outcome
        say(len(done), len(records), outcome)

    await asyncio.gather(*(one(record) for record in records))
    return [done[record.record_id] for record in records]


async def judge(record: Record, provider: SandboxProvider, *, times: int) -> Outcome:
    """Verify the start and the reference of one record, `times` times each."""
    start: list[Verification] = []
    reference: list[Verification] = []
    judgement, detail = Judgement.UNPROVED, ""
    try:
        for _ in range(times):
            start.append(await verify_patch(record.task, "", provider))
        patch = record.task.reference_patch
        if patch is None and record.solution is not None:
            patch = await solve(record, record.solution, provider)
        for _ in range(times if patch is not None else 0):
            reference.append(await verify_patch(record.task, patch or "", provider))
    except (SandboxError, VerifierError) as error:
        judgement, detail = Judgement.LOST, error.message
    else:
        judgement, detail = judged(start, reference)
    return Outcome(
        record=record.record_id,
        digest=digest_of(record),
        times=times,
        judgement=judgement,
        start=tuple(verdict.passed for verdict in start),
        reference=tuple(verdict.passed for verdict in reference),
        detail=detail[-LOG_TAIL_CHARS:],
    )


def judged(start: Sequence[Verification], reference: Sequence[Verification]) -> tuple[Judgement, str]:
    """What the verdicts say together, and the log of one that is not as it should be."""
    for verdicts in (start, reference):
        if len({verdict.passed for verdict in verdicts}) > 1:
            return Judgement.FLAKY, next(verdict.log for verdict in verdicts if not verdict.passed)
    if start[0].passed:
        return Judgement.START_PASSES, start[0].log
    if not reference:
        return Judgement.UNPROVED, ""
    if not reference[0].passed:
        return Judgement.REFERENCE_FAILS, reference[0].log
    return Judgement.SOUND, ""


async def solve(record: Record, solution: Solution, provider: SandboxProvider) -> str:
    """What the task's own script changes in its repository, as a patch. Raises SandboxError."""
    sandbox = await workspace.start(provider, record.task)
    try:
        await workspace.prepare(sandbox, record.task)
        steps = [(f'mkdir -p "$(readlink -m {solution.folder})"', 1)]
        steps += [(f"( cd {solution.folder} && {command}\n)", 1) for command in unpack_commands(solution.files)]
        for script in batch(steps):
            result = await sandbox.run(script, timeout_s=workspace.SETUP_TIMEOUT_S)
            if result.exit_code != 0:
                raise SandboxError(f"the solution of {record.record_id} could not be placed: {result.output[-500:]}")
        await sandbox.run(solution.command, timeout_s=solution.timeout_s)
        return await workspace.extract_patch(sandbox)
    finally:
        await sandbox.close()


def digest_of(record: Record) -> str:
    """Of the statement, the files, the tests and the reference."""
    task = record.task
    parts: list[Any] = [task.statement, asdict(task.verifier), task.reference_patch, repr(task.image)]
    parts.append(dict(sorted(task.files.items())))
    parts.append(None if record.solution is None else asdict(record.solution))
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def read_outcomes(output: Path | None) -> dict[str, Outcome]:
    """Record -> its last outcome. A last line that was cut off is passed over. Raises ConfigError."""
    if output is None or not output.exists():
        return {}
    found: dict[str, Outcome] = {}
    lines = output.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row |= {"judgement": Judgement(row["judgement"])}
            row |= {name: tuple(row[name]) for name in ("start", "reference")}
            outcome = Outcome(**row)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise ConfigError(f"{output}:{number}: no outcome of a task ({error}); give another --output") from None
        found[outcome.record] = outcome
    return found
