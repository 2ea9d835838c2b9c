"""Admission: bounds on rollouts under way, learned lengths, and slots that follow a pool."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from orchestrator.admission import LEARNED_AFTER, Admission, Bound
from orchestrator.slots import Slots


def make(**changes: int | None) -> Admission:
    settings: dict[str, int | None] = {
        "group_size": 4,
        "longest_tokens": 1000,
        "sequences_per_engine": 64,
        "kv_tokens_per_engine": 20_000,
    }
    return Admission(("a", "b"), **{**settings, **changes})  # type: ignore[arg-type]


def test_slots_and_sequences_bound_what_is_under_way() -> None:
    admission = make()
    assert admission.full({"a": 15}, slots=16) is None
    assert admission.full({"a": 12, "b": 4}, slots=16) is Bound.SLOTS
    assert admission.full({"a": 64}, slots=100) is Bound.ENGINES


def test_until_lengths_are_learned_every_rollout_is_as_long_as_it_may_be() -> None:
    admission = make()
    assert admission.closed({"a": 16}) == set(), "4 x 1000 fit what 16 leave of 20,000"
    assert admission.closed({"a": 17}) == {"a", "b"}
    for _ in range(LEARNED_AFTER):
        admission.observe("a", 100)
    assert admission.predicted_tokens("a") == pytest.approx(100) and admission.predicted_tokens("b") == 1000
    assert admission.closed({"a": 17}) == set()
    assert admission.closed({"a": 120, "b": 5}) == {"b"}, "120 x 100 + 5 x 1000 leave room for 3,000"


def test_the_estimate_is_a_high_percentile() -> None:
    admission, random = make(), Random(0)
    lengths = [round(random.lognormvariate(5.0, 0.5)) for _ in range(4000)]
    for tokens in lengths:
        admission.observe("a", tokens)
    below = sum(t <= admission.predicted_tokens("a") for t in lengths) / len(lengths)
    assert 0.85 < below < 0.95


def test_one_group_always_runs() -> None:
    admission = make(kv_tokens_per_engine=10)
    assert admission.closed({"a": 0, "b": 0}) == set()
    assert admission.closed({"a": 1}) == {"a", "b"}
    assert make(kv_tokens_per_engine=None).closed({"a": 10**6}) == set(), "where it is not known it bounds nothing"


def test_more_engines_have_more_sequences_and_more_room() -> None:
    """M6: `gagar scale engine=3`, and back when two are lost."""
    admission = make()
    admission.resize(3)
    assert admission.full({"a": 64}, slots=1000) is None and admission.full({"a": 192}, slots=1000) is Bound.ENGINES
    assert admission.closed({"a": 56}) == set() and admission.closed({"a": 57}) == {"a", "b"}
    assert admission.scalars({"a": 30})["admission/kv_need_share"] == pytest.approx(0.5)
    admission.resize(0)
    assert admission.full({"a": 63}, slots=1000) is None, "what waits for an engine to come is not held back"


def test_slots_follow_the_pool() -> None:
    async def go() -> list[int]:
        slots, running = Slots(2), []

        async def work(number: int) -> None:
            await slots.acquire()
            running.append(number)

        tasks = [asyncio.create_task(work(i)) for i in range(6)]
        await asyncio.sleep(0)
        assert running == [0, 1]
        slots.resize(4)
        await asyncio.sleep(0)
        assert running == [0, 1, 2, 3], "in turn"
        slots.resize(1)
        for _ in range(3):
            slots.release()
        await asyncio.sleep(0)
        assert running == [0, 1, 2, 3], "one still holds the only one"
        slots.release()
        await asyncio.sleep(0)
        assert running == [0, 1, 2, 3, 4]
        tasks[5].cancel()
        slots.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [slots.taken]

    assert asyncio.run(go()) == [0]


def test_a_slot_that_is_handed_to_a_cancelled_waiter_comes_back() -> None:
    async def go() -> int:
        slots = Slots(1)
        await slots.acquire()
        waiter = asyncio.create_task(slots.acquire())
        await asyncio.sleep(0)
        slots.release()  # handed over
        waiter.cancel()  # before it could run
        await asyncio.gather(waiter, return_exceptions=True)
        return slots.taken

    assert asyncio.run(go()) == 0
