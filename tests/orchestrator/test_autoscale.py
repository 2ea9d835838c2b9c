"""The policy that sizes pools: when it acts, by how much, and when it leaves them alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from configs.schema import AutoscaleConfig
from orchestrator.autoscale import PoolView, Trend, policy

LIMITS = AutoscaleConfig(min=1, max=10, target_queue_s=30.0)


def view(size: int = 4, **changes: Any) -> PoolView:
    """A full pool of 4 slots an actor with no queue, unless changed."""
    base: dict[str, Any] = {"size": size, "settled": True, "slots_per_actor": 4, "queue_s": 0.0}
    return PoolView(**{**base, "busy": 4 * size, "slots": 4 * size, **changes})


def sizes(
    seen: Callable[[int, float], PoolView], seconds: int, *, size: int = 4, cooldown_s: float = 60.0
) -> list[int]:
    """The sizes after each second, of a pool that follows at once."""
    trend = Trend(changed_s=-1000.0)
    history = []
    for now in range(seconds):
        size, trend = policy(seen(size, float(now)), trend, LIMITS, cooldown_s, float(now))
        history.append(size)
    return history


def test_a_long_queue_before_full_workers_grows_the_pool_in_proportion_and_at_most_twofold() -> None:
    by_half = sizes(lambda size, _: view(size, queue_s=45.0), 10)
    assert by_half == [4] * 5 + [6] * 5, "after five seconds, not at once; then the cooldown holds"
    assert sizes(lambda size, _: view(size, queue_s=600.0), 6)[-1] == 8


def test_growth_stops_at_the_maximum() -> None:
    history = sizes(lambda size, _: view(size, queue_s=600.0), 300)
    assert max(history) == history[-1] == 10


def test_a_queue_before_idle_workers_grows_nothing() -> None:
    assert set(sizes(lambda size, _: view(size, queue_s=600.0, busy=2 * size), 300)) == {4}


def test_a_spike_shorter_than_the_hold_changes_nothing() -> None:
    assert set(sizes(lambda size, now: view(size, queue_s=600.0 if now % 5 else 10.0), 300)) == {4}


def test_a_quiet_pool_shrinks_to_what_its_peak_needs_after_the_cooldown() -> None:
    history = sizes(lambda size, now: view(size, busy=9 if now == 30.0 else 4), 200, size=8)
    assert history[59] == 8, "calm for less than the cooldown"
    assert history[60] == 4, "never below half at once"
    assert history[-1] == 2, "4 busy slots in two actors of 4 leave room"


def test_nine_busy_slots_need_three_actors_of_four() -> None:
    assert sizes(lambda size, _: view(size, busy=9), 200, size=4)[-1] == 3


def test_between_short_and_long_nothing_changes() -> None:
    assert set(sizes(lambda size, _: view(size, busy=1, queue_s=20.0), 300)) == {4}


def test_a_pool_that_starts_or_drains_is_left_alone() -> None:
    assert set(sizes(lambda size, _: view(size, queue_s=600.0, settled=False), 300)) == {4}


def test_a_steady_load_does_not_make_the_size_swing() -> None:
    """Twelve busy slots, and a queue only while they do not fit: one growth, and no way back."""

    def load(size: int, _: float) -> PoolView:
        return view(size, busy=min(12, 4 * size), queue_s=60.0 if 4 * size < 12 else 0.0)

    history = sizes(load, 1200, size=2)
    assert history[-1] == 4
    assert sum(a != b for a, b in itertools.pairwise(history)) == 1


def test_a_size_outside_the_limits_is_mended_at_once() -> None:
    assert policy(view(14), Trend(changed_s=0.0), LIMITS, 60.0, 1.0)[0] == 10
