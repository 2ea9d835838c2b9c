"""The patch that undoes a patch."""

from __future__ import annotations

import re

_HUNK = re.compile(r"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)", re.DOTALL)
_INDEX = re.compile(r"index (\w+)\.\.(\w+)(.*)", re.DOTALL)
_SWAPPED = {
    "new file mode": "deleted file mode",
    "deleted file mode": "new file mode",
    "old mode": "new mode",
    "new mode": "old mode",
    "rename from": "rename to",
    "rename to": "rename from",
}


def reversed_diff(patch: str) -> str:
    """A unified text diff, as `git diff` prints it, turned around. Lines inside a hunk keep their order."""
    out: list[str] = []
    left = [0, 0]  # old and new lines that the current hunk still has
    source = ""
    for line in patch.splitlines(keepends=True):
        if left[0] > 0 or left[1] > 0 or line.startswith("\\"):
            out.append(_line(line, left))
        elif match := _HUNK.fullmatch(line):
            left = [_length(match[1]), _length(match[2])]
            out.append(f"@@ -{match[2]} +{match[1]} @@{match[3]}")
        elif line.startswith("--- "):
            source = line[4:]
        elif line.startswith("+++ "):
            out += [f"--- {_side(line[4:], 'a')}", f"+++ {_side(source, 'b')}"]
        else:
            out.append(_header(line))
    return "".join(out)


def _line(line: str, left: list[int]) -> str:
    mark, rest = line[:1], line[1:]
    if mark == "\\":
        return line
    left[0] -= mark != "+"
    left[1] -= mark != "-"
    return {"-": "+", "+": "-"}.get(mark, mark) + rest


def _header(line: str) -> str:
    if match := _INDEX.fullmatch(line):
        return f"index {match[2]}..{match[1]}{match[3]}"
    for name, other in _SWAPPED.items():
        if line.startswith(f"{name} "):
            return other + line[len(name) :]
    return line


def _length(span: str) -> int:
    return int(span.partition(",")[2] or 1)


def _side(path: str, side: str) -> str:
    return f"{side}/{path[2:]}" if path[:2] in ("a/", "b/") else path
