"""What a template of a buggy function is: source with placeholders and one marked fragment that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from envs.names import Draw

_MARK = re.compile(r"<<(.+?)>>")
_HOLE = re.compile(r"\$([a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One function template of a bug kind; belongs to one split.

    Placeholders: `$h` is the function, `$c` and `$d` two different numbers, `$k` and `$j` words, the others names.
    """

    name: str
    kind: str
    head: str
    """Parameter list as written in the `def` line."""
    body: tuple[str, ...]
    """Lines below the `def` line. The wrong fragment stands in <<...>>, here or in `head`, and is the first such text
    on its line."""
    fix: str
    """What the fragment should be."""
    alt: str
    """The whole line, without indentation, in an equivalent but longer form."""
    wrong: str
    """A plausible fragment that does not solve the task."""
    call: str
    """The call as call sites write it, e.g. "$h($x, $n)"."""
    call_fix: str | None
    """An expression for call sites that makes up for the bug without touching the function; None if there is none."""
    args: Callable[[Draw], tuple[object, ...]]
    """Random arguments of a call site, one for each distinct name in `call` in order."""
    symptoms: tuple[str, ...]
    """What a user would say, in words; `$n` names as in the code."""
    fallback: str | None = None
    """For bugs that crash: the value that an except clause would return."""


def fill(text: str, names: Mapping[str, str]) -> str:
    """Replace the placeholders."""
    return _HOLE.sub(lambda match: names[match.group(1)], text)


def holes(text: str) -> list[str]:
    """Placeholder letters in order of first appearance."""
    return list(dict.fromkeys(_HOLE.findall(text)))


def marked(line: str) -> str | None:
    """The fragment marked as wrong, if it is on this line."""
    match = _MARK.search(line)
    return match.group(1) if match else None


def unmark(line: str, replacement: str | None = None) -> str:
    """The line with the marked fragment as it is, or with another in its place."""
    return _MARK.sub(lambda match: match.group(1) if replacement is None else replacement, line, count=1)
