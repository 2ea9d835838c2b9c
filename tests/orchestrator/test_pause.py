"""The gate before admission and before a step."""

from __future__ import annotations

import asyncio
from pathlib import Path

from scripted import Run, run_config

from orchestrator.pause import Pauses


def test_a_waiter_goes_on_only_when_no_reason_is_left() -> None:
    async def go() -> None:
        pauses = Pauses()
        await asyncio.wait_for(pauses.wait(), 1)
        pauses.set("storage", "disk full")
        pauses.set("mask rate", "too many lost")
        waiter = asyncio.create_task(pauses.wait())
        pauses.clear("storage")
        await asyncio.sleep(0.02)
        assert not waiter.done()
        assert pauses.reasons() == {"mask rate": "too many lost"}
        pauses.clear("mask rate")
        await asyncio.wait_for(waiter, 1)
        assert pauses.reasons() == {}
        assert 0.02 <= pauses.total_s() < 1.0

    asyncio.run(go())


def test_a_reason_set_again_keeps_its_beginning_and_a_waiter_that_was_woken_waits_on() -> None:
    async def go() -> None:
        pauses = Pauses()
        pauses.set("storage", "disk full")
        begun_s = pauses.since_s("storage")
        await asyncio.sleep(0.01)
        pauses.set("storage", "still full")
        assert pauses.since_s("storage") == begun_s
        assert pauses.reasons() == {"storage": "still full"}
        waiter = asyncio.create_task(pauses.wait())
        await asyncio.sleep(0)
        pauses.clear("storage")
        pauses.set("storage", "full again")  # before the waiter runs
        await asyncio.sleep(0.02)
        assert not waiter.done()
        pauses.clear("storage")
        await asyncio.wait_for(waiter, 1)

    asyncio.run(go())


def test_a_paused_run_admits_nothing_and_begins_no_step(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(steps=2))

    async def go() -> None:
        run.scheduler.pauses.set("by hand", "too many lost")
        running = asyncio.create_task(run.scheduler.run())
        await asyncio.sleep(0.1)
        assert run.rollout.calls == []
        assert run.steps == []
        run.scheduler.pauses.clear("by hand")
        await asyncio.wait_for(running, 20)

    asyncio.run(go())
    assert run.steps == [1, 2]


def test_a_pause_between_steps_keeps_a_full_batch_from_being_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, run_config(steps=3))

    async def go() -> None:
        run.scheduler.pauses.set("by hand", "too many lost")
        running = asyncio.create_task(run.scheduler.run())
        run.scheduler.pauses.clear("by hand")
        while not run.steps:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        run.scheduler.pauses.set("by hand", "too many lost")
        await asyncio.sleep(0.2)
        held = len(run.learner.batches)
        await asyncio.sleep(0.2)
        assert len(run.learner.batches) == held < 3
        run.scheduler.pauses.clear("by hand")
        await asyncio.wait_for(running, 20)

    asyncio.run(go())
    assert run.steps == [1, 2, 3]
