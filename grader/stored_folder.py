"""The folder layout of stored groups, for groups that no run of ours made: read strictly, written the same way.

Everything but group.json may have been written by an agent: it is text, never a path that is followed. No link
is followed either, and only plain files are read: a group from elsewhere must not show what else is on this machine.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from envs.task import HiddenTests, Split, Task, TaskKind
from grader.rubric import Flag
from grader.stored import ARCHIVE_SUFFIX, KnownGrade, StoredGroup, finding, read_archive
from infra.errors import StorageError
from rollout.trajectory import Status, Trajectory, Transcript, Turn

GROUP_FILE = "group.json"
MAX_REPO_BYTES = 64 * 2**20
"""Text of a stored repository; a task that needs more should be stored without what it does not touch."""
MAX_FILE_BYTES = 64 * 2**20
"""Any other file of a group."""

_Score = Annotated[int, Field(ge=1, le=5, strict=True)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Entry(_Part):
    id: Annotated[str, Field(min_length=1, max_length=200)]
    passed: Annotated[bool, Field(strict=True)]
    status: Status = Status.SUBMITTED

    @field_validator("status")
    @classmethod
    def _evaluated(cls, status: Status) -> Status:
        if status.masked:
            raise ValueError("a trajectory that was not evaluated is not part of a group; leave it out")
        return status


class _Label(_Part):
    scores: Annotated[list[_Score], Field(min_length=5, max_length=5)]
    flags: list[Flag] = []


class _GroupFile(_Part):
    """group.json."""

    group_id: Annotated[str, Field(min_length=1, max_length=200)]
    statement: Annotated[str, Field(min_length=1)]
    trajectories: Annotated[list[_Entry], Field(min_length=1)]
    labels: dict[str, _Label] | None = None

    @model_validator(mode="after")
    def _fits(self) -> _GroupFile:
        ids = [entry.id for entry in self.trajectories]
        if repeated := sorted({name for name in ids if ids.count(name) > 1}):
            raise ValueError(f"trajectories: the id {repeated[0]!r} is given twice; give each its own")
        passed = {entry.id for entry in self.trajectories if entry.passed}
        if not passed:
            raise ValueError("trajectories: none has passed, and only passing ones are graded; leave the group out")
        for name in self.labels or {}:
            if name not in ids:
                raise ValueError(f"labels: {name!r} is no trajectory; known are {', '.join(ids)}")
            if name not in passed:
                raise ValueError(f"labels: {name!r} did not pass, and only passing ones are graded; remove its label")
        return self


def read_groups(path: Path) -> list[StoredGroup]:
    """The groups of a folder, in the order of their names: one group folder, a folder of group folders, or a folder of
    archived groups.

    Raises:
        StorageError: it holds no group, or one of them cannot be read.
    """
    if (path / GROUP_FILE).is_file():
        return [read_folder(path)]
    try:
        entries = sorted(path.iterdir())
    except OSError as e:
        raise StorageError(f"{path}: cannot be read ({e}); give a folder of stored groups") from e
    folders = [entry for entry in entries if (entry / GROUP_FILE).is_file()]
    archives = [entry for entry in entries if entry.name.endswith(ARCHIVE_SUFFIX) and entry.is_file()]
    if not folders and not archives:
        raise StorageError(
            f"{path}: holds no stored group; give a folder with {GROUP_FILE}, a folder of such folders, or the archive "
            "of a run (docs/grading.md)"
        )
    groups = [*map(read_folder, folders), *map(read_archive, archives)]
    seen: set[str] = set()
    for group in groups:
        if group.group_id in seen:
            raise StorageError(f"{path}: group {group.group_id!r} is there twice; give each group_id once")
        seen.add(group.group_id)
    return groups


def folder_name(trajectory_id: str) -> str:
    """The name of a trajectory's folder: its id, with what a path cannot hold percent-encoded."""
    name = trajectory_id.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return name.replace(".", "%2E") if name in (".", "..") else name


def read_folder(folder: Path) -> StoredGroup:
    """Read one group folder.

    Raises:
        StorageError: names file, field, value and remedy.
    """
    path = folder / GROUP_FILE
    described = _described(folder)
    try:
        group = _GroupFile.model_validate(described)
    except ValidationError as error:
        raise StorageError(f"{path}: {_remedied(error)}") from None
    task = _task(group.group_id, group.statement, _repository(folder), _text(folder, "reference.patch", optional=True))
    transcripts = tuple(_transcript(folder, entry.id) for entry in group.trajectories)
    labels = group.labels
    return StoredGroup(
        group_id=group.group_id,
        task=task,
        trajectories=tuple(
            _trajectory(group.group_id, entry, transcript)
            for entry, transcript in zip(group.trajectories, transcripts, strict=True)
        ),
        transcripts=transcripts,
        labels=None if labels is None else {name: _known(label) for name, label in labels.items()},
    )


def write_folder(folder: Path, group: StoredGroup) -> None:
    """Write a group in the folder layout, e.g. to label it by hand. What only a run knows (tokens, times, hidden tests)
    is left out.

    Raises:
        StorageError: it cannot be written, or the folder holds something already.
    """
    entries = [{"id": t.trajectory_id, "passed": bool(t.passed), "status": t.status.value} for t in group.trajectories]
    described: dict[str, Any] = {"group_id": group.group_id, "statement": group.task.statement, "trajectories": entries}
    if group.labels is not None:
        described["labels"] = {
            name: {"scores": list(known.scores), "flags": sorted(known.flags)} for name, known in group.labels.items()
        }
    files: dict[Path, str] = {Path("repo", path): text for path, text in group.task.files.items()}
    if outside := [path for path in group.task.files if path.startswith("/") or ".." in path.split("/")]:
        raise StorageError(f"{folder}: the task's file {outside[0]!r} lies outside its repository; it is not written")
    if group.task.reference_patch is not None:
        files[Path("reference.patch")] = group.task.reference_patch
    for transcript in group.transcripts:
        place = Path("trajectories", folder_name(transcript.trajectory_id))
        turns = [{"action": t.action, "observation": t.observation, "exit_code": t.exit_code} for t in transcript.turns]
        files[place / "patch.diff"] = transcript.patch
        files[place / "turns.jsonl"] = "".join(f"{json.dumps(turn)}\n" for turn in turns)
        files[place / "test_log.txt"] = transcript.test_log
    files[Path(GROUP_FILE)] = json.dumps(described, indent=1) + "\n"  # last: without it this is no group
    try:
        if folder.exists() and any(folder.iterdir()):
            raise StorageError(f"{folder}: is not empty; give a new folder")
        (folder / "repo").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
    except (OSError, UnicodeEncodeError) as e:
        raise StorageError(f"{folder}: cannot be written ({e}); free space or choose another folder") from e


def _described(folder: Path) -> Any:
    try:
        return json.loads(_bytes(folder, GROUP_FILE))
    except FileNotFoundError as e:
        raise StorageError(f"{e.filename}: no such file; give a group folder (docs/grading.md)") from None
    except (ValueError, RecursionError) as e:
        raise StorageError(
            f"{folder / GROUP_FILE}: not JSON ({e}); mend the file (docs/grading.md shows one)"
        ) from None


def _remedied(error: ValidationError) -> str:
    """One finding with its remedy."""
    first = error.errors(include_url=False)[0]
    kind, place = first["type"], first["loc"]
    if kind == "missing":
        return f"{'.'.join(map(str, place))} is missing; add it (docs/grading.md shows the file)"
    if kind == "extra_forbidden":
        return f"{'.'.join(map(str, place))}: unknown key; remove it (docs/grading.md lists the keys)"
    if kind == "value_error" and not place:
        return first["msg"].removeprefix("Value error, ")
    remedy = "" if ";" in first["msg"] else "; mend it"
    return finding(place, first["msg"], first["input"]) + remedy


def _known(label: _Label) -> KnownGrade:
    approach, precision, minimality, side_effects, consistency = label.scores
    return KnownGrade(
        scores=(approach, precision, minimality, side_effects, consistency),
        flags=frozenset(flag.value for flag in label.flags),
    )


def _trajectory(group_id: str, entry: _Entry, transcript: Transcript) -> Trajectory:
    return Trajectory(
        trajectory_id=entry.id,
        group_id=group_id,
        task_id=group_id,
        source="stored",
        status=entry.status,
        reward=float(entry.passed),
        passed=entry.passed,
        turns=len(transcript.turns),
        prompt_tokens=0,
        response_tokens=0,
        total_tokens=0,
        policy_versions=(),
        payload_sha256=None,
        engine_s=0.0,
        sandbox_s=0.0,
        verify_s=0.0,
        wall_s=0.0,
    )


def _task(group_id: str, statement: str, files: Mapping[str, str], reference_patch: str | None) -> Task:
    """A task of which no hidden tests are known: their word is on the trajectories already."""
    return Task(
        task_id=group_id,
        source="stored",
        kind=TaskKind.CODE,
        split=Split.HELDOUT,
        statement=statement,
        files=files,
        verifier=HiddenTests(files={}, command="true"),
        reference_patch=reference_patch,
    )


def _transcript(folder: Path, trajectory_id: str) -> Transcript:
    place = f"trajectories/{folder_name(trajectory_id)}"
    patch = _text(folder, f"{place}/patch.diff")
    assert patch is not None
    return Transcript(
        trajectory_id=trajectory_id,
        turns=tuple(_turns(folder, f"{place}/turns.jsonl")),
        patch=patch,
        test_log=_text(folder, f"{place}/test_log.txt", optional=True) or "",
    )


def _turns(folder: Path, name: str) -> Iterator[Turn]:
    path = folder / name
    for number, line in enumerate((_text(folder, name, optional=True) or "").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise StorageError(f"{path}:{number}: not JSON ({e}); write one JSON object a line") from None
        if not isinstance(row, Mapping) or not isinstance(row.get("action"), str):
            raise StorageError(f"{path}:{number}: action is missing or no text; give at least {{'action': '...'}}")
        observation, code = row.get("observation", ""), row.get("exit_code")
        if not isinstance(observation, str):
            raise StorageError(f"{path}:{number}: observation = {observation!r:.80} is no text; write it in quotes")
        if not (code is None or (isinstance(code, int) and not isinstance(code, bool))):
            raise StorageError(f"{path}:{number}: exit_code = {code!r:.80} is no whole number; give one, or null")
        yield Turn(action=row["action"], observation=observation, exit_code=code, duration_s=0.0, response_tokens=0)


def _text(folder: Path, name: str, *, optional: bool = False) -> str | None:
    """A file's text; what is not UTF-8 survives as surrogates, as it does in a sandbox's output."""
    try:
        return _bytes(folder, name).decode("utf-8", "surrogateescape")
    except FileNotFoundError as e:
        if optional:
            return None
        raise StorageError(f"{e.filename}: no such file; add it (an empty one if nothing was changed)") from None


def _bytes(folder: Path, name: str) -> bytes:
    """A plain file below a group's folder, whole.

    Raises:
        FileNotFoundError: there is none.
        StorageError: it cannot be read, is too long, is no plain file, or stands behind a link.
    """
    path = folder / name
    try:
        _refuse_links(folder, name)
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe is not waited for
        with open(handle, "rb") as file:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise StorageError(f"{path}: no plain file; put a file there")
            if about.st_size > MAX_FILE_BYTES:
                raise StorageError(f"{path}: more than {MAX_FILE_BYTES // 2**20} MiB; cut it")
            return file.read()
    except FileNotFoundError:
        raise
    except OSError as e:
        raise StorageError(f"{path}: cannot be read ({e}); make it a readable file") from e


def _refuse_links(folder: Path, name: str) -> None:
    """Raises StorageError if anything on the way from a group's folder to a file in it is a link."""
    path = folder
    for part in Path(name).parts:
        path = path / part
        if path.is_symlink():
            raise StorageError(f"{path}: a link, and those are not followed; put what it names in its place")


def _repository(group: Path) -> dict[str, str]:
    """Path -> text of every file but .git, binary files, links, and names that are no text: no grader could read it."""
    root = group / "repo"
    _refuse_links(group, "repo")
    if not root.is_dir():
        raise StorageError(f"{root}: no such folder; put the repository there that the trajectories started from")
    files: dict[str, str] = {}
    size = 0
    try:
        for folder, names, leaves in os.walk(root):
            names[:] = sorted(name for name in names if name != ".git")
            for leaf in sorted(leaves):
                path = Path(folder, leaf)
                if path.is_symlink() or not path.is_file():
                    continue
                size += path.stat().st_size
                if size > MAX_REPO_BYTES:
                    raise StorageError(
                        f"{root}: more than {MAX_REPO_BYTES // 2**20} MiB; leave out what the task does not touch"
                    )
                name = path.relative_to(root).as_posix()
                try:
                    name.encode("utf-8")
                    text = path.read_bytes().decode("utf-8")
                except UnicodeError:
                    continue
                if "\0" not in text:
                    files[name] = text
    except OSError as e:
        raise StorageError(f"{root}: cannot be read ({e}); make it readable") from e
    return files
