"""Which graded groups a report shows: the best, the worst, the contested, every hack and every fallback. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

EXTREMES = 8
"""Best, worst and contested groups listed."""
MAX_VIEWS = 120
"""Groups shown in full on one page."""

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a list."""

    record: Record
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupList:
    """One list of groups."""

    title: str
    entries: tuple[Entry, ...]


def group_lists(records: Sequence[Record]) -> list[GroupList]:
    """The lists that have entries. `records` are lines of groups.jsonl."""
    asked = [r for r in records if r.get("grader") is not None]
    graded = [(r, f) for r in asked if (f := _factors(r))]
    ranked = sorted(graded, key=lambda pair: fmean(pair[1]), reverse=True)
    half = min(EXTREMES, (len(ranked) + 1) // 2)
    apart = sorted(graded, key=lambda pair: max(pair[1]) - min(pair[1]), reverse=True)
    lists = [
        GroupList(title="Best", entries=tuple(_by_factor(r, f) for r, f in ranked[:half])),
        GroupList(title="Worst", entries=tuple(_by_factor(r, f) for r, f in ranked[half:][::-1][:half])),
        GroupList(title="Contested", entries=tuple(_by_factor(r, f) for r, f in apart if max(f) > min(f))[:EXTREMES]),
        GroupList(title="Hacks", entries=tuple(Entry(record=r, said=_hacks(r)) for r in asked if _hacks(r))),
        GroupList(
            title="Fallbacks",
            entries=tuple(Entry(record=r, said=r["fallback_reason"]) for r in asked if r["fallback_reason"]),
        ),
    ]
    return [one for one in lists if one.entries]


def to_show(lists: Sequence[GroupList]) -> list[Record]:
    """The groups to show in full, each once, at most MAX_VIEWS: the short lists first, then hacks, then fallbacks."""
    shown: dict[str, Record] = {}
    for one in lists:
        for entry in one.entries:
            if len(shown) < MAX_VIEWS:
                shown.setdefault(entry.record["group_id"], entry.record)
    return list(shown.values())


def _factors(record: Record) -> list[float]:
    return [float(t["factor"]) for t in record["trajectories"] if t.get("factor") is not None]


def _by_factor(record: Record, factors: Sequence[float]) -> Entry:
    tiers = sorted(t["tier"] for t in record["trajectories"] if t.get("tier"))
    given = ", ".join(f"{tiers.count(tier)} {tier}" for tier in dict.fromkeys(tiers))
    low, high = min(factors), max(factors)
    factor = f"f {low:.2f}" if low == high else f"f {low:.2f} to {high:.2f}"
    return Entry(record=record, said=f"{given}; {factor}{' capped' if record['capped'] else ''}")


def _hacks(record: Record) -> str:
    count = sum(bool(t["hack"]) for t in record["trajectories"])
    return f"{count} of {len(record['trajectories'])}" if count else ""
