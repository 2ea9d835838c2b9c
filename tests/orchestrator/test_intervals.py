"""Estimates: values by hand, and intervals that cover what they should."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from orchestrator.intervals import difference, kappa, pass_at_k, ratio, weighted_kappa


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    outcomes = [1, 0, 0, 1, 0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(2, 5, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    assert pass_at_k(0, 4, 4) == 0.0 and pass_at_k(1, 4, 4) == 1.0
    with pytest.raises(ValueError, match="pass@4 cannot be told from 3 samples"):
        pass_at_k(1, 3, 4)


def test_a_ratio_is_of_sums_not_a_mean_of_ratios() -> None:
    found = ratio(np.array([[1.0, 0.0, 4.0]]), np.array([[1.0, 3.0, 4.0]]))
    assert found is not None and found.value == pytest.approx(5 / 8)
    assert found.low is not None and found.high is not None and found.low < 5 / 8 < found.high
    assert ratio(np.zeros((1, 3)), np.zeros((1, 3))) is None


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(150):
        passes = rng.binomial(3, 0.4, size=(1, 60)).astype(float)
        found = ratio(passes, np.full((1, 60), 3.0))
        assert found is not None and found.low is not None and found.high is not None
        covered += found.low <= 0.4 <= found.high
    assert 0.87 <= covered / 150 <= 1.0


def test_a_paired_difference_is_tighter_than_the_tasks_are_far_apart() -> None:
    """Tasks differ wildly, but the first arm passes one more of ten of each: only pairing sees that."""
    easy = np.repeat([[0.0, 9.0]], 10, axis=0).reshape(1, 20)
    tens = np.full((1, 20), 10.0)
    apart = difference(easy + 1.0, tens, easy, tens)
    assert apart is not None and apart.low is not None and apart.high is not None
    assert apart.value == pytest.approx(0.1) and apart.low == pytest.approx(0.1) and apart.high == pytest.approx(0.1)
    assert apart.clear_of_zero
    alone = ratio(easy, tens)
    assert alone is not None and alone.low is not None and alone.high is not None and alone.high - alone.low > 0.3


def test_seeds_that_disagree_widen_an_interval() -> None:
    agree, disagree = np.full((3, 40), 0.5), np.repeat([[0.1], [0.5], [0.9]], 40, axis=1)
    ones = np.ones((3, 40))
    narrow, wide = ratio(agree, ones), ratio(disagree, ones)
    assert narrow is not None and wide is not None and narrow.value == pytest.approx(wide.value)
    assert narrow.low == pytest.approx(0.5) and wide.low is not None and wide.low < 0.3


def test_a_figure_of_one_task_or_two_or_of_one_seed_has_no_interval() -> None:
    """Draws of what is there once all say the same: an interval of no width would look like certainty."""
    ones = np.ones((1, 60))
    for informed, known in ((1, False), (2, False), (4, True)):
        wholes = np.zeros((1, 60))
        wholes[0, :informed] = 1.0
        share, apart = ratio(wholes, wholes), difference(wholes, wholes, ones * 0.2, ones)
        for found, value in ((share, 1.0), (apart, 0.8)):
            assert found is not None and found.value == pytest.approx(value)
            assert (found.low is not None) == (found.high is not None) == known, informed
            assert found.clear_of_zero == known
    alone, both = ratio(np.ones((3, 1)), np.ones((3, 1))), ratio(np.ones((3, 2)), np.ones((3, 2)))
    assert alone is not None and alone.value == 1.0 and alone.low is None, "of one task, which every draw takes"
    assert both is not None and both.low is None, "of two"
    half = np.vstack([np.ones((1, 60)), np.zeros((1, 60))])
    assert (seed := ratio(half, half)) is not None and seed.low is None, "one seed of two has it at all"


def test_kappa_by_hand() -> None:
    # 8 of 10 agree; chance alone: .5 x .5 + .5 x .5
    first = ["a"] * 5 + ["b"] * 5
    second = ["a"] * 4 + ["b"] + ["a"] + ["b"] * 4
    assert kappa(first, second) == pytest.approx((0.8 - 0.5) / (1 - 0.5))
    assert kappa(first, first) == 1.0
    assert kappa(["a", "a"], ["a", "a"]) is None and kappa([], []) is None


def test_weighted_kappa_by_hand() -> None:
    # observed mean squared distance 1/2; expected: pairs (1,1) (1,2) (3,1) (3,2) -> (0 + 1 + 4 + 1) / 4
    assert weighted_kappa([1, 3], [1, 2]) == pytest.approx(1 - (1 / 2) / (6 / 4))
    assert weighted_kappa([1, 5], [1, 5]) == 1.0
    assert weighted_kappa([5, 5], [5, 5]) is None and weighted_kappa([], []) is None
