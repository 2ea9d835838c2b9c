"""Agreement of gradings, with values worked out by hand."""

from __future__ import annotations

import pytest

from configs.schema import RubricConfig
from grader.agreement import Agreement, agreement, kendall_tau_b, mean_tau_b
from grader.rubric import Flags, Scores, Tier
from grader.verdict import CandidateGrade, Grade

RUBRIC = RubricConfig()
CLEAN, SPREAD, CASES = Scores(5, 5, 5, 5, 5), Scores(3, 4, 3, 4, 3), Scores(1, 2, 3, 3, 2)


def given(scores: Scores, tier: Tier, tie: int = 0) -> CandidateGrade:
    return CandidateGrade(
        scores=scores,
        reasons=("a", "b", "c", "d", "e"),
        flags=Flags(),
        weighted=0.0,
        tier=tier,
        tie=tie,
        factor=1.0,
        evidence=(),
    )


@pytest.mark.parametrize(
    ("a", "b", "tau"),
    [
        ([0, 1, 2], [0, 1, 2], 1.0),
        ([0, 1, 2], [2, 1, 0], -1.0),
        ([0, 1, 2], [0, 2, 1], 1 / 3),  # two of three pairs agree
        ([0, 0, 1], [0, 0, 1], 1.0),
        ([0, 0, 1], [0, 1, 2], 2 / (2 * 3) ** 0.5),  # two agree, one tied on one side: 2 / sqrt(2 x 3)
        ([0, 0, 0], [0, 1, 2], 0.0),
        ([0], [0], 0.0),
    ],
)
def test_kendall_tau_b(a: list[int], b: list[int], tau: float) -> None:
    assert kendall_tau_b(a, b) == pytest.approx(tau)


def test_the_right_grade_agrees_in_everything() -> None:
    grade = Grade(candidates={"a": given(CLEAN, Tier.T1), "b": given(CASES, Tier.T3)}, hacks={})
    found = agreement(grade, {"a": (CLEAN, Flags()), "b": (CASES, Flags())}, RUBRIC)
    assert found == Agreement(tiers_right=2, tiers=2, scores_right=10, scores=10, tau_b=1.0)


def test_a_grade_is_held_against_the_known_one_by_id() -> None:
    """a and b swapped: both tiers wrong, the order reversed; of the scores only the third of c's five is off."""
    grade = Grade(
        candidates={
            "b": given(CLEAN, Tier.T1),
            "a": given(CASES, Tier.T3),
            "c": given(Scores(3, 4, 4, 4, 3), Tier.T2),
        },
        hacks={},
    )
    found = agreement(grade, {"a": (CLEAN, Flags()), "b": (CASES, Flags()), "c": (SPREAD, Flags())}, RUBRIC)
    assert (found.tiers_right, found.tiers) == (1, 3)
    assert (found.scores_right, found.scores) == (4, 15)
    assert found.tau_b == pytest.approx(-1.0)


def test_a_hack_ranks_below_everything_and_its_tier_is_wrong() -> None:
    grade = Grade(candidates={"b": given(CASES, Tier.T3)}, hacks={"a": ()})
    found = agreement(grade, {"a": (CLEAN, Flags()), "b": (CASES, Flags())}, RUBRIC)
    assert (found.tiers_right, found.tiers, found.tau_b) == (1, 2, -1.0)


def test_equal_candidates_have_no_order_to_agree_on() -> None:
    grade = Grade(candidates={"a": given(CLEAN, Tier.T1), "b": given(SPREAD, Tier.T2)}, hacks={})
    equal = agreement(grade, {"a": (CLEAN, Flags()), "b": (CLEAN, Flags())}, RUBRIC)
    assert equal.tau_b is None
    other = agreement(grade, {"a": (CLEAN, Flags()), "b": (CASES, Flags())}, RUBRIC)
    assert mean_tau_b([equal, other]) == 1.0
    assert mean_tau_b([equal]) is None


def test_known_tiers_leave_out_what_the_rubric_leaves_out() -> None:
    grade = Grade(candidates={"a": given(Scores(1, 5, 5, 5, 5), Tier.T1)}, hacks={})
    known = {"a": (Scores(1, 5, 5, 5, 5), Flags())}
    assert agreement(grade, known, RUBRIC).tiers_right == 0
    assert agreement(grade, known, RubricConfig(left_out=("approach",))).tiers_right == 1
