"""How far two gradings agree: tiers, and rankings with ties. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from configs.schema import RubricConfig
from grader.rubric import Flags, Scores, counted, rank_key, tier_of
from grader.verdict import Grade


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One grade against known scores and flags."""

    tiers_right: int
    """Candidates with exactly the known tier."""
    tiers: int
    """Candidates whose tier is known. One that was called a hack counts, as wrong."""
    scores_right: int
    scores: int
    """Five a candidate."""
    tau_b: float | None
    """Kendall's tau-b of the rankings; None where the known ranking ties everything (nothing to be agreed on)."""


def agreement(grade: Grade, known: Mapping[str, tuple[Scores, Flags]], rubric: RubricConfig) -> Agreement:
    """Hold a grade against what is known, by trajectory id. The known ranking is the rubric's own order (M3.3)."""
    given = {name: grade.candidates.get(name) for name in known}
    tiers_right = sum(
        (c := given[name]) is not None and c.tier is tier_of(counted(scores, rubric), flags)
        for name, (scores, flags) in known.items()
    )
    scores_right = sum(
        (c := given[name]) is not None and c.scores[i] == scores[i]
        for name, (scores, _) in known.items()
        for i in range(len(scores))
    )
    right = {name: rank_key(*what, rubric) for name, what in known.items()}
    tau_b = None
    if len(set(right.values())) > 1:
        places = {name: ("T4", 0) if c is None else (c.tier.value, c.tie) for name, c in given.items()}
        tau_b = kendall_tau_b(_ranks([right[n] for n in known]), _ranks([places[n] for n in known]))
    return Agreement(
        tiers_right=tiers_right, tiers=len(known), scores_right=scores_right, scores=5 * len(known), tau_b=tau_b
    )


def mean_tau_b(found: Sequence[Agreement]) -> float | None:
    """Mean over the groups that have one."""
    taus = [one.tau_b for one in found if one.tau_b is not None]
    return fmean(taus) if taus else None


def _ranks(keys: Sequence[tuple[int, float]] | Sequence[tuple[str, int]]) -> list[float]:
    order = sorted(set(keys))
    return [order.index(key) for key in keys]


def kendall_tau_b(a: Sequence[float], b: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings with ties; 0 where one of them ties everything."""
    concordant = discordant = tied_a = tied_b = pairs = 0
    for i in range(len(a)):
        for j in range(i):
            da, db = a[i] - a[j], b[i] - b[j]
            pairs += 1
            tied_a += da == 0
            tied_b += db == 0
            concordant += da * db > 0
            discordant += da * db < 0
    scale = float(((pairs - tied_a) * (pairs - tied_b)) ** 0.5)
    return (concordant - discordant) / scale if scale else 0.0
