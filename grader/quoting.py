"""Text from outside, made harmless before a model reads it.

The policy wrote patches, file names, commands and whatever its code prints. In our texts it stands behind a mark of our
own on every line, and what could pose as our headings, our tags or chat markup is broken by one visible character.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

LINE_CHARS = 400
"""Longest line that is shown; of a longer one the head and the tail stay."""

COMPACT_LINE_CHARS = 120
"""The same for the compact style: a small model loses its thread in a line that goes on."""

_BROKEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories nobody sees: control and format characters, surrogates, private use, separators of lines."""
_SPECIAL = re.compile(r"[^\x20-\x7e\n\t]")
_HEADING = re.compile(r"^([^\S\n]*+)##", re.MULTILINE)
_TAG = re.compile(
    r"[<\uff1c](?=\s*+/?\s*+(?:[|\uff5c]|data\b)|/?s>|"
    r"/?(?:think\w*|tools?|tool_\w+|function\w*|invoke|parameters?|system|user|assistant|human|turn|start_\w+|end_\w+|"
    r"im_\w+|begin_\w+|bos|eos|eot|sop|eop|pad|unk)(?:[\s>=/]|$))",
    re.IGNORECASE | re.MULTILINE,
)
_BRACKET = re.compile(r"\[(?=/?(?:INST|SYS|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_\w+|gMASK|THINK|BOS|EOS)\])")


def neutralise(text: str) -> str:
    """Text without invisible characters, chat markup, headings (##) or tags of ours; newlines and tabs stay.

    Idempotent; ordinary code comes out as it went in.
    """
    text = _SPECIAL.sub(_visible, text)
    return _BRACKET.sub(r"[\\", _TAG.sub(r"<\\", _HEADING.sub(r"\1\\##", text)))


def _visible(found: re.Match[str]) -> str:
    char = found[0]
    return "?" if unicodedata.category(char) in _BROKEN else char


def one_line(text: str, limit: int = LINE_CHARS) -> str:
    """One line of harmless text: newlines become "?", and beyond `limit` characters the middle is left out.

    (What is broken in it may add a few characters to that.)
    """
    if len(text) > limit:
        mark = f" [{len(text)} characters, cut] "
        half = max(limit - len(mark), 0) // 2
        text = f"{text[:half]}{mark}{text[len(text) - half :]}"
    return neutralise(text.replace("\n", "?"))


def word(text: str, limit: int) -> str:
    """One harmless word: whitespace becomes "?", the end is cut."""
    text = re.sub(r"\s", "?", one_line(text, max(limit * 4, LINE_CHARS)))
    return text if len(text) <= limit else text[: max(limit - 3, 0)] + "..."


def frame(label: str, lines: Iterable[str]) -> list[str]:
    """Lines between the full style's tags."""
    return [f"<data {label}>", *lines, f"</data {label}>"]
