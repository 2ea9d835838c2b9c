"""The sheet on which people judge the cases of a blind audit, and what they answered.

The sheet is one HTML file that opens without a network. Everything in it that a policy wrote is escaped, and the page
runs one script only, its own, which is named by its digest: it keeps answers in the browser and saves them as a file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grader.agreement import kendall_tau_b
from grader.rubric import Flag, Scores
from grader.stored import StoredGroup, finding
from infra.errors import StorageError
from infra.unseen import visible
from orchestrator.blind_audit import Audit, Judged, Judgements
from orchestrator.candidate_page import CandidatePage, LineView
from orchestrator.intervals import kappa, weighted_kappa
from orchestrator.report import render_page, write_page

DIMENSIONS = (
    ("approach", "Approach: is the cause repaired where it is?"),
    ("precision", "Precision: right in general, not only for the example?"),
    ("minimality", "Minimality: nothing beyond what the task needs?"),
    ("side_effects", "Side effects: 5 means none"),
    ("consistency", "Consistency with the code around it"),
)
FLAGS = (
    (Flag.UNREQUESTED_REWRITE, "rewrites what nobody asked for"),
    (Flag.TEST_WORKAROUND, "works around the tests"),
    (Flag.SEVERE_PROCESS_ISSUE, "severe process issue"),
    (Flag.UNRESOLVED_REGRESSION, "breaks something else"),
)
MAX_FILE_CHARS = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateSheet:
    """One candidate to be judged."""

    key: str
    """Its trajectory id in the case."""
    name: str
    patch: tuple[LineView, ...]
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSheet:
    """One case."""

    case: str
    statement: str
    files: tuple[tuple[str, str], ...]
    """(path, content before) of what any candidate changed."""
    candidates: tuple[CandidateSheet, ...]


def write_sheet(path: Path, audit: Audit, groups: Sequence[StoredGroup]) -> Path:
    """Write the sheet of all cases.

    Raises:
        StorageError: it cannot be written.
    """
    script = (Path(__file__).parent / "templates" / "audit_sheet.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = render_page(
        "audit_sheet.html.j2",
        audit=audit.digest,
        cases=[_case(group) for group in groups],
        dimensions=DIMENSIONS,
        flags=[(flag.value, said) for flag, said in FLAGS],
        script=script,
        script_digest=digest,
    )
    return write_page(path, page)


def _case(group: StoredGroup) -> CaseSheet:
    transcripts = {t.trajectory_id: t for t in group.transcripts}
    candidates: list[CandidateSheet] = []
    touched: set[str] = set()
    for trajectory in group.trajectories:
        if not trajectory.passed:
            continue
        transcript = transcripts[trajectory.trajectory_id]
        touched |= set(re.findall(r"^--- a/(.+)$", transcript.patch, flags=re.M))
        patch, _ = CandidatePage(transcript, [], [], trajectory.trajectory_id).patch_lines()
        candidates.append(
            CandidateSheet(
                key=trajectory.trajectory_id,
                name=f"Candidate {chr(ord('A') + len(candidates))}",
                patch=patch,
                actions=tuple(visible(turn.action, 600) for turn in transcript.turns),
            )
        )
    files = [
        (visible(p), visible(group.task.files[p], MAX_FILE_CHARS)) for p in sorted(touched) if p in group.task.files
    ]
    return CaseSheet(
        case=group.group_id,
        statement=visible(group.task.statement, MAX_FILE_CHARS),
        files=tuple(files),
        candidates=tuple(candidates),
    )


# ---- answers ---------------------------------------------------------------------------------------------------------


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Answer(_Part):
    scores: Annotated[list[Annotated[int, Field(ge=1, le=5)]], Field(min_length=5, max_length=5)]
    flags: list[Flag] = []


class _Answers(_Part):
    audit: str
    rater: Annotated[str, Field(min_length=1, max_length=100)]
    answers: dict[str, dict[str, _Answer]]


Answers = Mapping[str, Mapping[str, tuple[Scores, frozenset[Flag]]]]


def read_answers(path: Path, audit: Audit, groups: Sequence[StoredGroup]) -> tuple[str, Answers]:
    """(rater, case -> trajectory id -> scores and flags) of a file that the sheet saved; candidates without all five
    scores are not in it.

    Raises:
        StorageError: it cannot be read, is of another audit, or judges what is not on its sheet.
    """
    try:
        found = _Answers.model_validate_json(path.read_bytes())
    except OSError as e:
        raise StorageError(f"{path}: cannot be read ({e}); give the file that the sheet saved") from e
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise StorageError(f"{path}: {finding(first['loc'], first['msg'])}; save it from the sheet again") from None
    if found.audit != audit.digest:
        raise StorageError(f"{path}: audit = {found.audit!r}: answers of another sheet; this audit is {audit.digest}")
    known = {group.group_id: {t.trajectory_id for t in group.trajectories if t.passed} for group in groups}
    for case, given in found.answers.items():
        for name in given:
            if name not in known.get(case, ()):
                raise StorageError(f"{path}: answers.{case}.{name}: no candidate of this audit; save it again")
    return visible(found.rater), {
        case: {name: (Scores(*a.scores), frozenset(a.flags)) for name, a in given.items()}
        for case, given in found.answers.items()
        if given
    }


# ---- agreement -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How far two judges agree on the candidates that both judged."""

    candidates: int
    kappa: Mapping[str, float | None]
    """Dimension -> Cohen's kappa with quadratic weights; `tier` without weights."""
    same: Mapping[str, float | None]
    """Dimension, or `tier` -> share of candidates that both gave the same; None where they judged none both."""
    tau_b: float | None
    """Kendall's tau-b of their orders, mean over the cases where either orders anything."""
    cases: int
    """How many those are."""


def agree(first: Judgements, second: Judgements) -> Agreement:
    """Hold two judges against each other."""
    pairs = [
        (mine, theirs)
        for case, given in first.items()
        for name, mine in given.items()
        if (theirs := second.get(case, {}).get(name)) is not None
    ]
    found: dict[str, float | None] = {}
    same: dict[str, float | None] = {}
    for i, name in enumerate(Scores._fields):
        a, b = [int(x.scores[i]) for x, _ in pairs], [int(y.scores[i]) for _, y in pairs]
        found[name] = weighted_kappa(a, b)
        same[name] = _same(a, b)
    tiers = [x.tier for x, _ in pairs], [y.tier for _, y in pairs]
    found["tier"], same["tier"] = kappa(*tiers), _same(*tiers)
    taus = []
    for case, given in first.items():
        names = sorted(set(given) & set(second.get(case, {})))
        orders = [[_rank(one[case], names, name) for name in names] for one in (first, second)] if names else []
        if any(len(set(order)) > 1 for order in orders):
            taus.append(kendall_tau_b(*orders))
    return Agreement(
        candidates=len(pairs), kappa=found, same=same, tau_b=fmean(taus) if taus else None, cases=len(taus)
    )


def _rank(given: Mapping[str, Judged], names: Sequence[str], name: str) -> float:
    return float(sorted({given[n].place for n in names}).index(given[name].place))


def _same(first: Sequence[object], second: Sequence[object]) -> float | None:
    return fmean(a == b for a, b in zip(first, second, strict=True)) if first else None
