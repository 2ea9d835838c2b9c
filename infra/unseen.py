"""Text from elsewhere, for a person's eyes: no character in it can move a cursor or reorder a line."""

from __future__ import annotations

import re
import unicodedata

LINE_CHARS = 300

_SPECIAL = re.compile(r"[^\x20-\x7e\n\t]")
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str, limit: int | None = None) -> str:
    """Text with control and format characters spelled out, the middle cut beyond `limit` characters."""
    if limit is not None and len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters not shown]\n{text[-half:]}"
    return _SPECIAL.sub(_spelled, text)


def one_line(text: str, limit: int = LINE_CHARS) -> str:
    """`visible` in one line, the end cut."""
    text = _SPECIAL.sub(_spelled, text.replace("\n", " ").replace("\t", "    "))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _spelled(found: re.Match[str]) -> str:
    char = found[0]
    if unicodedata.category(char) not in _UNSEEN:
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
