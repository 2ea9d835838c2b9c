"""One group as a person reads it: the line of groups.jsonl joined with the archive's entry. Pure.

The terminal (show.py) and the pages (report.py) render this. Everything in it that the policy or the grader's model
wrote has passed `visible`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from grader.stored import StoredGroup
from infra.unseen import one_line, visible
from orchestrator.candidate_page import (
    TEXT_CHARS,
    CandidatePage,
    CheckView,
    EvidenceView,
    LineView,
    TurnView,
)
from rollout.trajectory import Transcript

SCORES = ("approach", "precision", "minimality", "side_effects", "consistency")
"""In the order of their weights (M3.1)."""
Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreView:
    """One score and why."""

    name: str
    value: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateView:
    """One trajectory of the group."""

    trajectory_id: str
    label: str
    """C1..Cn as the grader saw it; empty if it saw nothing."""
    status: str
    valid: bool
    passed: bool
    """After integrity corrections (M1.5)."""
    hack: bool
    reward: float | None
    tier: str | None
    tie: int | None
    factor: float | None
    before: float | None
    """Advantage by outcome alone, R - p (M4.1)."""
    after: float | None
    """Advantage as trained."""
    turns: int
    response_tokens: int
    versions: str
    flags: str
    scores: tuple[ScoreView, ...]
    evidence: tuple[EvidenceView, ...]
    patch: tuple[LineView, ...]
    patch_note: str
    """What of the patch is not shown, if anything."""
    turn_views: tuple[TurnView, ...]
    log: tuple[LineView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group."""

    group_id: str
    anchor: str
    task_id: str
    source: str
    statement: str
    outcome: str
    step: int | None
    mode: str
    graded: bool
    fallback_reason: str | None
    detail: str
    """For a fallback, what was wrong."""
    lam: float | None
    lambda_max: float | None
    capped: bool
    grader: tuple[tuple[str, str], ...]
    """Facts about the grading, as text."""
    candidates: tuple[CandidateView, ...]
    """Best first; passing before failing before masked."""
    checks: tuple[CheckView, ...]
    verdict: str
    """As the model returned it."""
    note: str
    """Why there is nothing but the audit line, if so."""

    @property
    def passing(self) -> tuple[CandidateView, ...]:
        """The candidates that passed, hacks included."""
        return tuple(c for c in self.candidates if c.passed or c.hack)


def group_view(record: Record, stored: StoredGroup | None, *, anchor: str = "g", note: str = "") -> GroupView:
    """Join one line of groups.jsonl with its archived group; `anchor` is unique on the page."""
    grader: Record = record.get("grader") or {}
    labels = {name: label for label, name in (grader.get("labels") or {}).items()}
    checks = tuple(
        CheckView(
            number=c["number"],
            candidate=visible(c["candidate"]),
            command=visible(c["command"], TEXT_CHARS),
            exit_code=c["exit_code"],
            anchor=f"{anchor}-r{i}",  # numbers are of one dialogue, and each candidate can have its own
        )
        for i, c in enumerate(grader.get("checks") or ())
    )
    transcripts = {} if stored is None else {t.trajectory_id: t for t in stored.transcripts}
    rewards = [t["reward"] for t in record["trajectories"] if t["valid"] and t["reward"] is not None]
    mean = fmean(rewards) if rewards else 0.0
    candidates = [
        _candidate(t, grader, labels.get(t["id"], ""), transcripts.get(t["id"]), checks, mean, f"{anchor}-c{i}")
        for i, t in enumerate(record["trajectories"])
    ]
    missing = "" if stored is not None else note or "This group is not archived: its patches and turns are not kept."
    return GroupView(
        group_id=visible(record["group_id"]),
        anchor=anchor,
        task_id=visible(record["task_id"]),
        source=visible(record["source"]),
        statement=visible(stored.task.statement, TEXT_CHARS) if stored is not None else "",
        outcome=visible(record["outcome"]),
        step=record["step"],
        mode=visible(record["mode"]),
        graded=bool(record["graded"]),
        fallback_reason=None if record["fallback_reason"] is None else visible(record["fallback_reason"]),
        detail=visible(str(grader.get("detail") or ""), TEXT_CHARS),
        lam=record["lambda"],
        lambda_max=record["lambda_max"],
        capped=bool(record["capped"]),
        grader=tuple(_facts(grader)),
        candidates=tuple(sorted(candidates, key=_place)),
        checks=checks,
        verdict=visible(_pretty(grader.get("verdict")), 4 * TEXT_CHARS),
        note=missing,
    )


def _place(c: CandidateView) -> tuple[bool, bool, bool, str, int]:
    return (not c.valid, not (c.passed or c.hack), c.hack, c.tier or "T9", c.tie or 0)


def _facts(grader: Record) -> Iterator[tuple[str, str]]:
    if not grader:
        return
    yield "model", one_line(str(grader.get("model") or "none"))
    if (seed := grader.get("order_seed")) is not None:
        yield "order seed", str(seed)
    for key, unit in (("queue_s", "queued"), ("run_s", "worked")):
        if (value := grader.get(key)) is not None:
            yield unit, f"{value:.1f} s"
    if grader.get("turns") is not None:
        yield "answers", str(grader["turns"])
    if grader.get("prompt_tokens") is not None:
        yield "tokens", f"{grader['prompt_tokens']:,} read, {grader.get('completion_tokens', 0):,} written"
    if grader.get("cost_usd"):
        yield "cost", f"{grader['cost_usd']:.5f} USD"
    if grader.get("dropped_citations"):
        yield "citations of nothing", str(grader["dropped_citations"])


def _pretty(verdict: str | None) -> str:
    """The verdict's JSON with line breaks; anything else as it is."""
    if not verdict:
        return ""
    try:
        return json.dumps(json.loads(verdict), indent=1, ensure_ascii=False)
    except (ValueError, RecursionError):
        return verdict


def _candidate(
    row: Record,
    grader: Record,
    label: str,
    transcript: Transcript | None,
    checks: Sequence[CheckView],
    mean: float,
    anchor: str,
) -> CandidateView:
    name = row["id"]
    cited = [*(grader.get("evidence") or {}).get(name, ()), *(grader.get("hacks") or {}).get(name, ())]
    page = CandidatePage(transcript, cited, [c for c in checks if c.candidate == label], anchor)
    reasons = [*(grader.get("reasons") or {}).get(name, ())] + [""] * len(SCORES)
    scores = row.get("scores") or {}
    shown, note = page.patch_lines()
    return CandidateView(
        trajectory_id=visible(name),
        label=visible(label),
        status=visible(row["status"]),
        valid=bool(row["valid"]),
        passed=bool(row["passed"]),
        hack=bool(row["hack"]),
        reward=row["reward"],
        tier=row.get("tier"),
        tie=row.get("tie"),
        factor=row.get("factor"),
        before=row["reward"] - mean if row["valid"] and row["reward"] is not None else None,
        after=row.get("advantage"),
        turns=row["turns"],
        response_tokens=row["response_tokens"],
        versions=", ".join(map(str, row["policy_versions"])),
        flags=", ".join(visible(flag) for flag, raised in (row.get("flags") or {}).items() if raised),
        scores=tuple(
            ScoreView(name=key.replace("_", " "), value=scores[key], reason=one_line(reasons[i]))
            for i, key in enumerate(SCORES)
            if key in scores
        ),
        evidence=tuple(page.evidence(text) for text in dict.fromkeys(cited)),
        patch=shown,
        patch_note=note,
        turn_views=page.turns(),
        log=page.log(),
    )
