"""M4 and M5.4: the golden cases, and what M4.3 and M4.7 state, as properties."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from configs.schema import AdvantageMode, LengthPenaltyConfig
from learner.advantage import Advantages, advantages, length_penalty

CAP = 1.5
CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "advantages.json").read_text())


def number(text: str | None) -> float | None:
    return None if text is None else float(Fraction(text))


def compute(case: dict[str, Any], mode: AdvantageMode) -> Advantages:
    rewards = [float(Fraction(x)) for x in case["rewards"]]
    return advantages(mode, rewards, case["passed"], [number(x) for x in case["factors"]], CAP)


GOLDEN = [(case, mode) for case in CASES for mode in AdvantageMode if mode.value in case["expected"]]


@pytest.mark.parametrize(("case", "mode"), GOLDEN, ids=[f"{case['name']}-{mode}" for case, mode in GOLDEN])
def test_golden(case: dict[str, Any], mode: AdvantageMode) -> None:
    expected = case["expected"]
    got = compute(case, mode)
    assert got.values == pytest.approx([number(x) for x in expected[mode.value]], abs=1e-9, rel=0)
    if mode is AdvantageMode.REDISTRIBUTE:
        assert got.capped is expected["capped"]
        want = number(expected["lambda"])
        assert (got.lam is None) if want is None else got.lam == pytest.approx(want, abs=1e-9, rel=0)


def test_golden_covers_every_mode_and_binary_exact() -> None:
    assert len(CASES) == 9
    assert sum("redistribute_exact" in case["expected"] for case in CASES) == 7


@st.composite
def binary_groups(draw: st.DrawFn, min_pass: int = 1, min_fail: int = 1) -> tuple[list[bool], list[float | None]]:
    """A mixed group in a random order, with a factor of M3's range for each pass."""
    passes = draw(st.integers(min_pass, 8))
    fails = draw(st.integers(min_fail, 8))
    order = draw(st.permutations([True] * passes + [False] * fails))
    factor = st.floats(0.05, 1.0, allow_nan=False)
    return list(order), [draw(factor) if ok else None for ok in order]


@st.composite
def real_groups(draw: st.DrawFn) -> tuple[list[float], list[bool], list[float | None]]:
    """Any rewards, as after M1.8; passing is the verifier's word."""
    n = draw(st.integers(2, 10))
    passed = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    rewards = draw(st.lists(st.floats(-1.0, 1.0, allow_nan=False), min_size=n, max_size=n))
    factors = [draw(st.floats(0.05, 1.0)) if ok else None for ok in passed]
    return rewards, passed, factors


def binary(mode: AdvantageMode, passed: list[bool], factors: list[float | None], cap: float = CAP) -> Advantages:
    return advantages(mode, [float(ok) for ok in passed], passed, factors, cap)


def on(side: bool, passed: list[bool], values: tuple[float, ...]) -> list[float]:
    return [value for value, ok in zip(values, passed, strict=True) if ok is side]


def passing_factors(factors: list[float | None]) -> list[float]:
    return [factor for factor in factors if factor is not None]


@given(binary_groups())
def test_exact_keeps_the_passing_sum_the_ratios_and_the_failing_side(
    group: tuple[list[bool], list[float | None]],
) -> None:
    passed, factors = group
    outcome = binary(AdvantageMode.OUTCOME, passed, factors).values
    got = binary(AdvantageMode.REDISTRIBUTE_EXACT, passed, factors)
    assert math.fsum(on(True, passed, got.values)) == pytest.approx(math.fsum(on(True, passed, outcome)), rel=1e-9)
    assert on(False, passed, got.values) == on(False, passed, outcome)  # untouched, to the bit
    f, values = passing_factors(factors), on(True, passed, got.values)
    for i in range(len(f)):
        assert values[i] / values[0] == pytest.approx(f[i] / f[0], rel=1e-9)
    p, mean_f = sum(passed) / len(passed), math.fsum(f) / len(f)
    assert values == pytest.approx([(1 - p) * x / mean_f for x in f], rel=1e-9)  # closed form of M4.2
    assert all(value > 0 for value in values)  # a worse pass is still a pass
    assert not got.capped


@given(binary_groups(min_pass=1), st.floats(0.05, 1.0))
def test_equal_factors_or_one_pass_leave_the_exact_form_at_the_outcome(
    group: tuple[list[bool], list[float | None]], f: float
) -> None:
    passed, _ = group
    equal = [f if ok else None for ok in passed]
    outcome = binary(AdvantageMode.OUTCOME, passed, equal).values
    assert binary(AdvantageMode.REDISTRIBUTE_EXACT, passed, equal).values == pytest.approx(outcome, abs=1e-9)
    trained = binary(AdvantageMode.REDISTRIBUTE, passed, equal)
    if f < 2 / 3 - 1e-6:  # ... but the trained form moves when the cap binds
        assert trained.capped
        assert trained.values != pytest.approx(outcome, abs=1e-9)
    elif f > 2 / 3 + 1e-6:
        assert not trained.capped
        assert trained.values == pytest.approx(outcome, abs=1e-9)


@given(binary_groups(), st.floats(0.01, 1.0))
def test_scaling_all_factors_changes_nothing_in_the_exact_form(
    group: tuple[list[bool], list[float | None]], c: float
) -> None:
    passed, factors = group
    scaled = [None if f is None else f * c for f in factors]
    first = binary(AdvantageMode.REDISTRIBUTE_EXACT, passed, factors).values
    assert binary(AdvantageMode.REDISTRIBUTE_EXACT, passed, scaled).values == pytest.approx(first, rel=1e-9)


@given(binary_groups())
def test_cap_binds_iff_the_mean_factor_is_below_two_thirds(group: tuple[list[bool], list[float | None]]) -> None:
    passed, factors = group
    f = passing_factors(factors)
    mean_f = math.fsum(f) / len(f)
    assume(abs(mean_f - 2 / 3) > 1e-9)
    got = binary(AdvantageMode.REDISTRIBUTE, passed, factors)
    assert got.capped is (mean_f < 2 / 3)
    assert got.lam == pytest.approx(1 / mean_f, rel=1e-9)


@given(binary_groups(min_pass=2))
def test_trained_form_keeps_the_order_on_the_passing_side(group: tuple[list[bool], list[float | None]]) -> None:
    passed, factors = group
    values = on(True, passed, binary(AdvantageMode.REDISTRIBUTE, passed, factors).values)
    f = passing_factors(factors)
    for i in range(len(f)):
        for j in range(len(f)):
            if f[i] > f[j] + 1e-9:
                assert values[i] > values[j]
            elif f[i] == f[j]:
                assert values[i] == values[j]


@given(binary_groups())
def test_uncapped_trained_form_is_the_exact_form(group: tuple[list[bool], list[float | None]]) -> None:
    passed, factors = group
    exact = binary(AdvantageMode.REDISTRIBUTE_EXACT, passed, factors).values
    assert binary(AdvantageMode.REDISTRIBUTE, passed, factors, cap=1e6).values == exact


@given(binary_groups())
def test_capped_trained_form_moves_the_failing_side(group: tuple[list[bool], list[float | None]]) -> None:
    passed, factors = group
    got = binary(AdvantageMode.REDISTRIBUTE, passed, factors)
    outcome = on(False, passed, binary(AdvantageMode.OUTCOME, passed, factors).values)
    shift = [a - b for a, b in zip(on(False, passed, got.values), outcome, strict=True)]
    f = passing_factors(factors)
    if got.capped:
        p = sum(passed) / len(passed)
        # B sums to CAP * sum(f) * (1 - p) - sum_P A on P; recentring spreads the shortfall over all.
        shortfall = (len(f) - CAP * math.fsum(f)) * (1 - p) / len(passed)
        assert shift == pytest.approx([shortfall] * len(shift), abs=1e-9)
    else:
        assert shift == [0.0] * len(shift)


@given(real_groups(), st.sampled_from(list(AdvantageMode)), st.randoms(use_true_random=False))
def test_permuting_trajectories_permutes_results(
    group: tuple[list[float], list[bool], list[float | None]], mode: AdvantageMode, random: Any
) -> None:
    rewards, passed, factors = group
    order = list(range(len(rewards)))
    random.shuffle(order)
    first = advantages(mode, rewards, passed, factors, CAP)
    again = advantages(mode, [rewards[i] for i in order], [passed[i] for i in order], [factors[i] for i in order], CAP)
    assert again.values == tuple(first.values[i] for i in order)
    assert (again.lam, again.capped) == (first.lam, first.capped)


@given(
    real_groups(),
    st.sampled_from([m for m in AdvantageMode if m is not AdvantageMode.DOWNWEIGHT]),
)
def test_group_sum_is_zero(group: tuple[list[float], list[bool], list[float | None]], mode: AdvantageMode) -> None:
    rewards, passed, factors = group
    assert math.fsum(advantages(mode, rewards, passed, factors, CAP).values) == pytest.approx(0.0, abs=1e-9)


@given(real_groups())
def test_general_rewards_follow_the_positive_part(group: tuple[list[float], list[bool], list[float | None]]) -> None:
    """M4.4, written out once more with exact fractions."""
    rewards, passed, factors = group
    r = [Fraction(x) for x in rewards]
    a = [x - sum(r) / len(r) for x in r]
    plus = [max(x, Fraction(0)) if ok else x for x, ok in zip(a, passed, strict=True)]
    f = [Fraction(1) if x is None else Fraction(x) for x in factors]
    top = sum((x for x, ok in zip(plus, passed, strict=True) if ok), Fraction(0))
    low = sum((x * g for x, g, ok in zip(plus, f, passed, strict=True) if ok), Fraction(0))
    assume(low == 0 or low > Fraction(1, 10**6))  # between them the fraction sees what a float calls rounding
    b = (
        a
        if low == 0
        else [min(top / low, Fraction(3, 2)) * g * x if ok else x for x, g, ok in zip(plus, f, passed, strict=True)]
    )
    want = [float(x - sum(b) / len(b)) for x in b]
    assert advantages(AdvantageMode.REDISTRIBUTE, rewards, passed, factors, CAP).values == pytest.approx(want, abs=1e-9)


@given(binary_groups())
def test_reward_space_equivalent_gives_the_same_advantages(group: tuple[list[bool], list[float | None]]) -> None:
    """M4.5: R' = A* + p, centred, is A* again."""
    passed, factors = group
    p = sum(passed) / len(passed)
    star = binary(AdvantageMode.REDISTRIBUTE_EXACT, passed, factors).values
    rewards = [value + p for value in star]
    assert on(False, passed, tuple(rewards)) == pytest.approx([0.0] * passed.count(False), abs=1e-9)
    assert advantages(AdvantageMode.OUTCOME, rewards, passed, [None] * len(passed), CAP).values == pytest.approx(
        star, abs=1e-9
    )


def test_exact_form_with_a_pass_below_the_mean_takes_the_positive_part() -> None:
    # a = .55 .25 -.35 -.45; lambda = .8 / (.55 + .9 * .25) = 32/31; B = 17.6/31, 7.2/31, 0, -.45; mean(B) = .0875
    got = advantages(
        AdvantageMode.REDISTRIBUTE_EXACT, [1.0, 0.7, 0.1, 0.0], [True, True, True, False], [1.0, 0.9, 0.2, None], CAP
    )
    assert got.lam == pytest.approx(32 / 31)
    assert got.values == pytest.approx([17.6 / 31 - 0.0875, 7.2 / 31 - 0.0875, -0.0875, -0.5375], abs=1e-12)


@pytest.mark.parametrize("mode", list(AdvantageMode))
def test_all_pass_and_all_fail_carry_nothing_to_redistribute(mode: AdvantageMode) -> None:
    assert advantages(mode, [0.7] * 3, [True] * 3, [0.5] * 3, CAP).values == (0.0, 0.0, 0.0)
    got = advantages(mode, [0.0, 0.0], [False, False], [None, None], CAP)
    assert got == Advantages(values=(0.0, 0.0), lam=None, capped=False)


@pytest.mark.parametrize(
    ("passed", "factors"),
    [
        ([True, False], [None, None]),
        ([True, False], [0.0, None]),
        ([True, False], [1.1, None]),
        ([True, False], [1.0, 0.5]),
    ],
)
def test_bad_factors_are_refused(passed: list[bool], factors: list[float | None]) -> None:
    with pytest.raises(ValueError, match="factor"):
        binary(AdvantageMode.REDISTRIBUTE, passed, factors)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="per trajectory"):
        advantages(AdvantageMode.OUTCOME, [1.0], [True, False], [None, None], CAP)
    with pytest.raises(ValueError, match="per trajectory"):
        advantages(AdvantageMode.OUTCOME, [], [], [], CAP)


def test_length_penalty_by_hand() -> None:
    config = LengthPenaltyConfig(max_penalty=0.2, free_excess=0.0, full_excess=1.0, exponent=1.5, percentile=50.0)
    # Passing: turns 2 4 6 (median 4), input 100 100 100, output 10 10 25 (median 10). Largest ratios: 1, 1, 2.5 -> 1.
    got = length_penalty(
        [1.0, 1.0, 1.0, 0.0], [True, True, True, False], [2, 4, 6, 50], [100, 100, 100, 900], [10, 10, 25, 900], config
    )
    assert got == pytest.approx((1.0, 1.0, 0.8, 0.0))
    # Only turns differ: 6 / 4 = 1.5 -> 0.5 ** 1.5 of 0.2.
    got = length_penalty([1.0] * 3 + [0.0], [True] * 3 + [False], [2, 4, 6, 1], [9] * 4, [9] * 4, config)
    assert got == pytest.approx((1.0, 1.0, 1.0 - 0.2 * 0.5**1.5, 0.0))


def test_length_penalty_needs_a_pass_rate_above_the_bound() -> None:
    config = LengthPenaltyConfig(percentile=0.0)
    at_bound = length_penalty([1.0, 0.0], [True, False], [9, 1], [9, 1], [9, 1], config)
    assert at_bound == (1.0, 0.0)
    above = length_penalty([1.0, 1.0, 0.0], [True, True, False], [1, 9, 1], [1, 1, 1], [1, 1, 1], config)
    assert above == (1.0, 0.8, 0.0)


def test_length_penalty_percentile_interpolates() -> None:
    config = LengthPenaltyConfig(percentile=30.0, min_pass_rate=0.0, free_excess=0.5, full_excess=1.5, exponent=1.0)
    # 30th percentile of 10, 20: 13. 20 / 13 - 1 = .538: .038 of the ramp.
    got = length_penalty([1.0, 1.0], [True, True], [1, 1], [1, 1], [10, 20], config)
    assert got == pytest.approx((1.0, 1.0 - 0.2 * (20 / 13 - 1.5)))
