"""Where the time of a step went, and which pool would have to grow to make it shorter. Pure.

At any moment of a step one thing is critical. While the learner steps, publishes or saves, it is that. While it waits
for its batch:

    every grader slot is busy and groups queue for one  -> grader        more graders would take them
    else every rollout slot is busy                     -> rollout       more rollout workers would start groups
    else some rollouts run, beside free slots           -> rollout_tail  more slots help nobody: groups are short
    else only graders run, beside free slots            -> grader_tail   the last grades are being made
    else                                                -> idle

Graders come before rollouts because a queue in front of them means that the stage before is fast enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infra.spans import CANARY, CHECKPOINT, GRADE, LEARN, PUBLISH, QUEUE, ROLLOUT, Interval, Span

CAUSES = ("learner", "publish", "checkpoint", "rollout", "grader", "rollout_tail", "grader_tail", "idle")
"""What can be critical; their shares of a step add up to 1."""
_LEARNERS = ((LEARN, "learner"), (PUBLISH, "publish"), (CHECKPOINT, "checkpoint"))
_SLOTS = {ROLLOUT: "rollout", GRADE: "grader", CANARY: "grader", QUEUE: "queue"}

Row = Mapping[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """What was critical in one window."""

    shares: Mapping[str, float]
    """Every one of CAUSES -> its share of the window."""
    queued_groups: float
    """Groups that queued for a grader, mean over the time the graders were critical; 0 if they never were."""
    free_slots: float
    """Free rollout slots, mean over the time of `rollout_tail`; 0 if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a user reads."""

    cause: str
    share: float
    """Of the steps' time."""
    sentence: str
    evidence: str


def critical(spans: Sequence[Span], window: Interval, slots: Mapping[str, int]) -> Critical:
    """`slots` holds those of `rollout`, and of `grader` where there is one; `spans` those that touch the window, of
    groups that still queue too. An empty window has shares of 0."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    queued_s = free_s = 0.0
    for length_s, running in _pieces(spans, window):
        cause = _cause(running, slots)
        seconds[cause] += length_s
        if cause == "grader":
            queued_s += length_s * running["queue"]
        elif cause == "rollout_tail":
            free_s += length_s * (slots["rollout"] - running["rollout"])
    total = window[1] - window[0]
    return Critical(
        shares={cause: seconds[cause] / total if total > 0.0 else 0.0 for cause in CAUSES},
        queued_groups=queued_s / seconds["grader"] if seconds["grader"] else 0.0,
        free_slots=free_s / seconds["rollout_tail"] if seconds["rollout_tail"] else 0.0,
    )


def _cause(running: Mapping[str, int], slots: Mapping[str, int]) -> str:
    for name, cause in _LEARNERS:
        if running[name]:
            return cause
    if running["queue"] and running["grader"] >= slots.get("grader", 0):
        return "grader"
    if running["rollout"] >= slots["rollout"]:
        return "rollout"
    if running["rollout"]:
        return "rollout_tail"
    return "grader_tail" if running["grader"] or running["queue"] else "idle"


def _pieces(spans: Sequence[Span], window: Interval) -> Iterator[tuple[float, Mapping[str, int]]]:
    """(seconds, how many of each kind ran) for the pieces of the window between any two changes."""
    low, high = window
    edges: list[tuple[float, int, str]] = []
    for span in spans:
        start, end = max(span.start_s, low), min(span.end_s, high)
        if end > start:
            kind = _SLOTS.get(span.name, span.name)
            edges += [(start, 1, kind), (end, -1, kind)]
    running: Counter[str] = Counter()
    at = low
    for time_s, change, kind in sorted(edges):
        if time_s > at:
            yield time_s - at, running
            at = time_s
        running[kind] += change
    if high > at:
        yield high - at, running


# ---- over the steps of a run ----------------------------------------------------------------------------------------


def shares_of(metrics: Sequence[Row]) -> dict[str, float]:
    """Share of the time of these steps by cause, the largest first; {} where no step has been analysed."""
    steps = [m for m in metrics if m.get("time/step_s") and "bottleneck/idle" in m]
    total = sum(m["time/step_s"] for m in steps)
    sums = {c: sum(m["time/step_s"] * m[f"bottleneck/{c}"] for m in steps) / total for c in CAUSES} if steps else {}
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def verdict(metrics: Sequence[Row]) -> Verdict | None:
    """What bounds these steps most, what to do about it, and how that is known; None where none has been analysed."""
    shares = shares_of(metrics)
    if not shares:
        return None
    cause, share = next(iter(shares.items()))
    part = f"{100 * share:.0f} % of the step"
    sentence, evidence = _WORDS[cause]
    known = {
        "share": part,
        "queued": f"{_weighted(metrics, cause, 'queued_groups'):.1f}",
        "free": f"{_weighted(metrics, cause, 'free_slots'):.1f}",
    }
    return Verdict(cause=cause, share=share, sentence=sentence.format(**known), evidence=evidence.format(**known))


def shares_text(shares: Mapping[str, float]) -> str:
    """ "learner 45 %, grader 31 %", without what rounds to nothing."""
    return ", ".join(f"{cause} {100 * share:.0f} %" for cause, share in shares.items() if share >= 0.005)


def _weighted(metrics: Sequence[Row], cause: str, name: str) -> float:
    """Mean of an evidence metric over the time its cause took."""
    rows = [m for m in metrics if m.get("time/step_s") and f"bottleneck/{name}" in m]
    weights = [m["time/step_s"] * m[f"bottleneck/{cause}"] for m in rows]
    total = sum(weights)
    return sum(w * m[f"bottleneck/{name}"] for w, m in zip(weights, rows, strict=True)) / total if total else 0.0


_WORDS: Mapping[str, tuple[str, str]] = {
    "grader": (
        "add graders: they bound {share}",
        "the learner waited while every grader slot was busy and {queued} groups queued for one",
    ),
    "rollout": (
        "add rollout workers or engines: they bound {share}",
        "the learner waited while every rollout slot was busy and no group queued for a full grader pool",
    ),
    "rollout_tail": (
        "keep more groups in flight (scheduler.max_inflight_groups, max_staleness): the last rollouts bound {share}",
        "the learner waited for running rollouts while {free} rollout slots were free",
    ),
    "grader_tail": (
        "make a grading faster, more graders would not help: the last grades bound {share}",
        "the learner waited while only graders ran, with slots free",
    ),
    "learner": ("the learner bounds {share}: the pools keep up, only learner ranks make it faster", "it stepped"),
    "publish": ("make publishing faster: it bounds {share}", "new weights were on their way to the engines"),
    "checkpoint": ("save checkpoints less often: they bound {share}", "the training loop waited for them"),
    "idle": ("nothing ran for {share}: see the stall messages", "the learner waited, and no rollout or grading ran"),
}
