"""Gradings made by hand: what a tier needs, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grader.evidence import Citation, CitationKind
from grader.exchange import GradeReply
from grader.rubric import Flags, Scores, Tier
from grader.stored import KnownGrade
from grader.verdict import CandidateGrade, FallbackReason, Grade
from orchestrator.trust import Grading, GroupResult

SCORES = {"T1": (5, 5, 5, 5, 5), "T2": (5, 5, 3, 5, 5), "T3": (1, 5, 5, 5, 5)}
"""Scores that have the tier by M3.2, without any flag."""


def grade(tiers: Mapping[str, str], *, hacks: tuple[str, ...] = (), ties: Mapping[str, int] | None = None) -> Grade:
    """Trajectory id -> tier; k is 0 unless `ties` says otherwise."""
    return Grade(
        candidates={
            name: CandidateGrade(
                scores=Scores(*SCORES[tier]),
                flags=Flags(),
                reasons=("fine",) * 5,
                weighted=5.0,
                tier=Tier(tier),
                tie=(ties or {}).get(name, 0),
                factor=1.0,
                evidence=(Citation(kind=CitationKind.TURN, text="turn:1"),),
            )
            for name, tier in tiers.items()
        },
        hacks={name: (Citation(kind=CitationKind.TURN, text="turn:2"),) for name in hacks},
        dropped_citations=1 if hacks else 0,
    )


def reply(given: Grade | FallbackReason, **changes: Any) -> GradeReply:
    fields: dict[str, Any] = {
        "group_id": "g",
        "attempt": 0,
        "base_state": "0" * 64,
        "policy_versions": {},
        "order_seed": 7,
        "grade": given if isinstance(given, Grade) else None,
        "fallback_reason": given if isinstance(given, FallbackReason) else None,
        "detail": "",
        "model": "m",
        "queue_s": 0.0,
        "run_s": 2.0,
        "turns": 3,
        "prompt_tokens": 1000,
        "completion_tokens": 100,
        "verdict": None,
        "labels": {},
    }
    return GradeReply(**{**fields, **changes})


def result(
    *given: Grade | FallbackReason,
    permuted: tuple[Grade | FallbackReason, ...] = (),
    known: Mapping[str, str] | None = None,
    **changes: Any,
) -> GroupResult:
    """A group with its gradings; `known`: trajectory id -> the right tier."""
    gradings = [Grading(permuted=False, reply=reply(g)) for g in given]
    gradings += [Grading(permuted=True, reply=reply(g)) for g in permuted]
    fields: dict[str, Any] = {
        "group_id": "g",
        "task_id": "t",
        "setup": "s",
        "passing": ("a", "b"),
        "labels": None if known is None else {name: KnownGrade(scores=SCORES[tier]) for name, tier in known.items()},
        "gradings": tuple(gradings),
    }
    return GroupResult(**{**fields, **changes})
