"""Tables for files that people read as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; texts that somebody chose go through `cell` first."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def cell(text: str) -> str:
    """Any text, in one cell of one line."""
    return " ".join(text.split()).replace("|", "\\|")
