"""The mixer: weights of M6.2 by hand, round-robin shares, limits, estimates and their restoration."""

from __future__ import annotations

from collections import Counter

import pytest

from configs.schema import ArithSource, FilesSource, MinirepoSource
from orchestrator.mixer import Mixer

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
