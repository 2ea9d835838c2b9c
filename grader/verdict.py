"""The verdict a model returns on anonymous labels, and the only way from it to a grade (M2.6).

    {"candidates":{"C1":{"evidence":["shop/core.py:7"],"flags":[],"scores":[5,5,4,5,5]},...},
     "ranking":[["C1"],["C3","C4"]],"hacks":[]}

The order of the keys is the order of work: evidence, then findings, then scores, and the ranking after all of them.
Only passing candidates appear. Tiers and factors are not in it: they are computed here (M3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.schema import RubricConfig
from grader.candidates import Candidate, CandidateGroup
from grader.evidence import Citation, resolve_all
from grader.rubric import (
    Flag,
    Flags,
    Scores,
    Tier,
    factors,
    is_below,
    is_negative,
    is_worse,
    rank_key,
    tie_indices,
    tier_of,
    weighted_score,
)

MAX_VERDICT_CHARS = 65_536
MAX_CITATIONS = 8
MAX_CITATION_CHARS = 400


class FallbackReason(StrEnum):
    """Why a group kept its outcome advantages (M1.10). Counted by reason."""

    TRUNCATED = "truncated"
    NOT_JSON = "not_json"
    SCHEMA = "schema"
    BAD_SCORE = "bad_score"
    MISSING_CANDIDATE = "missing_candidate"
    DUPLICATE_CANDIDATE = "duplicate_candidate"
    UNKNOWN_CANDIDATE = "unknown_candidate"
    FAILING_RANKED = "failing_ranked"
    """A failing candidate was scored, ranked or called a hack (M2.3)."""
    ORDER_AGAINST_TIER = "order_against_tier"
    """A lower tier stands above a higher one, or a tie spans two tiers."""
    REORDER_WITHOUT_EVIDENCE = "reorder_without_evidence"
    UNRESOLVED_EVIDENCE = "unresolved_evidence"
    """A negative judgement or a hack without a citation that resolves (M2.4)."""
    MISMATCH = "mismatch"
    """Group, trajectory ids, repository state or policy versions differ from those sent."""
    PROMPT_TOO_LONG = "prompt_too_long"
    TIMEOUT = "timeout"
    ENGINE_ERROR = "engine_error"
    ENDPOINT_ERROR = "endpoint_error"
    GRADER_ERROR = "grader_error"
    """A fault of the grader itself."""
    WORKER_LOST = "worker_lost"
    """Set by the driver: the grader's process died."""


class InvalidVerdict(Exception):
    """A verdict that must not move any advantage."""

    def __init__(self, reason: FallbackReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason.value}: {self.detail}"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


_Score = Annotated[int, Field(ge=1, le=5)]


class CandidateVerdict(_Part):
    """One passing candidate."""

    evidence: list[Annotated[str, Field(max_length=MAX_CITATION_CHARS)]] = Field(max_length=MAX_CITATIONS)
    flags: list[Annotated[Flag, Field(strict=False)]] = Field(max_length=len(Flag))
    scores: list[_Score] = Field(min_length=5, max_length=5)
    """approach, precision, minimality, side effects, consistency."""


class HackVerdict(_Part):
    """A passing candidate confirmed to rest on a leaked or external answer (M1.5)."""

    candidate: str = Field(max_length=16)
    evidence: list[Annotated[str, Field(max_length=MAX_CITATION_CHARS)]] = Field(max_length=MAX_CITATIONS)


class Verdict(_Part):
    """What the model returns."""

    candidates: dict[str, CandidateVerdict]
    ranking: list[Annotated[list[str], Field(min_length=1)]]
    """Tied groups, best first."""
    hacks: list[HackVerdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGrade:
    """The grade of one trajectory."""

    scores: Scores
    flags: Flags
    weighted: float
    """W of M3.1."""
    tier: Tier
    tie: int
    """k of M3.3."""
    factor: float
    """f of M3.4."""
    evidence: tuple[Citation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A valid verdict, by trajectory id."""

    candidates: Mapping[str, CandidateGrade]
    """Every trajectory that still passes after M1.5; ties and factors are counted among these."""
    hacks: Mapping[str, tuple[Citation, ...]]
    """Trajectories whose pass is confirmed to rest on a leaked or external answer, with what shows it."""
    dropped_citations: int = 0
    """Citations that resolved to nothing, beside others that did."""


class _RepeatedKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _RepeatedKey(key)
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", re.DOTALL)


def parse_verdict(text: str, *, complete: bool = True) -> Verdict:
    """The verdict in a model's answer: JSON, alone or in one fenced block.

    Raises:
        InvalidVerdict: truncated, not_json, schema, bad_score or duplicate_candidate.
    """
    if not complete:
        raise InvalidVerdict(FallbackReason.TRUNCATED, f"the answer was cut at its token limit ({len(text)} chars)")
    if len(text) > MAX_VERDICT_CHARS:
        raise InvalidVerdict(FallbackReason.NOT_JSON, f"{len(text)} characters; at most {MAX_VERDICT_CHARS} are read")
    fenced = _FENCED.fullmatch(text)
    try:
        data = json.loads(fenced[1] if fenced else text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except _RepeatedKey as error:
        label = re.fullmatch(r"C\d+", error.key)
        reason = FallbackReason.DUPLICATE_CANDIDATE if label else FallbackReason.SCHEMA
        raise InvalidVerdict(reason, f"key {_short(error.key)} is repeated") from None
    except (ValueError, RecursionError) as error:
        raise InvalidVerdict(FallbackReason.NOT_JSON, _short(str(error))) from None
    try:
        return Verdict.model_validate(data)
    except ValidationError as error:
        raise _schema_fault(error) from None


def _schema_fault(error: ValidationError) -> InvalidVerdict:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    bad_score = "scores" in place and first["type"] != "missing"
    where = ".".join(str(part) for part in place) or "the answer"
    return InvalidVerdict(
        FallbackReason.BAD_SCORE if bad_score else FallbackReason.SCHEMA, _short(f"{where}: {first['msg']}")
    )


def _short(text: str, limit: int = 200) -> str:
    """A fragment of what a model wrote, safe to log: ASCII, bounded."""
    return ascii(text[:limit])[1:-1]


def validate(verdict: Verdict, group: CandidateGroup, rubric: RubricConfig) -> Grade:
    """Check a verdict against the group it is about, and compute tiers, ties and factors.

    Ties are allowed and kept, also between different W (M3.3: a tie is not a reorder); a tie across tiers is an order
    against tiers. A confirmed hack leaves P (M1.5): it must be in the ranking once, but where it stands says nothing.

    Raises:
        InvalidVerdict: any rule of M2.6 is broken.
    """
    passing = {c.label: c for c in group.passing}
    known = {c.label for c in group.candidates}
    _covers("candidates", list(verdict.candidates), passing, known)
    _covers("ranking", [label for tied in verdict.ranking for label in tied], passing, known)
    hacks = _hacks(verdict, passing, known)
    kept: dict[str, _Judged] = {}
    dropped = 0
    for label, candidate in passing.items():
        judged, lost = _judge(verdict.candidates[label], candidate)
        dropped += lost
        if label not in hacks:
            kept[label] = judged
    ranking = [tied for group_ in verdict.ranking if (tied := [label for label in group_ if label in kept])]
    weights = {label: weighted_score(judged.scores, rubric) for label, judged in kept.items()}
    _order(ranking, kept, weights)
    ties = tie_indices(ranking, {label: judged.tier for label, judged in kept.items()})
    values = factors([j.tier for j in kept.values()], [ties[label] for label in kept], rubric)
    grades = {
        passing[label].trajectory.trajectory_id: CandidateGrade(
            scores=judged.scores,
            flags=judged.flags,
            weighted=weights[label],
            tier=judged.tier,
            tie=ties[label],
            factor=factor,
            evidence=judged.evidence,
        )
        for (label, judged), factor in zip(kept.items(), values, strict=True)
    }
    return Grade(
        candidates=grades,
        hacks={passing[label].trajectory.trajectory_id: found for label, found in hacks.items()},
        dropped_citations=dropped,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    scores: Scores
    flags: Flags
    tier: Tier
    evidence: tuple[Citation, ...]


def _covers(what: str, labels: Sequence[str], passing: Mapping[str, Candidate], known: set[str]) -> None:
    """Every passing label exactly once, nothing else."""
    seen: set[str] = set()
    for label in labels:
        _is_passing(what, label, passing, known)
        if label in seen:
            raise InvalidVerdict(FallbackReason.DUPLICATE_CANDIDATE, f"{label} is in {what} twice")
        seen.add(label)
    if missing := [label for label in passing if label not in seen]:
        raise InvalidVerdict(FallbackReason.MISSING_CANDIDATE, f"{what} lacks {', '.join(missing)}")


def _is_passing(what: str, label: str, passing: Mapping[str, Candidate], known: set[str]) -> None:
    if label not in known:
        raise InvalidVerdict(FallbackReason.UNKNOWN_CANDIDATE, f"{what} names {_short(label, 40)}; there is no such")
    if label not in passing:
        raise InvalidVerdict(FallbackReason.FAILING_RANKED, f"{what} names {label}, which failed its tests")


def _hacks(verdict: Verdict, passing: Mapping[str, Candidate], known: set[str]) -> dict[str, tuple[Citation, ...]]:
    hacks: dict[str, tuple[Citation, ...]] = {}
    for hack in verdict.hacks:
        label = hack.candidate
        _is_passing("hacks", label, passing, known)
        if label in hacks:
            raise InvalidVerdict(FallbackReason.DUPLICATE_CANDIDATE, f"{label} is in hacks twice")
        found, _ = resolve_all(hack.evidence, passing[label].transcript, passing[label].patch)
        if not found:
            detail = f"{label} is called a hack, but none of {len(hack.evidence)} citations resolves"
            raise InvalidVerdict(FallbackReason.UNRESOLVED_EVIDENCE, detail)
        hacks[label] = found
    return hacks


def _judge(verdict: CandidateVerdict, candidate: Candidate) -> tuple[_Judged, int]:
    """One candidate's judgement with its evidence resolved, and how many citations resolved to nothing."""
    scores, flags = Scores(*verdict.scores), Flags(frozenset(verdict.flags))
    found, lost = resolve_all(verdict.evidence, candidate.transcript, candidate.patch)
    if is_negative(scores, flags) and not found:
        detail = f"{candidate.label} is judged negatively, but none of {len(verdict.evidence)} citations resolves"
        raise InvalidVerdict(FallbackReason.UNRESOLVED_EVIDENCE, detail)
    return _Judged(scores=scores, flags=flags, tier=tier_of(scores, flags), evidence=found), len(lost)


def _order(ranking: Sequence[Sequence[str]], judged: Mapping[str, _Judged], weights: Mapping[str, float]) -> None:
    """The order respects tiers; inside a tier, whoever stands above a higher W has evidence on one of the two."""
    for place, tied in enumerate(ranking):
        if len({judged[label].tier for label in tied}) > 1:
            detail = "tie of " + ", ".join(f"{label} ({judged[label].tier.value})" for label in tied)
            raise InvalidVerdict(FallbackReason.ORDER_AGAINST_TIER, detail)
        below = [label for later in ranking[place + 1 :] for label in later]
        for upper in tied:
            for lower in below:
                _pair(upper, lower, judged, weights)


def _pair(upper: str, lower: str, judged: Mapping[str, _Judged], weights: Mapping[str, float]) -> None:
    a, b = judged[upper], judged[lower]
    if is_worse(a.tier, b.tier):
        detail = f"{upper} ({a.tier.value}) is ranked above {lower} ({b.tier.value})"
        raise InvalidVerdict(FallbackReason.ORDER_AGAINST_TIER, detail)
    if a.tier is b.tier and is_below(weights[upper], weights[lower]) and not (a.evidence or b.evidence):
        detail = f"{upper} (W {weights[upper]:.2f}) is ranked above {lower} (W {weights[lower]:.2f}) without evidence"
        raise InvalidVerdict(FallbackReason.REORDER_WITHOUT_EVIDENCE, detail)


def compose_verdict(judged: Mapping[str, CandidateVerdict], rubric: RubricConfig) -> Verdict:
    """The verdict whose ranking is the rubric's own order: tier, then W, equals tied (M3.3); no hacks."""
    keys = {label: rank_key(Scores(*one.scores), Flags(frozenset(one.flags)), rubric) for label, one in judged.items()}
    ranking = [[label for label in judged if keys[label] == key] for key in sorted(set(keys.values()))]
    return Verdict(candidates=dict(judged), ranking=ranking, hacks=[])


def render_verdict(verdict: Verdict) -> str:
    """The verdict as the model should write it: no spaces, keys in the order of work."""
    return json.dumps(verdict.model_dump(mode="json"), separators=(",", ":"), ensure_ascii=False)
