"""Unified diffs as `git diff` prints them, computed in process."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence

_CONTEXT = 3
_FUNCTION_LINE = re.compile(r"[A-Za-z_$]")
_FUNCTION_WIDTH = 80


def unified_diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The patch that turns one set of files (path -> content) into the other; empty if they are equal."""
    parts = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old != new:
            parts.append(_file_diff(path, old, new))
    return "".join(parts)


def added_lines(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, int]]:
    """(path, line number in the new file) of every line that the patch adds, in patch order."""
    found = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old == new or new is None:
            continue
        for tag, _, _, low, high in _opcodes(_lines(old or ""), _lines(new)):
            if tag in ("insert", "replace"):
                found += [(path, number) for number in range(low + 1, high + 1)]
    return found


def _opcodes(old: Sequence[str], new: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    return difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def _file_diff(path: str, old: str | None, new: str | None) -> str:
    header = f"diff --git a/{path} b/{path}\n"
    if old is None:
        header += "new file mode 100644\n"
    if new is None:
        header += "deleted file mode 100644\n"
    mode = " 100644" if old is not None and new is not None else ""
    header += f"index {_blob(old)}..{_blob(new)}{mode}\n"
    body = _hunks(_lines(old or ""), _lines(new or ""))
    if not body:
        return header
    source = "/dev/null" if old is None else f"a/{path}"
    target = "/dev/null" if new is None else f"b/{path}"
    return f"{header}--- {source}\n+++ {target}\n{body}"


def _hunks(old: Sequence[str], new: Sequence[str]) -> str:
    parts = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        start, stop = group[0][1], group[-1][2]
        ranges = f"-{_range(start, stop)} +{_range(group[0][3], group[-1][4])}"
        parts.append(f"@@ {ranges} @@{_function(old, start)}\n")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                parts += [_marked(" ", line) for line in old[i1:i2]]
            else:
                parts += [_marked("-", line) for line in old[i1:i2]]
                parts += [_marked("+", line) for line in new[j1:j2]]
    return "".join(parts)


def _range(start: int, stop: int) -> str:
    length = stop - start
    first = start + 1 if length else start
    return str(first) if length == 1 else f"{first},{length}"


def _function(old: Sequence[str], start: int) -> str:
    """The section heading that git prints: the last line above the hunk that starts with a letter."""
    for line in reversed(old[:start]):
        if _FUNCTION_LINE.match(line):
            return " " + line.rstrip()[:_FUNCTION_WIDTH].rstrip()
    return ""


def _marked(sign: str, line: str) -> str:
    return f"{sign}{line}" if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _blob(text: str | None) -> str:
    if text is None:
        return "0000000"
    data = text.encode("utf-8", errors="surrogateescape")
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()[:7]
