"""The tree that a patch leaves, computed in memory: no git is run on what a policy wrote, and no path is ever opened.

Strict where git is lenient: a hunk must match at exactly the line it names. What does not is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidiff.patch import Hunk, PatchedFile, PatchSet

Tree = Mapping[str, str | None]
"""Path -> content; None for what is not text (binary files, submodules)."""

MAX_LINES = 20_000
"""Patches beyond this are not applied here: parsing them would keep everybody waiting."""
_FILE_START = re.compile(r"^(?=diff --git )", re.MULTILINE)
_HEADER = "diff --git "
_SECOND_NAME = re.compile(r' "?b/')
_MOVED = re.compile(r"(?:rename|copy) (from|to) (.+)")
_ESCAPE = re.compile(r"\\([0-7]{3}|.)", re.DOTALL)
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_NULL = "/dev/null"


class PatchError(ValueError):
    """The patch does not parse, or does not fit the files."""


def sections(patch: str) -> list[str]:
    """The patch cut into its files, header lines included."""
    return [part for part in _FILE_START.split(patch) if part.strip()]


def apply_patch(files: Tree, patch: str) -> dict[str, str | None]:
    """The files after a unified diff.

    Raises:
        PatchError: see there.
    """
    if patch.count("\n") > MAX_LINES:
        raise PatchError(f"the patch has more than {MAX_LINES} lines")
    tree = dict(files)
    for section in sections(patch):
        for file in parse_section(section):
            _apply_file(tree, file)
    return tree


def parse_section(section: str) -> PatchSet:
    """One file of a patch.

    Raises:
        PatchError: it does not parse.
    """
    from unidiff.errors import UnidiffParseError
    from unidiff.patch import PatchSet

    names = _ambiguous_names(section)
    try:
        if names is None:
            return PatchSet.from_string(section)
        files = PatchSet.from_string(_renamed(section))
    except (UnidiffParseError, ValueError) as error:
        raise PatchError(f"the patch does not parse: {error}") from None
    for file in files:
        file.source_file, file.target_file = (
            file.source_file if file.source_file == _NULL else names[0],
            file.target_file if file.target_file == _NULL else names[1],
        )
    return files


def _ambiguous_names(section: str) -> tuple[str, str] | None:
    """The two names of a section whose first line can be read in several ways ("a/x b/y b/x b/y"): prefixed and quoted
    as git wrote them. None where there is one way to read it, or no telling which is right.

    A policy can name a folder "x b": what lies in it must be read and cited like anything else.
    """
    first, *rest = section.partition("\n@@ ")[0].split("\n")
    if not first.startswith(_HEADER) or len(_SECOND_NAME.findall(first)) < 2:
        return None
    sides = {line[:4]: line[4:].partition("\t")[0] for line in rest if line.startswith(("--- ", "+++ "))}
    old, new = sides.get("--- ", _NULL), sides.get("+++ ", _NULL)
    if (old, new) != (_NULL, _NULL):
        return (old if old != _NULL else new), (new if new != _NULL else old)
    moved = {found[1]: found[2] for line in rest if (found := _MOVED.fullmatch(line))}
    if moved.keys() == {"from", "to"}:
        return _prefixed("a/", moved["from"]), _prefixed("b/", moved["to"])
    both = first.removeprefix(_HEADER)
    old, space, new = both[: len(both) // 2], both[len(both) // 2], both[len(both) // 2 + 1 :]
    same = space == " " and old.replace("a/", "", 1) == new.replace("b/", "", 1)
    return (old, new) if same else None


def _prefixed(prefix: str, name: str) -> str:
    return f'"{prefix}{name[1:]}' if name.startswith('"') else f"{prefix}{name}"


def _renamed(section: str) -> str:
    """A section with one plain name for the file, whatever its own are."""
    head, mark, body = section.partition("\n@@ ")
    lines = [f"{_HEADER}a/file b/file", *head.split("\n")[1:]]
    for i, line in enumerate(lines):
        if line.startswith(("--- ", "+++ ")) and line[4:].partition("\t")[0] != _NULL:
            lines[i] = f"{line[:4]}{'a' if line[0] == '-' else 'b'}/file"
    return "\n".join(lines) + mark + body


def _apply_file(tree: dict[str, str | None], file: PatchedFile) -> None:
    source, target = _path(file.source_file), _path(file.target_file)
    info = [str(line) for line in file.patch_info or ()]
    old: str | None = ""
    if source is not None:
        if source not in tree:
            raise PatchError(f"{source} does not exist")
        old = tree[source]
    elif target in tree:
        raise PatchError(f"{target} exists already")
    binary = file.is_binary_file or file.is_submodule or any(line.startswith("GIT binary patch") for line in info)
    if file and (old is None or binary):
        raise PatchError(f"{source or target} is not text")
    new = None if binary or old is None else _apply_hunks(old, file)
    copied = any(line.startswith("copy from ") for line in info)
    if source is not None and source != target and not copied:
        del tree[source]
    if target is not None:
        tree[target] = new


def _apply_hunks(old: str, file: PatchedFile) -> str:
    lines = old.split("\n")
    lines = [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    result: list[str] = []
    at = 0
    for hunk in file:
        start = hunk.source_start - 1 if hunk.source_length else hunk.source_start
        if not at <= start <= len(lines):
            raise PatchError(f"a change of {file.path} stands at line {hunk.source_start}, which is not there")
        result += lines[at:start]
        at = start
        for kind, text in _changes(hunk):
            if kind != "+":
                if at >= len(lines) or lines[at] != text:
                    raise PatchError(f"line {at + 1} of {file.path} is not what the patch says")
                at += 1
            if kind != "-":
                result.append(text)
    result += lines[at:]
    return "".join(result)


def _changes(hunk: Hunk) -> list[tuple[str, str]]:
    """("+" | "-" | " ", line with its newline, if it has one)."""
    changes: list[tuple[str, str]] = []
    for line in hunk:
        if line.line_type == "\\" and changes:
            kind, text = changes[-1]
            changes[-1] = kind, text.removesuffix("\n")
        elif line.line_type in ("+", "-", " "):
            changes.append((line.line_type, line.value))
    return changes


def _path(name: str) -> str | None:
    """A path as git wrote it, prefix and quotes taken off; None for /dev/null."""
    if name == _NULL:
        return None
    if len(name) >= 2 and name[0] == name[-1] == '"':
        name = unquote(name[1:-1])
    return name[2:] if name[:2] in ("a/", "b/") else name


def unquote(name: str) -> str:
    r"""Undo git's quoting of a file name (`\303\244`, `\n`, `\"`)."""
    raw = bytearray()
    end = 0
    for found in _ESCAPE.finditer(name):
        raw += name[end : found.start()].encode("utf-8", "surrogateescape")
        code = found[1]
        if len(code) == 3:
            raw.append(int(code, 8) & 0xFF)
        else:
            raw += bytes([_ESCAPES[code]]) if code in _ESCAPES else code.encode("utf-8", "surrogateescape")
        end = found.end()
    raw += name[end:].encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "surrogateescape")
