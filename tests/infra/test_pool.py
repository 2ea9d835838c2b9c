"""The actor pool against real Ray actors."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from infra.actors import RayActors
from infra.pool import ActorDrained, ActorLost, ActorPool, ActorTimeout

# Ray's workers cannot import a test module, so its classes travel by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Worker:
    """Does what the tests ask for."""

    def __init__(self, name: str, fail: bool = False) -> None:
        if fail:
            raise ValueError("the disk is full")
        self.name = name
        self.running = 0
        self.peak = 0

    async def whoami(self) -> str:
        return self.name

    async def pid(self) -> int:
        return os.getpid()

    async def hold(self, gate: str) -> tuple[str, int]:
        """Runs until the file `gate` exists; returns the actor's name and the most calls it ever ran at once."""
        self.running += 1
        self.peak = max(self.peak, self.running)
        while not os.path.exists(gate):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        self.running -= 1
        return self.name, self.peak

    async def cancelled(self, mark: str) -> None:
        open(f"{mark}.started", "w").close()  # noqa: ASYNC230
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            open(mark, "w").close()  # noqa: ASYNC230
            raise

    async def three(self, value: int) -> tuple[int, str, list[int]]:
        return value, "payload", [value]

    async def fail(self) -> None:
        raise KeyError("no such task")

    async def die(self) -> None:
        os._exit(3)


def factory(name: str) -> ray.actor.ActorHandle:
    return ray.remote(Worker).options(num_cpus=0, max_concurrency=16).remote(name)


@pytest.fixture
async def pool(ray_session: None) -> AsyncIterator[ActorPool]:
    pool = ActorPool("worker", factory, size=2, slots=2, first_backoff_s=0.05)
    pool.start()
    await pool.ready(60)
    yield pool
    await pool.shutdown()


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.e2e
async def test_calls_spread_evenly_and_never_exceed_the_slots(pool: ActorPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    calls = [asyncio.create_task(pool.call("hold", str(gate))) for _ in range(7)]
    await until(lambda: pool.occupancy() == (4, 4) and pool.waiting == 3)
    gate.touch()
    results = await asyncio.gather(*calls)
    assert {name for name, _ in results} == {"worker-0", "worker-1"}
    assert max(peak for _, peak in results) == 2
    assert pool.occupancy() == (0, 4)


@pytest.mark.e2e
async def test_later_returns_stay_in_the_object_store(pool: ActorPool) -> None:
    first, rest = await pool.call("three", 5, num_returns=3)
    assert first == 5
    assert [type(ref) for ref in rest] == [ray.ObjectRef, ray.ObjectRef]
    assert await asyncio.gather(*rest) == ["payload", [5]]


@pytest.mark.e2e
async def test_errors_of_the_method_reach_the_caller_and_cost_no_actor(pool: ActorPool) -> None:
    with pytest.raises(KeyError, match="no such task"):
        await pool.call("fail")
    assert pool.restarts == 0
    assert pool.occupancy() == (0, 4)


@pytest.mark.e2e
async def test_dead_actor_loses_its_calls_and_is_replaced(pool: ActorPool, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    held = [asyncio.create_task(pool.call("hold", str(gate))) for _ in range(3)]
    await until(lambda: pool.occupancy()[0] == 3)
    with pytest.raises(ActorLost, match="during die") as lost:
        await pool.call("die")
    gate.touch()
    results = await asyncio.gather(*held, return_exceptions=True)
    dead = {r.actor for r in results if isinstance(r, ActorLost)}
    assert dead <= {lost.value.actor}
    assert [r for r in results if not isinstance(r, ActorLost)], "the other actor's calls go on"
    await until(lambda: pool.restarts == 1)
    await pool.ready(60)
    assert pool.occupancy() == (0, 4)
    names = {await pool.call("whoami") for _ in range(8)}
    assert lost.value.actor not in names


@pytest.mark.e2e
async def test_a_stopped_process_loses_its_calls_and_is_replaced(ray_session: None, tmp_path: Path) -> None:
    pool = ActorPool("worker", factory, size=1, slots=2, first_backoff_s=0.05, ping_s=0.2, silent_after_s=2.0)
    await pool.ready(60)
    try:
        pid = await pool.call("pid")
        held = asyncio.create_task(pool.call("hold", str(tmp_path / "never")))
        await until(lambda: pool.occupancy() == (1, 2))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ActorLost, match=r"no sign of life|died|killed"):
            await asyncio.wait_for(held, 30)
        assert await pool.call("pid") != pid
        await until(lambda: not os.path.exists(f"/proc/{pid}"))
    finally:
        await pool.shutdown()


@pytest.mark.e2e
async def test_deadline_replaces_the_actor(pool: ActorPool, tmp_path: Path) -> None:
    with pytest.raises(ActorTimeout, match=r"did not finish hold within 0\.3 s"):
        await pool.call("hold", str(tmp_path / "never"), timeout_s=0.3)
    await until(lambda: pool.restarts == 1)
    assert await pool.call("whoami") in {"worker-0", "worker-1", "worker-2"}


@pytest.mark.e2e
async def test_cancelled_call_is_cancelled_in_the_actor_and_frees_its_slot(pool: ActorPool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    call = asyncio.create_task(pool.call("cancelled", str(mark)))
    await until((tmp_path / "mark.started").exists)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert pool.occupancy() == (0, 4)
    await until(mark.exists)


@pytest.mark.e2e
async def test_a_drained_actor_finishes_what_it_has_and_a_grown_pool_takes_work(
    pool: ActorPool, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    held = [asyncio.create_task(pool.call("hold", str(gate))) for _ in range(4)]
    await until(lambda: pool.occupancy() == (4, 4))
    pool.resize(1)
    assert (pool.capacity(), pool.state().draining) == (2, 1)
    gate.touch()
    assert len(await asyncio.gather(*held)) == 4
    await until(lambda: pool.state().settled)
    assert pool.occupancy() == (0, 2)
    pool.resize(3)
    await until(lambda: pool.state().settled)
    assert pool.capacity() == 6
    assert pool.restarts == pool.handed_back == 0


@pytest.mark.e2e
async def test_what_outlasts_the_drain_is_handed_back_and_cancelled_in_the_actor(
    pool: ActorPool, tmp_path: Path
) -> None:
    marks = [tmp_path / f"mark{i}" for i in range(4)]
    calls = [asyncio.create_task(pool.call("cancelled", str(mark))) for mark in marks]
    await until(lambda: all((tmp_path / f"{mark.name}.started").exists() for mark in marks))
    pool.resize(1, drain_s=0.1)
    await until(lambda: pool.state().settled)
    await until(lambda: sum(call.done() for call in calls) == 2)
    done = {call for call in calls if call.done()}
    assert len(done) == 2 and all(isinstance(call.exception(), ActorDrained) for call in done)
    assert sum(mark.exists() for mark in marks) == 2, "engines and sandboxes were told"
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.e2e
async def test_constructor_that_fails_is_named_with_its_reason(ray_session: None) -> None:
    broken = ActorPool(
        "grader", lambda name: ray.remote(Worker).options(num_cpus=0).remote(name, True), size=1, slots=1
    )
    with pytest.raises(ActorLost, match=r"grader-0 .*the disk is full"):
        await broken.ready(60)
    await broken.shutdown()


@pytest.mark.e2e
async def test_pool_gives_up_after_too_many_failures_in_a_row(ray_session: None) -> None:
    pool = ActorPool("worker", factory, size=1, slots=1, max_failures=1, first_backoff_s=0.01)
    pool.start()
    calls = [asyncio.create_task(pool.call("die")) for _ in range(4)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, ActorLost) for r in results)
    assert pool.restarts == 1
    with pytest.raises(ActorLost, match="no actor is left"):
        await pool.call("whoami")
    await pool.shutdown()


def test_a_worker_killed_for_memory_counts_as_lost() -> None:
    assert issubclass(OutOfMemoryError, RayActors().lost())


def test_errors_survive_pickling() -> None:
    lost = pickle.loads(pickle.dumps(ActorLost("rollout-0", "rollout", "killed")))
    assert (lost.actor, lost.method, str(lost)) == (
        "rollout-0",
        "rollout",
        "actor rollout-0 was lost during rollout: killed",
    )
    drained = pickle.loads(pickle.dumps(ActorDrained("rollout-0", "rollout")))
    assert isinstance(drained, ActorLost) and "drained" in str(drained)
    late = pickle.loads(pickle.dumps(ActorTimeout("grader-1", "grade", 5.0)))
    assert (late.actor, late.timeout_s) == ("grader-1", 5.0)
