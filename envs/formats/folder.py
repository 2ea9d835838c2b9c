"""Folders of tasks over one's own repositories: task.toml, statement.md, and a repository."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.schema import FolderSource
from envs.formats.records import (
    Broken,
    Finding,
    Listing,
    Record,
    checked_diff,
    checked_id,
    code_task,
    read_folder_files,
)
from envs.task import HiddenTests, Image, RepositoryTests, Results, Split
from envs.tree import RepoTree, read_entries
from infra.errors import WorkspaceError

SMALL_BYTES = 256 * 1024
"""Repositories of plain text up to this size travel with the task; larger ones are read where they lie."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Repository(_Section):
    path: str = "repo"
    commit: str = ""


class _Image(_Section):
    name: Annotated[str, Field(min_length=1)]
    folder: Annotated[str, Field(pattern="^/.")]
    memory_mib: Annotated[int, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None


class _Tests(_Section):
    modules: list[str] = []
    command: str = ""
    results: Literal["exit_code", "log", "junit", "json", "reward_file"] = "exit_code"
    log_parser: str = ""
    must_pass: list[str] = []
    hidden: str = "hidden"
    timeout_s: Annotated[float, Field(gt=0, strict=False)] | None = None


class _About(_Section):
    id: str | None = None
    split: Literal["train", "heldout"] | None = None
    labels: dict[str, str] = {}
    repository: _Repository = _Repository()
    image: _Image | None = None
    tests: _Tests


def read_folders(folder: Path, config: FolderSource) -> Listing:
    """The tasks of a folder: itself one, or each folder in it."""
    inside = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    places = [folder] if is_task_folder(folder) else [path for path in inside if is_task_folder(path)]
    records: list[Record] = []
    findings: list[Finding] = []
    seen: dict[str, str] = {}
    for place in places:
        try:
            record = _record(place, config)
            if (first := seen.setdefault(record.record_id, place.name)) != place.name:
                raise Broken("id", record.record_id, f"is also the id of {first}; give each task its own")
            records.append(record)
        except Broken as broken:
            findings.append(broken.at(f"{place}/task.toml", place.name))
    return Listing(path=str(folder), records=records, findings=findings)


def is_task_folder(folder: Path) -> bool:
    """Whether a folder is one task of this kind."""
    return (folder / "task.toml").is_file() and (folder / "statement.md").is_file()


def _record(folder: Path, config: FolderSource) -> Record:
    about = _about(folder / "task.toml")
    record_id = checked_id(about.id or folder.name, "id")
    statement = _text(folder / "statement.md")
    reference = folder / "reference.patch"
    image = about.image
    return Record(
        record_id=record_id,
        place=str(folder),
        split=None if about.split is None else Split(about.split),
        task=code_task(
            record_id,
            statement,
            _files(folder, about),
            _tests(folder, about.tests, config),
            image=None if image is None else Image(**image.model_dump()),
            reference_patch=checked_diff(_text(reference), "reference.patch") if reference.is_file() else None,
            meta=about.labels,
        ),
    )


def _about(file: Path) -> _About:
    try:
        return _About.model_validate(tomllib.loads(_text(file)))
    except tomllib.TOMLDecodeError as error:
        raise Broken("task.toml", None, f"is no TOML ({error})") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        value = None if first["type"] == "missing" else first["input"]
        raise Broken(field, value, f"{first['msg'][0].lower()}{first['msg'][1:]}") from None


def _files(folder: Path, about: _About) -> dict[str, str] | RepoTree:
    place = (folder / about.repository.path).resolve()
    if not place.exists():
        if about.image is not None and "path" not in about.repository.model_fields_set:
            return {}
        raise Broken("repository.path", about.repository.path, "is not there; give a folder, a tar file or a clone")
    tree = RepoTree(path=str(place), commit=about.repository.commit)
    if not tree.commit and (place / ".git").exists():
        raise Broken("repository.commit", None, "is missing; name the commit of the clone that the task starts from")
    try:
        found = read_entries(tree)
    except WorkspaceError as error:
        raise Broken("repository", str(place), error.message) from None
    plain = not any(entry.link or entry.executable for entry in found.values())
    if plain and sum(len(entry.content) for entry in found.values()) <= SMALL_BYTES:
        return {path: entry.text for path, entry in found.items()}
    return tree


def _tests(folder: Path, about: _Tests, config: FolderSource) -> HiddenTests:
    hidden = folder / about.hidden
    if "hidden" in about.model_fields_set and not hidden.is_dir():
        raise Broken("tests.hidden", about.hidden, "is no folder; give the folder of the hidden tests")
    files = read_folder_files(hidden)
    timeout_s = about.timeout_s or config.test_timeout_s
    if about.modules:
        _nothing_else(about)
        command = f"python3 -m unittest -q {' '.join(about.modules)}"
        return HiddenTests(files=files, command=command, modules=tuple(about.modules), timeout_s=timeout_s)
    if not about.command.strip():
        raise Broken("tests.command", None, "is missing; give a command, or the unittest modules to run as modules")
    results = Results(about.results)
    if about.must_pass and results in (Results.EXIT_CODE, Results.REWARD_FILE):
        raise Broken("tests.must_pass", about.must_pass, "needs a status for each test; set results to junit or log")
    if results in (Results.JUNIT, Results.JSON) and "GAGAR_REPORT" not in about.command:
        raise Broken("tests.command", about.command, "writes no report; let it write to $GAGAR_REPORT")
    return RepositoryTests(
        files=files,
        command=about.command,
        timeout_s=timeout_s,
        results=results,
        parser=about.log_parser,
        must_pass=tuple(about.must_pass),
    )


def _nothing_else(about: _Tests) -> None:
    for name in ("command", "results", "log_parser", "must_pass"):
        if name in about.model_fields_set:
            value: Any = getattr(about, name)
            raise Broken(f"tests.{name}", value, "has no effect beside modules; remove one of them")


def _text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Broken(file.name, None, f"cannot be read ({error})") from None
    if not text.strip():
        raise Broken(file.name, None, "is empty")
    return text
