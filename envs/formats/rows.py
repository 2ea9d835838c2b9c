"""Rows of JSON lines and parquet files, and the repositories that belong to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from envs.formats.hub import read_hub
from envs.formats.records import Broken, Finding, Listing, Record, shown
from envs.tree import RepoTree

_TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")


def read_rows(file: Path | str) -> Iterator[tuple[int, Mapping[str, Any] | Broken]]:
    """Line (or row) number, counted from 1, and the row, or what is wrong with it; text is a data set of the Hub.

    Raises ConfigError for a file that cannot be read at all.
    """
    if isinstance(file, str):
        yield from enumerate(read_hub(file), 1)
        return
    if file.suffix == ".parquet":
        yield from enumerate(_read_parquet(file), 1)
        return
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _row(line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); give a file of JSON lines or a .parquet file") from None


def _row(line: str) -> Mapping[str, Any] | Broken:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return Broken(f"column {error.colno}", line.strip(), f"is no JSON ({error.msg}); give one object a line")
    return row if isinstance(row, dict) else Broken("line", row, "must be an object of fields")


def _read_parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"{file}: parquet needs pyarrow, which is not installed; pip install --no-deps -r "
            "requirements/tasks.txt, or give JSON lines"
        ) from None
    try:
        with parquet.ParquetFile(file) as table:
            for part in table.iter_batches(batch_size=64):
                for row in part.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}  # a column that others have
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise ConfigError(f"{file}: cannot be read as parquet ({error})") from None


def list_rows(file: Path | str, make: Callable[[Mapping[str, Any], str], Record], id_field: str) -> Listing:
    """Every row as a record.

    Args:
        make: row and place -> record; raises Broken.
        id_field: where the id of a broken row stands.
    """
    records: list[Record] = []
    findings: list[Finding] = []
    places: dict[str, str] = {}
    for number, row in read_rows(file):
        place = f"{file}:{number}"
        if isinstance(row, Broken):
            findings.append(row.at(place, ""))
            continue
        try:
            record = make(row, place)
            if (first := places.setdefault(record.record_id, place)) != place:
                raise Broken(id_field, record.record_id, f"is also the id of {first}; give each record its own")
        except Broken as broken:
            identity = row.get(id_field)
            findings.append(broken.at(place, identity if isinstance(identity, str) else ""))
        else:
            records.append(record)
    return Listing(path=str(file), records=records, findings=findings)


def names_of(row: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """A list of names, or the same as a JSON string, from the first of the fields that the row has. Raises Broken."""
    field = next((field for field in fields if row.get(field) is not None), None)
    if field is None:
        raise Broken(fields[0], None, "is missing; give a list of tests")
    value = row[field]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            raise Broken(field, value, "is neither a list nor a list in JSON") from None
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise Broken(field, value, "must be a list of text")
    return tuple(value)


def find_repository(repos: str | None, record_id: str, repo: str, commit: str, patch: str = "") -> RepoTree | None:
    """The files of a record: REPOS/ID (folder), REPOS/ID.tar[.gz], or REPOS/OWNER__NAME[.git] at the commit; None
    without a folder of repositories. Raises Broken if it holds none of these."""
    if repos is None:
        return None
    folder = Path(repos)
    if (folder / record_id).is_dir():
        return RepoTree(path=str(folder / record_id), patch=patch)
    for ending in _TAR_ENDINGS:
        if (folder / f"{record_id}{ending}").is_file():
            return RepoTree(path=str(folder / f"{record_id}{ending}"), patch=patch)
    flat = repo.replace("/", "__")
    for name in (flat, f"{flat}.git"):
        if flat and (folder / name).is_dir():
            if not commit:
                raise Broken("base_commit", None, f"is missing; without it nobody knows what to take from {name}")
            return RepoTree(path=str(folder / name), commit=commit, patch=patch)
    raise Broken(
        "repo", repo, f"is not in {shown(repos)}; put there {record_id}/, {record_id}.tar.gz or a clone {flat}.git"
    )
