"""Sharing a budget of characters evenly, and cutting text to its share. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def fair_shares(lengths: Sequence[int], budget: int) -> list[int]:
    """How much each piece may keep, so that the sum stays within the budget and no piece is favoured.

    Whoever needs less than an even part leaves the rest to the others; those that do not fit get equal parts.
    """
    shares = [0] * len(lengths)
    left, waiting = max(budget, 0), sorted(range(len(lengths)), key=lambda i: lengths[i])
    while waiting:
        part = left // len(waiting)
        index = waiting.pop(0)
        shares[index] = min(lengths[index], part)
        left -= shares[index]
    return shares


def clip_lines(lines: Sequence[str], limit: int) -> list[str]:
    """Keep whole lines from the head and the tail so that they take at most `limit` characters, newlines included.

    What was left out is said in one line "[N lines cut]", which counts too. A limit too small for even that line
    leaves nothing.
    """
    if sum(len(line) + 1 for line in lines) <= limit:
        return list(lines)
    room = limit - len(f"[{len(lines)} lines cut]") - 1
    if room < 0:
        return []
    first, last = 0, len(lines)
    from_head = True
    while first < last:
        line = lines[first] if from_head else lines[last - 1]
        if len(line) + 1 > room:
            break
        room -= len(line) + 1
        if from_head:
            first += 1
        else:
            last -= 1
        from_head = not from_head
    return [*lines[:first], f"[{last - first} lines cut]", *lines[last:]]


def clip_text(text: str, limit: int) -> str:
    """One line's worth of text: the head, with "..." where it was cut."""
    if len(text) <= limit:
        return text
    return text[: max(limit - 3, 0)] + "..."
