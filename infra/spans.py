"""Spans of time and what they say about a step: which work ran beside which. Pure; seconds on one monotonic clock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Interval = tuple[float, float]

ROLLOUT = "rollout"
QUEUE = "grade_queue"
"""A complete group waits for a free slot of a grader."""
GRADE = "grade"
CANARY = "canary"
"""The grading of a stored group with known labels: it takes the graders' time, and is no group of the run."""
LEARN = "learn"
PUBLISH = "publish"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work."""

    name: str
    start_s: float
    end_s: float
    """For work that was still running when the spans were taken: that moment."""
    attrs: Mapping[str, str | int | float] = field(default_factory=dict)
    """Labels; rollout and grade spans carry `group_id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """How much of the grading in a window ran while rollouts of other groups did."""

    grading_s: float
    """Seconds of grading, summed over groups."""
    overlapped_s: float
    """The part of it during which at least one rollout of another group ran."""
    graded_groups: int
    overlapped_groups: int

    @property
    def share(self) -> float | None:
        """overlapped_s / grading_s; None if nothing was graded."""
        return self.overlapped_s / self.grading_s if self.grading_s > 0.0 else None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones in order; empty ones vanish."""
    out: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def length(disjoint: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def clipped(spans: Iterable[Span], name: str, window: Interval) -> list[Interval]:
    """Intervals of the spans called `name`, cut to the window."""
    low, high = window
    cut = ((max(s.start_s, low), min(s.end_s, high)) for s in spans if s.name == name)
    return [(start, end) for start, end in cut if end > start]


def without(disjoint: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """What of the first remains outside the second; both disjoint and in order."""
    out: list[Interval] = []
    for start, end in disjoint:
        for low, high in taken:
            if high <= start or low >= end:
                continue
            if low > start:
                out.append((start, low))
            start = max(start, high)
        if end > start:
            out.append((start, end))
    return out


class _Cover:
    """Answers how much of an interval a union of intervals covers, in logarithmic time."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._union = merged(intervals)
        self._starts = [start for start, _ in self._union]
        self._before = [0.0]
        for start, end in self._union:
            self._before.append(self._before[-1] + end - start)

    def upto(self, t: float) -> float:
        """Covered length left of `t`."""
        i = bisect_right(self._starts, t)
        if i == 0:
            return 0.0
        start, end = self._union[i - 1]
        return self._before[i - 1] + min(t, end) - start

    def within(self, interval: Interval) -> float:
        return self.upto(interval[1]) - self.upto(interval[0])


def overlap_share(spans: Sequence[Span], window: Interval) -> Overlap:
    """Grading beside rollouts of *other* groups inside a window; a group's own rollouts never count."""
    low, high = window
    everyone: list[Interval] = []
    own: dict[str, list[Interval]] = {}
    for span in spans:
        interval = (max(span.start_s, low), min(span.end_s, high))
        if span.name == ROLLOUT and interval[1] > interval[0]:
            everyone.append(interval)
            own.setdefault(str(span.attrs.get("group_id")), []).append(interval)
    cover = _Cover(everyone)
    grading_s = overlapped_s = 0.0
    graded: set[str] = set()
    overlapped: set[str] = set()
    for span in spans:
        start, end = max(span.start_s, low), min(span.end_s, high)
        if span.name != GRADE or end <= start:
            continue
        group_id = str(span.attrs.get("group_id"))
        mine = own.get(group_id, [])
        if any(a < end and b > start for a, b in mine):
            # Rare: this group was sampled while it was graded, so the shared union would count its own rollouts.
            others = (i for g, intervals in own.items() if g != group_id for i in intervals)
            beside = _Cover(others).within((start, end))
        else:
            beside = cover.within((start, end))
        grading_s += end - start
        overlapped_s += beside
        graded.add(group_id)
        if beside > 0.0:
            overlapped.add(group_id)
    return Overlap(
        grading_s=grading_s,
        overlapped_s=overlapped_s,
        graded_groups=len(graded),
        overlapped_groups=len(overlapped),
    )
