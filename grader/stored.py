"""Groups on disk, complete enough to be graded again: the archive of a run, and a folder layout for everybody else.

    ARCHIVE  runs/<name>/archive/<group_id>.json.gz         one file a group, written by a run
    GROUP    group.json                                     ids, statement, who passed, labels where they are known
             repo/...                                       the repository that every trajectory started from
             trajectories/<id>/patch.diff turns.jsonl test_log.txt
             reference.patch                                a solution, where there is one

docs/grading.md shows the folder layout with an example.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zlib import error as ZlibError

from pydantic import TypeAdapter, ValidationError

from envs.task import Task
from grader.rubric import Flag, Flags, Scores, Tier, tier_of
from infra.errors import StorageError
from rollout.trajectory import Trajectory, Transcript

ARCHIVE_SUFFIX = ".json.gz"
MAX_ARCHIVE_BYTES = 512 * 2**20
"""One archived group, unpacked: more than its repository and transcripts can come to. A few kilobytes of gzip can hold
what no memory holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGrade:
    """What is known to be right about one passing trajectory."""

    scores: tuple[int, int, int, int, int]
    """approach, precision, minimality, side effects, consistency (M3.1)."""
    flags: frozenset[str] = frozenset()
    """Names of `grader.rubric.Flag`."""

    def __post_init__(self) -> None:
        """Raises ValueError for scores outside 1..5 and for unknown flags."""
        if not all(1 <= score <= 5 for score in self.scores):
            raise ValueError(f"scores {list(self.scores)} are not all in 1..5")
        if unknown := self.flags - {flag.value for flag in Flag}:
            raise ValueError(f"unknown flags {sorted(unknown)}")

    @property
    def judgement(self) -> tuple[Scores, Flags]:
        """In the rubric's terms."""
        return Scores(*self.scores), Flags(frozenset(map(Flag, self.flags)))

    @property
    def tier(self) -> Tier:
        """M3.2."""
        return tier_of(*self.judgement)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """One group with everything that a grader is given."""

    group_id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    """The valid ones (M1.3), passing and failing."""
    transcripts: tuple[Transcript, ...]
    """Of the same trajectories, matched by id."""
    labels: Mapping[str, KnownGrade] | None = None
    """Trajectory id -> what is known, passing trajectories only; None where nothing is."""


_ADAPTER = TypeAdapter(StoredGroup)


# ---- the archive of a run --------------------------------------------------------------------------------------------


def archive_path(folder: Path, group_id: str) -> Path:
    """Where an archive folder keeps a group."""
    return folder / f"{quote(group_id, safe='', errors='surrogatepass')}{ARCHIVE_SUFFIX}"


def write_archive(folder: Path, group: StoredGroup) -> Path:
    """Write one group under its final name only when all of it is on the disk.

    Raises:
        StorageError: it could not be written.
    """
    path = archive_path(folder, group.group_id)
    part = path.with_name(f".{path.name}.part")
    # The policy's text may hold lone surrogates; JSON's escapes carry them, UTF-8 would not.
    text = json.dumps(_ADAPTER.dump_python(group, mode="json"), separators=(",", ":"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(gzip.compress(text.encode("ascii"), mtime=0))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space and resume the run") from e
    return path


def read_archive(path: Path) -> StoredGroup:
    """Read one archived group.

    Raises:
        StorageError: it is missing or damaged, or does not fit together; names the file and what is wrong.
    """
    try:
        with gzip.open(path) as file:
            text = file.read(MAX_ARCHIVE_BYTES + 1)
        if len(text) > MAX_ARCHIVE_BYTES:
            raise StorageError(
                f"{path}: more than {MAX_ARCHIVE_BYTES // 2**20} MiB of text; this is no group; remove it"
            )
        data = json.loads(text)
        group = _ADAPTER.validate_python(data)
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file; this group was not archived (telemetry.archive)") from None
    except ValidationError as error:
        raise StorageError(f"{path}: {_first(error, data)}; the file was damaged or is of another version") from None
    except (OSError, EOFError, ZlibError, ValueError, RecursionError) as e:
        raise StorageError(f"{path}: cannot be read ({e}); remove it, or restore it from a copy") from e
    if problem := _misfit(group):
        raise StorageError(f"{path}: {problem}; remove it")
    return group


def _misfit(group: StoredGroup) -> str | None:
    """What does not fit together in a group, so that no grader could be asked about it, or no label be compared."""
    have, want = sorted(t.trajectory_id for t in group.transcripts), sorted(t.trajectory_id for t in group.trajectories)
    if len(set(want)) != len(want):
        return "a trajectory id is given twice"
    if have != want:
        return f"transcripts of {have} do not match trajectories {want}"
    for one in group.trajectories:
        if one.group_id != group.group_id or one.task_id != group.task.task_id:
            return f"trajectory {one.trajectory_id!r} is of group {one.group_id!r}, task {one.task_id!r}"
        if one.status.masked or one.passed is None:
            return f"trajectory {one.trajectory_id!r} was not evaluated ({one.status.value})"
    passed = {one.trajectory_id for one in group.trajectories if one.passed}
    if not passed:
        return "none of its trajectories has passed, and only passing ones are graded"
    if wrong := sorted(set(group.labels or {}) - passed):
        return f"labels: {wrong[0]!r} did not pass, and only passing ones are graded"
    return None


def _first(error: ValidationError, data: Any) -> str:
    """The first finding: field, value, what is wrong."""
    first = error.errors(include_url=False)[0]
    return finding(first["loc"], first["msg"], first["input"] if first["type"] != "missing" else None)


def finding(place: Sequence[str | int], message: str, value: Any = None) -> str:
    """ "labels.a.scores = [9]: must ..." of one pydantic finding; the value only where it is short."""
    where = ".".join(map(str, place)) or "the file"
    shown = ascii(value) if value is not None else ""
    said = message.removeprefix("Value error, ").replace("Input should", "must")
    return f"{where}{f' = {shown}' if 0 < len(shown) <= 80 else ''}: {said}"
