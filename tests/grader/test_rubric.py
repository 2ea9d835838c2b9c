"""M3, with every expected value worked out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import RubricConfig
from grader.rubric import (
    Flag,
    Flags,
    Scores,
    Tier,
    factors,
    is_negative,
    rank_key,
    tie_indices,
    tier_of,
    weighted_score,
)

RUBRIC = RubricConfig()
ALL_SCORES = [Scores(*s) for s in itertools.product(range(1, 6), repeat=5)]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((5, 5, 5, 5, 5), 5.0),
        ((1, 1, 1, 1, 1), 1.0),
        ((5, 1, 1, 1, 1), 2.2),  # 1 + 4 x .30
        ((1, 5, 1, 1, 1), 2.0),  # 1 + 4 x .25
        ((1, 1, 5, 1, 1), 1.8),  # 1 + 4 x .20
        ((1, 1, 1, 5, 1), 1.6),  # 1 + 4 x .15
        ((1, 1, 1, 1, 5), 1.4),  # 1 + 4 x .10
        ((5, 4, 3, 2, 1), 3.5),  # 1.5 + 1.0 + .6 + .3 + .1
    ],
)
def test_weighted_score(scores: tuple[int, ...], expected: float) -> None:
    assert weighted_score(Scores(*scores), RUBRIC) == pytest.approx(expected, abs=1e-12)


def flags(*raised: Flag) -> Flags:
    return Flags(frozenset(raised))


@pytest.mark.parametrize(
    ("scores", "raised", "tier"),
    [
        # T1: all five at least 4 and neither process issue nor regression
        ((5, 5, 5, 5, 5), (), Tier.T1),
        ((4, 4, 4, 4, 4), (), Tier.T1),
        # one score of 3 is enough for T2, whichever it is
        ((3, 5, 5, 5, 5), (), Tier.T2),
        ((5, 3, 5, 5, 5), (), Tier.T2),
        ((5, 5, 3, 5, 5), (), Tier.T2),
        ((5, 5, 5, 3, 5), (), Tier.T2),
        ((5, 5, 5, 5, 3), (), Tier.T2),
        # trouble on the way keeps top scores out of T1, but does not make T3
        ((5, 5, 5, 5, 5), (Flag.SEVERE_PROCESS_ISSUE,), Tier.T2),
        ((5, 5, 5, 5, 5), (Flag.UNRESOLVED_REGRESSION,), Tier.T2),
        # T3 by flag, whatever the scores
        ((5, 5, 5, 5, 5), (Flag.UNREQUESTED_REWRITE,), Tier.T3),
        ((5, 5, 5, 5, 5), (Flag.TEST_WORKAROUND,), Tier.T3),
        ((5, 5, 5, 5, 5), (Flag.TEST_WORKAROUND, Flag.SEVERE_PROCESS_ISSUE), Tier.T3),
        # T3 by approach 1, not by 2; no other single 1 does it
        ((1, 5, 5, 5, 5), (), Tier.T3),
        ((2, 5, 5, 5, 5), (), Tier.T2),
        ((5, 1, 5, 5, 5), (), Tier.T2),
        ((5, 5, 5, 5, 1), (), Tier.T2),
        # T3 needs minimality and side effects both at most 2
        ((5, 5, 2, 2, 5), (), Tier.T3),
        ((5, 5, 1, 1, 5), (), Tier.T3),
        ((5, 5, 2, 3, 5), (), Tier.T2),
        ((5, 5, 3, 2, 5), (), Tier.T2),
        ((5, 5, 1, 5, 5), (), Tier.T2),
        ((5, 5, 5, 1, 5), (), Tier.T2),
    ],
)
def test_tier(scores: tuple[int, ...], raised: tuple[Flag, ...], tier: Tier) -> None:
    assert tier_of(Scores(*scores), flags(*raised)) is tier


def test_tier_sizes_over_all_score_vectors() -> None:
    """Counted by hand without flags: T1 2^5; T3 = 625 (approach 1) + 4 x 5 x 2 x 2 x 5 (the pair, approach > 1)."""
    counts = {t: sum(tier_of(s, flags()) is t for s in ALL_SCORES) for t in Tier}
    assert counts == {Tier.T1: 32, Tier.T3: 625 + 400, Tier.T2: 3125 - 32 - 1025}


@pytest.mark.parametrize(
    ("tiers", "ties", "expected"),
    [
        # M3.4's own check: T2 order A = B > C > D
        (["T2"] * 4, [0, 0, 1, 2], [0.85, 0.85, 0.625, 0.40]),
        (["T2"], [0], [0.85]),
        (["T2"] * 3, [0, 0, 0], [0.85, 0.85, 0.85]),  # a tied group counts once: K2 = 1
        (["T2", "T2"], [0, 1], [0.85, 0.40]),
        (["T2"] * 3, [2, 0, 1], [0.40, 0.85, 0.625]),
        (["T2"] * 5, [0, 1, 2, 3, 3], [0.85, 0.70, 0.55, 0.40, 0.40]),  # K2 = 4, steps of .15
        (["T1"] * 4, [0, 0, 1, 2], [1.0, 1.0, 0.9, 0.9]),
        (["T3"] * 3, [0, 1, 2], [0.2, 0.2, 0.2]),
        (["T1", "T2", "T2", "T3"], [0, 0, 1, 0], [1.0, 0.85, 0.40, 0.2]),
        ([], [], []),
    ],
)
def test_factors(tiers: list[str], ties: list[int], expected: list[float]) -> None:
    assert factors(tiers, ties, RUBRIC) == pytest.approx(expected, abs=1e-12)


def test_factors_follow_the_configuration() -> None:
    rubric = RubricConfig(t1_first=0.8, t1_rest=0.7, t2_high=0.6, t2_low=0.3, t3=0.1)
    given_tiers, ties = ["T1", "T1", "T2", "T2", "T3"], [0, 1, 0, 1, 0]
    assert factors(given_tiers, ties, rubric) == pytest.approx([0.8, 0.7, 0.6, 0.3, 0.1])


@pytest.mark.parametrize(("tiers", "ties"), [(["T2"], [1]), (["T2", "T2"], [0, 2]), (["T1"], []), (["T9"], [0])])
def test_factors_refuse_what_makes_no_sense(tiers: list[str], ties: list[int]) -> None:
    with pytest.raises(ValueError):
        factors(tiers, ties, RUBRIC)


def test_tie_indices_count_inside_each_tier() -> None:
    tiers = {"a": Tier.T1, "b": Tier.T2, "c": Tier.T2, "d": Tier.T2, "e": Tier.T3}
    ties = tie_indices([["a"], ["b", "c"], ["d"], ["e"]], tiers)
    assert ties == {"a": 0, "b": 0, "c": 0, "d": 1, "e": 0}


def test_a_tie_across_tiers_has_no_index() -> None:
    with pytest.raises(ValueError, match="spans"):
        tie_indices([["a", "b"]], {"a": Tier.T1, "b": Tier.T2})


@given(st.sampled_from(ALL_SCORES), st.sampled_from(ALL_SCORES))
def test_rank_key_puts_the_tier_before_the_weighted_score(a: Scores, b: Scores) -> None:
    ta, tb = tier_of(a, flags()), tier_of(b, flags())
    if ta.value < tb.value or (ta is tb and weighted_score(a, RUBRIC) > weighted_score(b, RUBRIC) + 1e-6):
        assert rank_key(a, flags(), RUBRIC) < rank_key(b, flags(), RUBRIC)


def test_equal_weighted_scores_are_a_tie_despite_binary_fractions() -> None:
    """.30 x 1 against .20 x 1 + .10 x 1: the same W by different sums."""
    a, b = Scores(5, 4, 4, 4, 4), Scores(4, 4, 5, 4, 5)
    assert rank_key(a, flags(), RUBRIC) == rank_key(b, flags(), RUBRIC)


@pytest.mark.parametrize(
    ("scores", "raised", "negative"),
    [
        ((5, 5, 5, 5, 5), (), False),
        ((3, 3, 3, 3, 3), (), False),
        ((5, 5, 2, 5, 5), (), True),
        ((5, 5, 5, 5, 5), (Flag.SEVERE_PROCESS_ISSUE,), True),
    ],
)
def test_what_needs_evidence(scores: tuple[int, ...], raised: tuple[Flag, ...], negative: bool) -> None:
    assert is_negative(Scores(*scores), flags(*raised)) is negative


def test_as_dict_names_what_the_audit_trail_records() -> None:
    assert Scores(1, 2, 3, 4, 5).as_dict() == {
        "approach": 1,
        "precision": 2,
        "minimality": 3,
        "side_effects": 4,
        "consistency": 5,
    }
    assert flags(Flag.TEST_WORKAROUND).as_dict() == {
        "unrequested_rewrite": False,
        "test_workaround": True,
        "severe_process_issue": False,
        "unresolved_regression": False,
    }


@pytest.mark.parametrize("name", Scores._fields)
def test_candidates_that_differ_in_what_is_left_out_alone_are_tied(name: str) -> None:
    without = RubricConfig(left_out=(name,))
    low, high = Scores(4, 4, 4, 4, 4)._replace(**{name: 1}), Scores(4, 4, 4, 4, 4)._replace(**{name: 5})
    assert rank_key(low, flags(), without) == rank_key(high, flags(), without)
    assert rank_key(low, flags(), RUBRIC) > rank_key(high, flags(), RUBRIC)
    assert rank_key(low, flags("test_workaround"), without)[0] == 2, "flags still count"
