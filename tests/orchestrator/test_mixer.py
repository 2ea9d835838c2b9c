"""The mixer: weights of M6.2 by hand, round-robin shares, limits, estimates and their restoration."""

from __future__ import annotations

from collections import Counter

import pytest

from configs.schema import ArithSource, FilesSource, MinirepoSource, OversamplingConfig
from orchestrator.mixer import Mixer, oversampling_budgets

EWMA = 0.1
"""Weight of the newest observation for a small quota: a window of ten."""


def make(alpha: float = 0.5) -> Mixer:
    return Mixer(
        {
            "code": MinirepoSource(type="minirepo", groups_per_step=4, prior_acceptance=0.5, prior_time_s=30.0),
            "files": FilesSource(type="files", groups_per_step=2, prior_acceptance=1.0, prior_time_s=10.0),
            "held": ArithSource(type="arith", groups_per_step=0),
        },
        alpha=alpha,
    )


def test_a_source_without_quota_is_not_mixed() -> None:
    assert make().quotas == {"code": 4, "files": 2}


def test_weights_follow_m6_2() -> None:
    mixer = make()
    assert mixer.weight("code") == pytest.approx((0.5 * 4 + 0.5 * 4) / 0.5)
    for _ in range(3):
        mixer.sources["code"].accepted += 1
    assert mixer.weight("code") == pytest.approx((0.5 * 4 + 0.5 * 1) / 0.5)
    mixer.sources["code"].accepted = 7
    assert mixer.weight("code") == pytest.approx(0.5 * 4 / 0.5), "surplus is not a negative need"


def test_dispatch_shares_follow_generation_need() -> None:
    mixer = make(alpha=1.0)
    chosen = Counter(mixer.choose({}, steps=1) for _ in range(100))
    assert chosen == {"code": 80, "files": 20}, "needs are 4/0.5=8 and 2/1=2"


def test_limit_stops_a_source_and_then_all() -> None:
    mixer = make()
    assert mixer.limit("code", 2) == 16 and mixer.limit("files", 2) == 4
    assert {mixer.choose({"code": 16}, steps=2) for _ in range(10)} == {"files"}
    assert mixer.choose({"code": 16, "files": 4}, steps=2) is None
    assert mixer.choose({}, steps=0) is None, "nothing is dispatched when no step is left"


def test_alpha_zero_serves_only_what_is_missing() -> None:
    mixer = make(alpha=0.0)
    mixer.sources["code"].accepted = 4
    assert {mixer.choose({}, steps=1) for _ in range(5)} == {"files"}


def test_estimates_are_exponentially_weighted() -> None:
    mixer = make()
    mixer.observe("code", accepted=False, time_s=50.0)
    assert mixer.sources["code"].acceptance == pytest.approx(0.5 * (1 - EWMA))
    assert mixer.sources["code"].time_s == pytest.approx(30.0 * (1 - EWMA) + 50.0 * EWMA)
    mixer.observe("code", accepted=True, time_s=50.0)
    assert mixer.sources["code"].accepted == 1
    mixer.consumed()
    assert mixer.sources["code"].accepted == -3, "a step takes its quota, whatever was counted"


def test_acceptance_never_reaches_zero() -> None:
    mixer = make()
    for _ in range(200):
        mixer.observe("code", accepted=False, time_s=1.0)
    assert mixer.sources["code"].acceptance == 0.05


def test_a_resume_samples_pending_tasks_again_before_new_ones() -> None:
    mixer = make()
    assert [mixer.take_index("code") for _ in range(5)] == [0, 1, 2, 3, 4]
    mixer.observe("code", accepted=False, time_s=9.0)
    state = mixer.state({"code": [3, 1]})
    other = make()
    other.restore(state)
    assert other.sources["code"].acceptance == mixer.sources["code"].acceptance
    assert [other.take_index("code") for _ in range(4)] == [1, 3, 5, 6]
    third = make()
    third.restore(other.state({"code": [5]}))
    assert [third.take_index("code") for _ in range(2)] == [5, 7]


PUBLISHED = {
    "chat": (7, 16.4, 0.641),
    "visual": (9, 12.1, 1.0),
    "cyber": (14.3, 50.7, 0.89),
    "code": (34.1, 24.1, 0.995),
}
"""M6.3, some of it: target %, minutes, acceptance."""


@pytest.mark.parametrize("mean", [0.0, 0.25, 0.5, 1.0, 2.0])
def test_oversampling_has_the_configured_mean_and_grows_with_time(mean: float) -> None:
    """M6.1: p_i = clip(c t_i - 1, p_min, p_max), weighted mean p_bar."""
    config = OversamplingConfig(mean=mean, min=0.0, max=2.0)
    times = [t for _, t, _ in PUBLISHED.values()]
    needs = [b / r for b, _, r in PUBLISHED.values()]
    budgets = oversampling_budgets(times, needs, config)
    assert sum(m * p for m, p in zip(needs, budgets, strict=True)) / sum(needs) == pytest.approx(mean)
    assert all(0.0 <= p <= 2.0 for p in budgets)
    by_time = [p for _, p in sorted(zip(times, budgets, strict=True))]
    assert by_time == sorted(by_time)
    inside = [(p + 1.0) / t for p, t in zip(budgets, times, strict=True) if 0.0 < p < 2.0]
    assert max(inside, default=1.0) == pytest.approx(min(inside, default=1.0)), "one c for all"


def test_budgets_bound_what_is_under_way() -> None:
    mixer = Mixer(
        {
            "code": MinirepoSource(type="minirepo", groups_per_step=4, prior_acceptance=0.5, prior_time_s=30.0),
            "files": FilesSource(type="files", groups_per_step=8, prior_acceptance=1.0, prior_time_s=10.0),
        },
        alpha=0.5,
        oversampling=OversamplingConfig(mean=0.5, min=0.0, max=1.0),
    )
    # Needs 8 and 8; p_code = 1 (clipped) and p_files = 0.
    assert (mixer.limit("code", 9), mixer.limit("files", 9)) == (16, 8)
    assert mixer.limit("code", 1) == 8, "staleness bounds it too"


def test_where_nothing_may_grow_too_old_acceptance_buys_no_more() -> None:
    """M6.4, wait: however many are accepted, the steps left train them."""
    mixer = Mixer(
        {"code": MinirepoSource(type="minirepo", groups_per_step=4, prior_acceptance=0.5)}, alpha=0.5, wait=True
    )
    assert mixer.limit("code", 3) == 12


def test_concurrency_shares_are_proportional_to_time_and_need() -> None:
    """M6.1: code 30 x 8, files 10 x 2."""
    assert make().shares() == pytest.approx({"code": 240 / 260, "files": 20 / 260})


def test_a_source_above_its_share_waits_for_one_below_but_no_slot_stays_empty() -> None:
    mixer = make()
    assert {mixer.choose({}, 1, rolling={"code": 0, "files": 40}, slots=100) for _ in range(9)} == {"code"}
    assert mixer.choose({"code": 99}, 1, rolling={"files": 40}, slots=100) == "files", "nobody else has use for it"


def test_own_bounds_on_concurrency() -> None:
    mixer = Mixer(
        {
            "code": MinirepoSource(type="minirepo", groups_per_step=4, max_concurrency=8),
            "files": FilesSource(type="files", groups_per_step=1, min_concurrency=4),
        },
        alpha=1.0,
        group_size=4,
    )
    assert mixer.choose({}, 9, rolling={"code": 0, "files": 0}) == "files", "below its minimum"
    assert mixer.choose({}, 9, rolling={"code": 4, "files": 4}) == "code"
    assert mixer.choose({"files": 99}, 9, rolling={"code": 8, "files": 4}) is None, "at its maximum"


def test_a_source_of_which_nothing_is_acceptable_gets_probes_only() -> None:
    """Neither spun on nor dropped (M6)."""
    mixer = Mixer({"code": MinirepoSource(type="minirepo", groups_per_step=4)}, alpha=0.5, starve_after=5, probes=1)
    for _ in range(4):
        mixer.observe("code", accepted=False, time_s=1.0)
    assert not mixer.starved("code")
    mixer.stale("code", ready=False)
    assert mixer.starved("code") and mixer.limit("code", 3) == 1 and mixer.choose({}, 3) == "code"
    mixer.observe("code", accepted=True, time_s=1.0)
    assert not mixer.starved("code") and mixer.limit("code", 3) > 4


def test_estimates_of_large_sources_look_back_further() -> None:
    small = Mixer({"a": ArithSource(type="arith", groups_per_step=1, prior_acceptance=0.5)}, alpha=0.5)
    large = Mixer({"a": ArithSource(type="arith", groups_per_step=500, prior_acceptance=0.5)}, alpha=0.5)
    for mixer in (small, large):
        for i in range(2000):
            mixer.observe("a", accepted=i % 5 != 0, time_s=None)
    assert large.sources["a"].acceptance == pytest.approx(0.8, abs=0.005)
    assert abs(small.sources["a"].acceptance - 0.8) < 0.1
    assert large.sources["a"].time_s == 20.0, "what a resume brought back was not timed"


def test_a_resume_keeps_what_the_ledger_brings_back_out_of_the_stream() -> None:
    mixer = make()
    for _ in range(4):
        mixer.take_index("code")
    state = mixer.state({"code": [1, 3]})
    other = make()
    other.restore(state, {"code": {1, 6}})  # 4 and 5 were dispatched later, and nothing is left of them
    assert [other.take_index("code") for _ in range(4)] == [3, 4, 5, 7]
