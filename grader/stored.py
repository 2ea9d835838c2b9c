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
        StorageError: it is missing or damaged; names the file and what is wrong.
    """
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        group = _ADAPTER.validate_python(data)
    except FileNotFoundError:
        raise StorageError(f"{path}: no such file; this group was not archived (telemetry.archive)") from None
    except ValidationError as error:
        raise StorageError(f"{path}: {_first(error, data)}; the file was damaged or is of another version") from None
    except (OSError, EOFError, ZlibError, ValueError) as e:
        raise StorageError(f"{path}: cannot be read ({e}); remove it, or restore it from a copy") from e
    have, want = {t.trajectory_id for t in group.transcripts}, {t.trajectory_id for t in group.trajectories}
    if have != want:
        raise StorageError(f"{path}: transcripts of {sorted(have)} do not match trajectories {sorted(want)}; remove it")
    return group


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
