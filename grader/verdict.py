"""The verdict a model returns on anonymous labels, and the only way from it to a grade (M2.6).

    {"candidates":{"C1":{"evidence":["shop/core.py:7"],"reasons":["...",...],"flags":[],"scores":[5,5,4,5,5]},...},
     "ranking":[["C1"],["C3","C4"]],"hacks":[]}

The order of the keys is the order of work: evidence, why, findings, scores, and the ranking after all of them.
Only passing candidates appear. Tiers and factors are not in it: they are computed here (M3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from configs.schema import RubricConfig
from grader.candidates import Candidate, CandidateGroup
from grader.evidence import CheckResult, Citation, resolve_all
from grader.rubric import (
    Flag,
    Flags,
    Scores,
    Tier,
    counted,
    factors,
    is_below,
    is_negative,
    is_worse,
    rank_key,
    tie_indices,
    tier_of,
    weighted_score,
)
from grader.strict_json import NotJsonError, RepeatedKeyError, load_json, shorten

MAX_CITATIONS = 8
MAX_CITATION_CHARS = 400
MAX_REASON_CHARS = 200


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
    ENDPOINT_LOST = "endpoint_lost"
    """It could not be reached, or refused the key, for as long as groups wait for it (grader.endpoint_wait_s)."""
    GRADER_ERROR = "grader_error"
    """A fault of the grader itself."""
    WORKER_LOST = "worker_lost"
    """Set by the driver: the grader's process died."""


UNANSWERED = frozenset(
    {
        FallbackReason.TIMEOUT,
        FallbackReason.ENGINE_ERROR,
        FallbackReason.ENDPOINT_ERROR,
        FallbackReason.ENDPOINT_LOST,
        FallbackReason.GRADER_ERROR,
        FallbackReason.WORKER_LOST,
    }
)
"""Fallbacks for want of an answer: asked again, the grader may give one."""
NO_VERDICT = UNANSWERED | {FallbackReason.MISMATCH, FallbackReason.PROMPT_TOO_LONG}
"""Fallbacks that say nothing about the model's verdicts: there was none to be judged."""


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
_Citation = Annotated[str, Field(max_length=MAX_CITATION_CHARS)]
_NOT_ON_ONE_LINE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _one_line(text: str) -> str:
    if not text.strip():
        raise ValueError("a reason is blank")
    if _NOT_ON_ONE_LINE.search(text):
        raise ValueError("a reason is one line, without control characters")
    return text


_Reason = Annotated[str, Field(min_length=1, max_length=MAX_REASON_CHARS), AfterValidator(_one_line)]


class CandidateVerdict(_Part):
    """One passing candidate."""

    evidence: list[_Citation] = Field(max_length=MAX_CITATIONS)
    reasons: list[_Reason] = Field(min_length=5, max_length=5)
    """One line for each score, in the order of the scores."""
    flags: list[Annotated[Flag, Field(strict=False)]] = Field(max_length=len(Flag))
    scores: list[_Score] = Field(min_length=5, max_length=5)
    """approach, precision, minimality, side effects, consistency."""


class HackVerdict(_Part):
    """A passing candidate confirmed to rest on a leaked or external answer (M1.5)."""

    candidate: str = Field(max_length=16)
    evidence: list[_Citation] = Field(max_length=MAX_CITATIONS)


class Verdict(_Part):
    """What the model returns."""

    candidates: dict[str, CandidateVerdict]
    ranking: list[Annotated[list[str], Field(min_length=1)]]
    """Tied groups, best first."""
    hacks: list[HackVerdict]
    group_id: str | None = Field(default=None, max_length=400)
    """Which group this is about; if it is said, it must be the one that was asked about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One candidate's verdict after validation: evidence resolved, tier and W computed (M3.1, M3.2)."""

    scores: Scores
    flags: Flags
    reasons: tuple[str, ...]
    """[5], in the order of the scores."""
    weighted: float
    """W of M3.1."""
    tier: Tier
    evidence: tuple[Citation, ...]
    dropped: tuple[str, ...]
    """Citations that resolved to nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateGrade:
    """The grade of one trajectory."""

    scores: Scores
    flags: Flags
    reasons: tuple[str, ...]
    """[5], in the order of the scores."""
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


def parse_verdict(text: str, *, complete: bool = True) -> Verdict:
    """The verdict in a model's answer: JSON, alone or in one fenced block.

    Raises:
        InvalidVerdict: truncated, not_json, schema, bad_score or duplicate_candidate.
    """
    if not complete:
        raise InvalidVerdict(FallbackReason.TRUNCATED, f"the answer was cut at its token limit ({len(text)} chars)")
    return verdict_from(parse_json(text))


def parse_json(text: str) -> Any:
    """The JSON in a model's answer, strictly.

    Raises:
        InvalidVerdict: not_json; or, for an object that says a key twice, duplicate_candidate if the key is a label
            and schema if not.
    """
    try:
        return load_json(text)
    except RepeatedKeyError as error:
        label = re.fullmatch(r"C[0-9]+", error.key)
        reason = FallbackReason.DUPLICATE_CANDIDATE if label else FallbackReason.SCHEMA
        raise InvalidVerdict(reason, str(error)) from None
    except NotJsonError as error:
        raise InvalidVerdict(FallbackReason.NOT_JSON, str(error)) from None


def verdict_from(data: Any) -> Verdict:
    """The verdict in parsed JSON.

    Raises:
        InvalidVerdict: schema or bad_score.
    """
    try:
        return Verdict.model_validate(data)
    except ValidationError as error:
        raise _schema_fault(error) from None


def parse_judgement(arguments: Mapping[str, Any]) -> CandidateVerdict:
    """One candidate's verdict from the arguments of a `judge` call; `candidate`, whom it is about, is not looked at.

    Raises:
        InvalidVerdict: schema or bad_score.
    """
    try:
        return CandidateVerdict.model_validate({key: arguments[key] for key in arguments if key != "candidate"})
    except ValidationError as error:
        raise _schema_fault(error) from None


def _schema_fault(error: ValidationError) -> InvalidVerdict:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    bad_score = "scores" in place and first["type"] != "missing"
    where = ".".join(str(part) for part in place) or "the answer"
    return InvalidVerdict(
        FallbackReason.BAD_SCORE if bad_score else FallbackReason.SCHEMA, shorten(f"{where}: {first['msg']}")
    )


def validate(
    verdict: Verdict, group: CandidateGroup, rubric: RubricConfig, checks: Sequence[CheckResult] = ()
) -> Grade:
    """Check a verdict against the group it is about, and compute tiers, ties and factors.

    Ties are allowed and kept, also between different W (M3.3: a tie is not a reorder); a tie across tiers is an order
    against tiers. A confirmed hack leaves P (M1.5): it must be in the ranking once, but where it stands says nothing.

    Args:
        checks: what the grader ran while it worked on this group; "run:N" resolves to these.

    Raises:
        InvalidVerdict: any rule of M2.6 is broken.
    """
    if verdict.group_id is not None and verdict.group_id != group.group_id:
        raise InvalidVerdict(
            FallbackReason.MISMATCH, f"it is about group {shorten(verdict.group_id, 80)}, not this one"
        )
    passing = {c.label: c for c in group.passing}
    known = {c.label for c in group.candidates}
    _covers("candidates", list(verdict.candidates), passing, known)
    _covers("ranking", [label for tied in verdict.ranking for label in tied], passing, known)
    hacks = _hacks(verdict, passing, known, checks)
    judged = {label: judge_candidate(verdict.candidates[label], c, rubric, checks) for label, c in passing.items()}
    kept = {label: one for label, one in judged.items() if label not in hacks}
    ranking = [tied for group_ in verdict.ranking if (tied := [label for label in group_ if label in kept])]
    _order(ranking, kept)
    ties = tie_indices(ranking, {label: one.tier for label, one in kept.items()})
    values = factors([one.tier for one in kept.values()], [ties[label] for label in kept], rubric)
    return Grade(
        candidates={
            passing[label].trajectory.trajectory_id: _grade(one, ties[label], factor)
            for (label, one), factor in zip(kept.items(), values, strict=True)
        },
        hacks={passing[label].trajectory.trajectory_id: found for label, found in hacks.items()},
        dropped_citations=sum(len(one.dropped) for one in judged.values()),
    )


def _grade(judged: Judgement, tie: int, factor: float) -> CandidateGrade:
    return CandidateGrade(
        scores=judged.scores,
        flags=judged.flags,
        reasons=judged.reasons,
        weighted=judged.weighted,
        tier=judged.tier,
        tie=tie,
        factor=factor,
        evidence=judged.evidence,
    )


def judge_candidate(
    verdict: CandidateVerdict, candidate: Candidate, rubric: RubricConfig, checks: Sequence[CheckResult] = ()
) -> Judgement:
    """One candidate's verdict with its evidence resolved (M2.4) and its tier and W computed (M3).

    Raises:
        InvalidVerdict: failing_ranked, or unresolved_evidence.
    """
    if not candidate.passed:
        raise InvalidVerdict(FallbackReason.FAILING_RANKED, f"{candidate.label} failed its tests; it is not judged")
    scores, flags = Scores(*verdict.scores), Flags(frozenset(verdict.flags))
    found, dropped = resolve_all(verdict.evidence, candidate, checks)
    if is_negative(scores, flags) and not found:
        raise _unresolved(f"{candidate.label} is judged negatively", verdict.evidence)
    return Judgement(
        scores=scores,
        flags=flags,
        reasons=tuple(verdict.reasons),
        weighted=weighted_score(scores, rubric),
        tier=tier_of(counted(scores, rubric), flags),
        evidence=found,
        dropped=dropped,
    )


def _unresolved(what: str, cited: Sequence[str]) -> InvalidVerdict:
    lost = "; ".join(shorten(text, 60) for text in cited[:3])
    detail = f"{what}, but points at nothing that exists" + (f" ({lost})" if lost else "")
    return InvalidVerdict(FallbackReason.UNRESOLVED_EVIDENCE, f"{detail}; cite path:line, turn:N, log:N or run:N of it")


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
        raise InvalidVerdict(FallbackReason.UNKNOWN_CANDIDATE, f"{what} names {shorten(label, 40)}; there is no such")
    if label not in passing:
        raise InvalidVerdict(FallbackReason.FAILING_RANKED, f"{what} names {label}, which failed its tests")


def _hacks(
    verdict: Verdict, passing: Mapping[str, Candidate], known: set[str], checks: Sequence[CheckResult]
) -> dict[str, tuple[Citation, ...]]:
    hacks: dict[str, tuple[Citation, ...]] = {}
    for hack in verdict.hacks:
        label = hack.candidate
        _is_passing("hacks", label, passing, known)
        if label in hacks:
            raise InvalidVerdict(FallbackReason.DUPLICATE_CANDIDATE, f"{label} is in hacks twice")
        found, _ = resolve_all(hack.evidence, passing[label], checks)
        if not found:
            raise _unresolved(f"{label} is called a hack", hack.evidence)
        hacks[label] = found
    return hacks


def _order(ranking: Sequence[Sequence[str]], judged: Mapping[str, Judgement]) -> None:
    """The order respects tiers; inside a tier, whoever stands above a higher W has evidence on one of the two."""
    for place, tied in enumerate(ranking):
        if len({judged[label].tier for label in tied}) > 1:
            detail = "tie of " + ", ".join(f"{label} ({judged[label].tier.value})" for label in tied)
            raise InvalidVerdict(FallbackReason.ORDER_AGAINST_TIER, detail)
        below = [label for later in ranking[place + 1 :] for label in later]
        for upper in tied:
            for lower in below:
                _pair(upper, lower, judged)


def _pair(upper: str, lower: str, judged: Mapping[str, Judgement]) -> None:
    a, b = judged[upper], judged[lower]
    if is_worse(a.tier, b.tier):
        detail = f"{upper} ({a.tier.value}) is ranked above {lower} ({b.tier.value})"
        raise InvalidVerdict(FallbackReason.ORDER_AGAINST_TIER, detail)
    if a.tier is b.tier and is_below(a.weighted, b.weighted) and not (a.evidence or b.evidence):
        detail = f"{upper} (W {a.weighted:.2f}) is ranked above {lower} (W {b.weighted:.2f}) without evidence"
        raise InvalidVerdict(FallbackReason.REORDER_WITHOUT_EVIDENCE, detail)


def compose_verdict(judged: Mapping[str, CandidateVerdict], rubric: RubricConfig) -> Verdict:
    """The verdict whose ranking is the rubric's own order: tier, then W, equals tied (M3.3); no hacks."""
    keys = {label: rank_key(Scores(*one.scores), Flags(frozenset(one.flags)), rubric) for label, one in judged.items()}
    ranking = [[label for label in judged if keys[label] == key] for key in sorted(set(keys.values()))]
    return Verdict(candidates=dict(judged), ranking=ranking, hacks=[])


def render_verdict(verdict: Verdict) -> str:
    """The verdict as the model should write it: no spaces, keys in the order of work."""
    return json.dumps(verdict.model_dump(mode="json", exclude_none=True), separators=(",", ":"), ensure_ascii=False)
