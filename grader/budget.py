"""Sharing a budget of characters evenly, and cutting text to its share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


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


def clip_lines(lines: Sequence[T], limit: int, render: Callable[[T], str] = str) -> list[str]:
    """Keep whole lines from the head and the tail so that they take at most `limit` characters, newlines included.

    What was left out is said in one line "[N lines cut]", which counts too. A limit too small for even that line
    leaves nothing. Only lines that may be kept are rendered, however many there are.
    """
    if len(lines) <= limit:  # a line takes one character at least
        whole = [render(line) for line in lines]
        if sum(len(line) + 1 for line in whole) <= limit:
            return whole
    room = limit - len(f"[{len(lines)} lines cut]") - 1
    if room < 0:
        return []
    head: list[str] = []
    tail: list[str] = []
    while len(head) + len(tail) < len(lines):
        from_head = len(head) <= len(tail)
        line = render(lines[len(head)] if from_head else lines[len(lines) - 1 - len(tail)])
        if len(line) + 1 > room:
            break
        room -= len(line) + 1
        (head if from_head else tail).append(line)
    return [*head, f"[{len(lines) - len(head) - len(tail)} lines cut]", *reversed(tail)]
