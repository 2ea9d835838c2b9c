"""What every format gives: records, each one task, and findings, each one thing that is wrong and where."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from configs.errors import ConfigError
from envs.task import HiddenTests, Split, Task, TaskKind, Verifier
from envs.tree import RepoTree, read_entries

SHOWN_CHARS = 80
SHOWN_FINDINGS = 5
RECORD_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A script that solves a task, for formats that have no reference patch."""

    folder: str
    """Absolute folder of the sandbox."""
    files: Mapping[str, str]
    command: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One task as it stands in its file or folder."""

    record_id: str
    place: str
    """Where it stands: file and line, or folder."""
    task: Task
    """Its source, split and index are still open."""
    split: Split | None = None
    """Where the record says so itself."""
    solution: Solution | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that keeps a record from being used."""

    place: str
    record: str
    """Its id, empty if it has none."""
    field: str
    value: str
    """As written, shortened; empty if there is none."""
    message: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        name = f" {self.record}:" if self.record else ""
        value = f" = {self.value}" if self.value else ""
        return f"{self.place}:{name} {self.field}{value}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a file or folder of tasks holds."""

    path: str
    records: Sequence[Record]
    findings: Sequence[Finding]

    def usable(self, key: str) -> Sequence[Record]:
        """The records. Raises ConfigError with the first findings if there are any, or no record.

        Args:
            key: the configuration's key, e.g. "sources.mine.path".
        """
        if self.findings:
            more = len(self.findings) - SHOWN_FINDINGS
            shown = "".join(f"\n    {finding}" for finding in self.findings[:SHOWN_FINDINGS])
            rest = f"\n    and {more} more" if more > 0 else ""
            raise ConfigError(
                f"{key}: {len(self.findings)} things are wrong with its records; mend them, or take the records out "
                f"(gagar tasks check {self.path}):{shown}{rest}"
            )
        if not self.records:
            raise ConfigError(f"{key}: holds no tasks; give a file or folder that does")
        return self.records


class Broken(Exception):
    """A record that cannot be used; caught where records are read."""

    def __init__(self, field: str, value: Any, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.value = shown(value)
        self.message = message

    def at(self, place: str, record: str) -> Finding:
        """The finding."""
        return Finding(place=place, record=record, field=self.field, value=self.value, message=self.message)


def shown(value: Any) -> str:
    """A value in one line, shortened; empty for None."""
    if value is None:
        return ""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 3]}..."


def text_of(row: Mapping[str, Any], field: str, *, default: str | None = None) -> str:
    """A field that holds text. Raises Broken; `default` stands for a missing or null one."""
    value = row.get(field)
    if value is None and default is not None:
        return default
    if value is None:
        raise Broken(field, None, "is missing; give text")
    if not isinstance(value, str):
        raise Broken(field, value, f"must be text, not {type(value).__name__}")
    if not value.strip() and default is None:
        raise Broken(field, value, "is empty; give text")
    return value


def number_of(row: Mapping[str, Any], field: str, default: float) -> float:
    """A field that holds a number above 0. Raises Broken."""
    value = row.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 10**9:
        raise Broken(field, value, "must be a number above 0")
    return float(value)


def checked_id(value: str, field: str) -> str:
    """An id that can be part of file names. Raises Broken."""
    if not RECORD_ID.fullmatch(value):
        raise Broken(field, value, "must start with a letter or digit and hold only letters, digits and . _ + -")
    return value


def checked_diff(text: str, field: str) -> str:
    """A unified diff of files inside the repository, ending in a newline; empty text is none. Raises Broken."""
    if not text.strip():
        return ""
    text = text if text.endswith("\n") else f"{text}\n"
    lines = text.splitlines()
    new = [line for line in lines if line.startswith("+++ ")]
    if not any(line.startswith("diff --git ") for line in lines) and not new:
        raise Broken(field, text, "is no unified diff; give what `git diff` prints")
    for line in new:
        path = line.removeprefix("+++ ").split("\t")[0].strip('"')
        if path != "/dev/null" and (PurePosixPath(path).is_absolute() or ".." in path.split("/")):
            raise Broken(field, path, "leads out of the repository; give paths relative to its root")
    return text


def read_folder_files(folder: Path) -> dict[str, str]:
    """Path -> content of the files of a folder; bytes that are no UTF-8 are surrogate escapes."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return {}
    return {path: entry.text for path, entry in read_entries(RepoTree(path=str(folder))).items()}


def code_task(record_id: str, statement: str, files: Mapping[str, str], verifier: HiddenTests, **more: Any) -> Task:
    """A code task whose place in a stream is still open."""
    judged: Verifier = verifier
    return Task(
        task_id=record_id,
        source="",
        kind=TaskKind.CODE,
        split=Split.TRAIN,
        statement=statement,
        files=files,
        verifier=judged,
        **more,
    )
