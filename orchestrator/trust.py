"""How far a grader can be trusted, from gradings of stored groups. Pure; docs/grading.md says what each figure means.

A candidate that a verdict calls a hack has no tier; here it counts as one of its own, "hack".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

import numpy as np

from configs.schema import RubricConfig
from grader.agreement import agreement, kendall_tau_b, mean_tau_b
from grader.exchange import GradeReply
from grader.stored import KnownGrade
from grader.verdict import Grade

HACK = "hack"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """One independent grading of a group."""

    permuted: bool
    """Whether the candidates stood in another order than in the other gradings of the group (M2.5)."""
    reply: GradeReply


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """All gradings of one stored group."""

    group_id: str
    task_id: str
    setup: str
    """Digest of the grader and the kind of test; only results of one setup belong together."""
    passing: tuple[str, ...]
    """Trajectory ids."""
    labels: Mapping[str, KnownGrade] | None
    """Trajectory id -> what is known."""
    gradings: tuple[Grading, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A share with what it is a share of."""

    part: int
    whole: int

    @property
    def value(self) -> float | None:
        """0..1; None of nothing."""
        return self.part / self.whole if self.whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustFigures:
    """What the gradings came to. Means are None where nothing was measured."""

    groups: int
    valid: Share
    """Gradings with a valid verdict (M2.6)."""
    fallbacks: Mapping[str, int]
    """Gradings without one, by reason (M1.10)."""
    tier_agreement: Share
    """Candidates given exactly their known tier."""
    score_agreement: Share
    """Scores given exactly as known, five a candidate."""
    tau_b: float | None
    """Kendall's tau-b against the known ranking, mean over the gradings where there is something to rank."""
    tau_gradings: int
    """How many those are."""
    confusion: Mapping[tuple[str, str], int]
    """(known tier, given tier) -> candidates."""
    self_agreement: Share
    """Candidates given the same tier by two gradings of one group in one order, over all pairs of those."""
    self_tau_b: float | None
    """Kendall's tau-b of those pairs, mean."""
    permuted_changes: Share
    """Candidates given another tier when the candidates stood in another order, over all pairs of such gradings."""
    tiers: Mapping[str, int]
    """Given tier -> candidates, over all valid gradings."""
    dropped_citations: int
    """Citations that resolved to nothing, beside others that did (M2.4)."""
    run_s: tuple[float, float] | None
    """Median and 95th percentile of a grading's time, its wait for a slot not counted."""
    turns_mean: float | None
    prompt_tokens_mean: float | None
    completion_tokens_mean: float | None
    checks_mean: float | None
    """Commands run, a grading."""
    cost_usd: float
    """Of all gradings; 0 where the configuration names no prices."""


def trust_figures(results: Sequence[GroupResult], rubric: RubricConfig) -> TrustFigures:
    """Figures over all results, which are of one setup."""
    replies = [g.reply for r in results for g in r.gradings]
    grades = [reply.grade for reply in replies if reply.grade is not None]
    judged = [(r.labels, g.reply.grade) for r in results for g in r.gradings if r.labels and g.reply.grade]
    agreed = [agreement(grade, {n: k.judgement for n, k in labels.items()}, rubric) for labels, grade in judged]
    confusion = Counter(
        (known.tier.value, tiers_of(grade).get(name, "none"))
        for labels, grade in judged
        for name, known in labels.items()
    )
    same, other = [*_pairs(results, permuted=False)], [*_pairs(results, permuted=True)]
    return TrustFigures(
        groups=len(results),
        valid=Share(part=len(grades), whole=len(replies)),
        fallbacks=Counter(reply.fallback_reason.value for reply in replies if reply.fallback_reason is not None),
        tier_agreement=Share(part=sum(a.tiers_right for a in agreed), whole=sum(a.tiers for a in agreed)),
        score_agreement=Share(part=sum(a.scores_right for a in agreed), whole=sum(a.scores for a in agreed)),
        tau_b=mean_tau_b(agreed),
        tau_gradings=sum(a.tau_b is not None for a in agreed),
        confusion=confusion,
        self_agreement=_same_tier(same),
        self_tau_b=_mean([tau for a, b in same if (tau := _tau_b(a, b)) is not None]),
        permuted_changes=_complement(_same_tier(other)),
        tiers=Counter(tier for grade in grades for tier in tiers_of(grade).values()),
        dropped_citations=sum(grade.dropped_citations for grade in grades),
        run_s=_percentiles([reply.run_s for reply in replies]),
        turns_mean=_mean([reply.turns for reply in replies]),
        prompt_tokens_mean=_mean([reply.prompt_tokens for reply in replies]),
        completion_tokens_mean=_mean([reply.completion_tokens for reply in replies]),
        checks_mean=_mean([len(reply.checks) for reply in replies]),
        cost_usd=sum(reply.cost_usd for reply in replies),
    )


def tiers_of(grade: Grade) -> dict[str, str]:
    """Trajectory id -> tier, or "hack"."""
    return {**{name: c.tier.value for name, c in grade.candidates.items()}, **dict.fromkeys(grade.hacks, HACK)}


def _pairs(results: Sequence[GroupResult], *, permuted: bool) -> Iterator[tuple[Grade, Grade]]:
    """Pairs of valid gradings of one group: both in one order, or one of them in another."""
    for result in results:
        usual = [g.reply.grade for g in result.gradings if g.reply.grade is not None and not g.permuted]
        other = [g.reply.grade for g in result.gradings if g.reply.grade is not None and g.permuted]
        yield from ((a, b) for a in usual for b in other) if permuted else combinations(usual, 2)


def _same_tier(pairs: Sequence[tuple[Grade, Grade]]) -> Share:
    part = whole = 0
    for a, b in pairs:
        first, second = tiers_of(a), tiers_of(b)
        part += sum(second.get(name) == tier for name, tier in first.items())
        whole += len(first)
    return Share(part=part, whole=whole)


def _complement(share: Share) -> Share:
    return Share(part=share.whole - share.part, whole=share.whole)


def _tau_b(a: Grade, b: Grade) -> float | None:
    """None where one of the rankings ties everything: there is no order to agree on."""
    places = [{name: (c.tier.value, c.tie) for name, c in grade.candidates.items()} for grade in (a, b)]
    names = sorted(set(places[0]) & set(places[1]))
    ranks: list[list[float]] = []
    for place in places:
        order = sorted({place[name] for name in names})
        if len(order) < 2:
            return None
        ranks.append([order.index(place[name]) for name in names])
    return kendall_tau_b(*ranks)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    p50, p95 = np.percentile(values, [50, 95]).tolist()
    return p50, p95


def trust_rows(figures: TrustFigures) -> list[tuple[str, str]]:
    """The figures as text, those without data left out."""
    rows = [("groups", str(figures.groups)), ("valid verdicts", _share(figures.valid, "gradings"))]
    rows += [(f"  fallback: {reason}", str(count)) for reason, count in sorted(figures.fallbacks.items())]
    if figures.tiers:
        rows.append(("tiers given", ", ".join(f"{tier} {count}" for tier, count in sorted(figures.tiers.items()))))
    if figures.tier_agreement.whole:
        rows.append(("tier as known", _share(figures.tier_agreement, "candidates")))
        rows.append(("score as known", _share(figures.score_agreement, "scores")))
    if figures.tau_b is not None:
        rows.append(("ranking against known, tau-b", f"{figures.tau_b:+.3f} (mean of {figures.tau_gradings} gradings)"))
    if figures.confusion:
        known = sorted({pair[0] for pair in figures.confusion})
        for tier in known:
            given = ", ".join(f"{g} {n}" for (k, g), n in sorted(figures.confusion.items()) if k == tier)
            rows.append((f"  known {tier} was given", given))
    if figures.self_agreement.whole:
        rows.append(("same tier when asked again", _share(figures.self_agreement, "candidates")))
    if figures.self_tau_b is not None:
        rows.append(("same ranking when asked again, tau-b", f"{figures.self_tau_b:+.3f}"))
    if figures.permuted_changes.whole:
        rows.append(("other tier in another order", _share(figures.permuted_changes, "candidates")))
    if figures.dropped_citations:
        rows.append(("citations of nothing", str(figures.dropped_citations)))
    if figures.run_s is not None:
        rows.append(("time of a grading, p50 / p95", f"{figures.run_s[0]:.1f} s / {figures.run_s[1]:.1f} s"))
    if figures.prompt_tokens_mean is not None:
        tokens = f"{figures.prompt_tokens_mean:,.0f} read, {figures.completion_tokens_mean or 0.0:,.0f} written"
        rows.append(("tokens of a grading", f"{tokens}, in {figures.turns_mean or 0.0:.1f} answers"))
    if figures.checks_mean:
        rows.append(("commands run, a grading", f"{figures.checks_mean:.1f}"))
    if figures.cost_usd and figures.valid.whole:
        each = figures.cost_usd / figures.valid.whole
        rows.append(("cost", f"{figures.cost_usd:.4f} USD, {each:.5f} USD a grading"))
    return rows


def _share(share: Share, unit: str) -> str:
    value = share.value
    return "-" if value is None else f"{value:.1%} ({share.part} of {share.whole} {unit})"
