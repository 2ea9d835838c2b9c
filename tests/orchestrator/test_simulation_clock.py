"""The virtual clock: order, timeouts, no drift, and clear errors where real time would be needed."""

from __future__ import annotations

import asyncio
import time

import pytest

from infra.errors import GagarError
from orchestrator.simulation.clock import ClockStopped, run_virtual


def test_hours_pass_in_moments_and_in_order() -> None:
    seen: list[tuple[float, str]] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        seen.append((asyncio.get_running_loop().time(), name))

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for name, delay_s in (("c", 7200.0), ("a", 0.5), ("b", 3600.0), ("d", 7200.0)):
                group.create_task(sleeper(name, delay_s))

    start_s = time.monotonic()
    run_virtual(work())
    assert seen == [(0.5, "a"), (3600.0, "b"), (7200.0, "c"), (7200.0, "d")], "equal times in the order they were set"
    assert time.monotonic() - start_s < 60.0


def test_timeouts_end_what_takes_longer_and_nothing_else() -> None:
    async def work() -> tuple[str, float]:
        async with asyncio.timeout(10.0):
            await asyncio.sleep(9.999)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10.0):
                await asyncio.sleep(10.001)
        return await asyncio.wait_for(asyncio.sleep(1.0, "done"), timeout=2.0), asyncio.get_running_loop().time()

    value, now_s = run_virtual(work())
    assert value == "done" and now_s == pytest.approx(9.999 + 10.0 + 1.0)


def test_the_clock_does_not_drift() -> None:
    async def work() -> float:
        for _ in range(20_000):
            await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time()

    assert run_virtual(work()) == pytest.approx(2000.0, abs=1e-6)


def test_waiting_longer_than_a_day_is_one_sleep() -> None:
    async def work() -> float:
        await asyncio.sleep(10 * 86400.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(work()) == 10 * 86400.0


def test_ready_work_does_not_move_the_clock() -> None:
    async def work() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run_virtual(work()) == 0.0


def test_threads_are_refused_by_name() -> None:
    async def work() -> None:
        await asyncio.to_thread(sum, [1, 2])

    with pytest.raises(GagarError, match="asks for a thread in a loop with a virtual clock"):
        run_virtual(work())


def test_a_loop_in_which_nothing_can_happen_says_so() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ClockStopped, match="stands still"):
        run_virtual(work())
