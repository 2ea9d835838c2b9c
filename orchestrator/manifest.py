"""`manifest.json` of a checkpoint: size and SHA-256 of every file in it, written last.

What it says is what was written; a file that was cut, changed or lost since is refused by its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from infra.errors import StorageError

MANIFEST = "manifest.json"
READERS = 4
"""Files that are read at once; hashing leaves the interpreter free."""
_REMEDY = "use another checkpoint, or restore this one from a copy"


class FileFacts(BaseModel):
    """One file as it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: NonNegativeInt
    sha256: str


_FILES = TypeAdapter(dict[str, FileFacts])


def write_manifest(folder: Path) -> None:
    """Write down every file under `folder`, and put all of it on the disk. Takes as long as reading them: call it in a
    thread. Raises OSError."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    with ThreadPoolExecutor(READERS) as readers:
        facts = dict(zip((p.relative_to(folder).as_posix() for p in paths), readers.map(_facts, paths), strict=True))
    text = json.dumps({name: f.model_dump() for name, f in facts.items()}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in [*paths, folder / MANIFEST, *(p for p in folder.rglob("*") if p.is_dir()), folder]:
        sync(path)


def read_manifest(folder: Path) -> Mapping[str, FileFacts]:
    """Path inside the folder -> what was written there. A checkpoint may come from elsewhere, so no path leads out of
    the folder, or of what it is copied to.

    Raises:
        StorageError: it is missing or damaged.
    """
    path = folder / MANIFEST
    try:
        files = _FILES.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise StorageError(f"{path}: is missing, so nothing says whether this checkpoint is whole; {_REMEDY}") from None
    except OSError as e:
        raise StorageError(f"{path}: cannot be read ({e}); {_REMEDY}") from e
    except ValidationError as e:
        raise StorageError(f"{path}: damaged ({e.errors()[0]['msg']}); {_REMEDY}") from None
    for name in files:
        if "\0" in name or ".." in name.split("/") or PurePosixPath(name).as_posix() != name or name.startswith("/"):
            raise StorageError(f"{path}: damaged ({name[:200]!r} is no path inside the checkpoint); {_REMEDY}")
    return files


def verify(folder: Path, *, under: str = "") -> None:
    """Hold the files of a checkpoint against its manifest; with `under`, only those in that folder of it. Reads all of
    them in pieces: call it in a thread where an event loop runs.

    Raises:
        StorageError: names the first file that is not as it was written, and how it differs.
    """
    wanted = {name: f for name, f in read_manifest(folder).items() if name.startswith(f"{under}/" if under else "")}
    if not wanted:
        raise StorageError(f"{folder / MANIFEST}: damaged (names no file in {under or 'it'}); {_REMEDY}")
    _refuse(filter(None, (_size_problem(folder / name, facts) for name, facts in wanted.items())))
    with ThreadPoolExecutor(READERS) as readers:
        _refuse(filter(None, readers.map(lambda item: _digest_problem(folder / item[0], item[1]), wanted.items())))


def _refuse(problems: Iterable[str]) -> None:
    for problem in problems:
        raise StorageError(f"{problem}; {_REMEDY}")


def _size_problem(path: Path, facts: FileFacts) -> str | None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path}: is missing"
    except OSError as e:
        return f"{path}: cannot be read ({e})"
    return None if size == facts.bytes else f"{path}: has {size} bytes, {facts.bytes} were written"


def _digest_problem(path: Path, facts: FileFacts) -> str | None:
    try:
        now = _facts(path)
    except OSError as e:
        return f"{path}: cannot be read ({e})"
    return None if now.sha256 == facts.sha256 else f"{path}: its content is not what was written (SHA-256 differs)"


def _facts(path: Path) -> FileFacts:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFacts(bytes=file.tell(), sha256=digest)


def sync(path: Path) -> None:
    """What was written to a file or folder is on the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
