"""Shell commands that move files in and out of a sandbox: only bash, tar, base64 and coreutils are needed there.

Everything travels base64-encoded inside the command, so the only thing a sandbox must be able to do is run one.
"""

from __future__ import annotations

import base64
import io
import posixpath
import shlex
import tarfile
from collections.abc import Iterable, Mapping, Sequence

SCRIPT_CHARS = 120 * 1024
"""Longest command that `batch` makes; the kernel takes at most 128 KiB in one argument."""
CHUNK_CHARS = 96 * 1024
"""Largest encoded payload of one step."""
ABSENT = "-"
OTHER = "?"


def check_path(path: str) -> str:
    """The path, if it stays inside the workspace. Raises ValueError otherwise."""
    normal = posixpath.normpath(path)
    if not path or "\0" in path or normal.startswith(("/", "../")) or normal in ("..", "."):
        raise ValueError(f"{path!r} is not a file path relative to the workspace")
    return normal


def batch(steps: Iterable[tuple[str, int]]) -> list[str]:
    """Few commands that run many: each step is a command and the exit code to end with if it fails.

    Run the result in order and stop at the first exit code that is not 0; the output is that of the steps.
    """
    scripts: list[str] = []
    for command, code in steps:
        step = f"{{ {command}\n}} || exit {code}\n"
        if scripts and len(scripts[-1]) + len(step) <= SCRIPT_CHARS:
            scripts[-1] += step
        else:
            scripts.append(step)
    return scripts


def unpack_commands(files: Mapping[str, str]) -> list[str]:
    """Commands that, run in order in the workspace, write the files; the last one's exit code is 0 if all were written.

    Directories and links in the way are replaced; parents are made. Raises ValueError for a path outside the workspace.
    """
    if not files:
        return []
    paths = [check_path(path) for path in files]
    clear = (
        f'for p in {_quoted(_parents(paths))}; do if [ -L "$p" ] || [ ! -d "$p" ]; then rm -f -- "$p"; fi; done; '
        f'for p in {_quoted(paths)}; do if [ -d "$p" ]; then rm -rf -- "$p"; fi; done\n'
    )
    archive = _archive(files)
    unpack = "tar -xmf - --no-same-owner --no-same-permissions"
    if len(archive) * 4 // 3 <= CHUNK_CHARS:
        return [f"{clear}base64 -d <<'EOF' | {unpack}\n{base64.b64encode(archive).decode()}\nEOF"]
    staged = "/tmp/.unpack"
    return [*file_commands(staged, archive), f"{clear}{unpack} < {staged} && rm {staged}"]


def file_commands(path: str, content: bytes) -> list[str]:
    """Commands that write content of any length to a path of the sandbox, absolute paths included."""
    step = CHUNK_CHARS * 3 // 4
    pieces = [content[at : at + step] for at in range(0, len(content), step)] or [b""]
    target = shlex.quote(path)
    return [
        f"base64 -d {'>>' if index else '>'} {target} <<'EOF'\n{base64.b64encode(piece).decode()}\nEOF"
        for index, piece in enumerate(pieces)
    ]


def read_command(paths: Sequence[str], *, max_bytes: int) -> str:
    """A command that prints one line a path: the first `max_bytes` bytes in base64 after "=", ABSENT, or OTHER."""
    return (
        f"for p in {_quoted(check_path(path) for path in paths)}; do "
        f'if [ -f "$p" ] && [ -r "$p" ]; then printf "=%s\\n" "$(head -c {max_bytes} -- "$p" | base64 -w0)"; '
        f'elif [ -e "$p" ] || [ -L "$p" ]; then echo "{OTHER}"; else echo "{ABSENT}"; fi; done'
    )


def parse_read(output: str) -> list[bytes | str | None]:
    """One entry a line of `read_command`: the bytes, None if there is nothing, OTHER if it is no readable file."""
    entries: list[bytes | str | None] = []
    for line in output.splitlines():
        if line.startswith("="):
            entries.append(base64.b64decode(line[1:]))
        else:
            entries.append(None if line == ABSENT else OTHER)
    return entries


def _quoted(paths: Iterable[str]) -> str:
    return " ".join(shlex.quote(f"./{path}") for path in paths)


def _archive(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, content in files.items():
            data = content.encode("utf-8", errors="surrogateescape")
            entry = tarfile.TarInfo(check_path(path))
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _parents(paths: Iterable[str]) -> list[str]:
    folders: set[str] = set()
    for path in paths:
        while path := posixpath.dirname(path):
            folders.add(path)
    return sorted(folders)
