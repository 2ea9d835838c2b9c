"""The files of a repository that is too large, or too binary, to travel with its task.

A task carries only where they are: a folder, a tar file, or a commit of a git repository, on a file system that all
workers see. Each process reads them when it needs them, and keeps the last few.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from infra.errors import WorkspaceError

KEPT_TREES = 4
GIT_TIMEOUT_S = 600.0
_IGNORED = frozenset((".git", "__pycache__"))
_LINK = 0o120000
_SUBMODULE = 0o160000


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file."""

    content: bytes
    """Of a link, where it points."""
    executable: bool = False
    link: bool = False

    @property
    def text(self) -> str:
        """The content; bytes that are no UTF-8 as surrogate escapes."""
        return self.content.decode("utf-8", errors="surrogateescape")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepoTree(Mapping[str, str]):
    """Path -> content, read from where it lies; small when pickled. Bytes that are no UTF-8 are surrogate escapes.

    Links and executable files are plain files in this view; `packed` keeps them as they are. Reading raises
    WorkspaceError where the files cannot be had.
    """

    path: str
    """Folder, tar file or git repository (bare or not) on this host."""
    commit: str = ""
    """Commit, branch or tag of a git repository; empty for the files as they lie there."""
    patch: str = ""
    """Unified diff that belongs to the start of the task."""

    def __getitem__(self, path: str) -> str:
        return entries(self)[path].text

    def __iter__(self) -> Iterator[str]:
        return iter(entries(self))

    def __len__(self) -> int:
        return len(entries(self))

    def packed(self) -> bytes:
        """The files as a compressed tar archive, the same bytes each time."""
        buffer = io.BytesIO()
        with (
            gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
        ):
            for path, entry in entries(self).items():
                about = tarfile.TarInfo(path)
                about.mode = 0o755 if entry.executable else 0o644
                if entry.link:
                    about.type, about.linkname = tarfile.SYMTYPE, os.fsdecode(entry.content)
                    archive.addfile(about)
                else:
                    about.size = len(entry.content)
                    archive.addfile(about, io.BytesIO(entry.content))
        return buffer.getvalue()


@lru_cache(maxsize=KEPT_TREES)
def entries(tree: RepoTree) -> dict[str, Entry]:
    """The files of a tree as they were when this process first read them. Raises WorkspaceError."""
    return read_entries(tree)


def read_entries(tree: RepoTree) -> dict[str, Entry]:
    """The files of a tree by path, sorted. Raises WorkspaceError."""
    try:
        found = dict(sorted(_patched(_read(tree), tree.patch).items()))
    except (OSError, tarfile.TarError, subprocess.SubprocessError, ValueError) as error:
        where = f"{tree.path} at {tree.commit}" if tree.commit else tree.path
        raise WorkspaceError(
            f"the repository {where} cannot be read ({error}); it must lie there on every node that runs rollouts"
        ) from error
    if not found:
        raise WorkspaceError(
            f"the repository {tree.path} holds no files; give a folder, a tar file or a git repository"
        )
    return found


def _read(tree: RepoTree) -> dict[str, Entry]:
    path = Path(tree.path)
    if tree.commit:
        return _read_commit(path, tree.commit)
    return _read_folder(path) if path.is_dir() else _read_tar(path)


def _read_folder(folder: Path) -> dict[str, Entry]:
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _IGNORED]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        for name in [*links, *names]:
            file = Path(place, name)
            key = file.relative_to(folder).as_posix()
            if file.is_symlink():
                found[key] = Entry(content=os.fsencode(os.readlink(file)), link=True)
            elif file.is_file():
                found[key] = Entry(content=file.read_bytes(), executable=bool(file.stat().st_mode & stat.S_IXUSR))
    return found


def _read_tar(file: Path) -> dict[str, Entry]:
    found = {}
    with tarfile.open(file) as archive:
        for member in archive:
            name = os.path.normpath(member.name)
            if name.startswith(("/", "../")) or _IGNORED & set(name.split("/")):
                continue
            if member.issym():
                found[name] = Entry(content=os.fsencode(member.linkname), link=True)
            elif (data := archive.extractfile(member)) is not None:
                found[name] = Entry(content=data.read(), executable=bool(member.mode & stat.S_IXUSR))
    tops = {name.split("/")[0] for name in found}
    if len(tops) == 1 and all("/" in name for name in found):
        # As forges pack a repository: everything in one folder that carries its name.
        return {name.split("/", 1)[1]: entry for name, entry in found.items()}
    return found


def _read_commit(repository: Path, commit: str) -> dict[str, Entry]:
    """Blobs as they are: `git archive` would leave out and change what attributes name."""
    listing = _git(repository, "ls-tree", "-r", "-z", "--full-tree", commit)
    rows = []
    for line in filter(None, listing.split(b"\0")):
        about, _, name = line.partition(b"\t")
        mode, _, identity = about.split(b" ")
        if int(mode, 8) != _SUBMODULE:
            rows.append((os.fsdecode(name), int(mode, 8), identity))
    blobs = _git(repository, "cat-file", "--batch", stdin=b"".join(identity + b"\n" for _, _, identity in rows))
    found, at = {}, 0
    for path, kind, _ in rows:
        end = blobs.index(b"\n", at)
        size = int(blobs[at:end].split(b" ")[2])
        content = blobs[end + 1 : end + 1 + size]
        at = end + 1 + size + 1
        found[path] = Entry(content=content, executable=bool(kind & stat.S_IXUSR), link=kind == _LINK)
    return found


def _patched(found: dict[str, Entry], patch: str) -> dict[str, Entry]:
    if not patch.strip():
        return found
    with tempfile.TemporaryDirectory() as place:
        for name, entry in found.items():
            file = Path(place, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            if entry.link:
                file.symlink_to(os.fsdecode(entry.content))
            else:
                file.write_bytes(entry.content)
                file.chmod(0o755 if entry.executable else 0o644)
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        data = patch.encode("utf-8", errors="surrogateescape")
        # Away from any repository around the temporary folder, which git would take the paths to be of.
        done = subprocess.run(
            command, cwd=place, input=data, capture_output=True, timeout=GIT_TIMEOUT_S, env=_environment(place)
        )
        if done.returncode != 0:
            raise ValueError(f"the patch of its start does not apply: {done.stderr.decode(errors='replace').strip()}")
        return _read_folder(Path(place))


def _git(repository: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", str(repository), *arguments],
        input=stdin, capture_output=True, timeout=GIT_TIMEOUT_S, env=_environment(str(repository.parent)),
    )  # fmt: skip
    if done.returncode != 0:
        raise ValueError(done.stderr.decode(errors="replace").strip()[-500:])
    return done.stdout


def _environment(ceiling: str) -> dict[str, str]:
    """No settings of the user or the host, no prompts, no repository above."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_CEILING_DIRECTORIES": os.path.realpath(os.path.dirname(ceiling)),
    }
