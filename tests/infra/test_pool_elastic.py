"""Growth, drains and losses of a pool, with scripted actors: no process is started."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from infra.actors import ActorDrained, ActorLost, ScriptedActor, ScriptedActors
from infra.members import ActorState
from infra.pool import ActorPool


class Worker:
    """Counts what it finished; a call ends when its gate opens."""

    finished: Counter[str]

    def __init__(self, gates: dict[str, asyncio.Event], finished: Counter[str]) -> None:
        self.gates = gates
        self.finished = finished
        self.told: list[Any] = []

    async def work(self, job: str) -> str:
        await self.gates.setdefault(job, asyncio.Event()).wait()
        self.finished[job] += 1
        return job

    async def tell(self, what: Any) -> None:
        self.told.append(what)


class Bench:
    """A pool of scripted actors and what happens to it."""

    def __init__(self, size: int, slots: int = 2, **changes: Any) -> None:
        self.gates: dict[str, asyncio.Event] = {}
        self.finished: Counter[str] = Counter()
        self.actors: dict[str, ScriptedActor] = {}
        self.said: list[str] = []
        self.changes = 0
        self.start_s = 0.0
        self.broken = ""
        self.pool = ActorPool(
            "rollout",
            self.make,
            size=size,
            slots=slots,
            first_backoff_s=0.001,
            ping_s=0.01,
            actors=ScriptedActors(),
            say=self.said.append,
            **changes,
        )
        self.pool.on_change(self.changed)

    def make(self, name: str) -> ScriptedActor:
        worker = Worker(self.gates, self.finished)
        self.actors[name] = ScriptedActor(worker, start_s=self.start_s, broken=self.broken)
        return self.actors[name]

    def changed(self) -> None:
        self.changes += 1

    def call(self, job: str) -> asyncio.Task[str]:
        return asyncio.create_task(self.pool.call("work", job))

    async def retried(self, job: str) -> str:
        """As the callers do: what was lost or handed back starts again."""
        while True:
            try:
                return str(await self.pool.call("work", job))
            except ActorLost:
                await asyncio.sleep(0)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_new_actors_take_work_only_when_they_are_ready() -> None:
    bench = Bench(1, slots=1)
    await bench.pool.ready()
    first = bench.call("a")
    queued = bench.call("b")
    await until(lambda: bench.pool.waiting == 1)
    bench.start_s = 0.05
    bench.pool.resize(2)
    assert bench.pool.capacity() == 1
    assert bench.pool.state().starting == 1
    changes = bench.changes
    await until(lambda: bench.pool.waiting == 0)
    assert bench.pool.capacity() == 2
    assert bench.changes > changes, "who follows the capacity was told"
    assert {load.busy for load in bench.pool.loads()} == {1}
    await until(lambda: len(bench.gates) == 2)  # both calls have begun
    for gate in bench.gates.values():
        gate.set()
    assert [await first, await queued] == ["a", "b"]


async def test_growth_that_cannot_start_is_told_and_harms_nobody() -> None:
    bench = Bench(1, max_failures=2)
    await bench.pool.ready()
    running = bench.call("a")
    bench.broken = "the disk is full"
    bench.pool.resize(2)
    await until(lambda: any("given up" in line for line in bench.said))
    assert "rollout-1 did not start: the disk is full" in bench.said[0]
    assert bench.pool.state().live == 1
    await until(lambda: "a" in bench.gates)
    bench.gates["a"].set()
    assert await running == "a"
    bench.broken = ""
    bench.pool.resize(2)  # asking again tries again
    await until(lambda: bench.pool.state().settled)


async def test_a_drained_actor_takes_nothing_new_and_finishes_what_it_has() -> None:
    bench = Bench(2)
    await bench.pool.ready()
    calls = {job: bench.call(job) for job in "abcd"}
    await until(lambda: bench.pool.occupancy() == (4, 4) and len(bench.gates) == 4)
    bench.pool.resize(1)
    assert bench.pool.occupancy() == (4, 4), "two slots of the one that stays, and two in use on the one that leaves"
    late = bench.call("e")
    (leaving,) = [load for load in bench.pool.loads() if load.state is ActorState.DRAINING]
    assert leaving.busy == 2
    for job in "abcd":
        bench.gates[job].set()
    assert sorted([await call for call in calls.values()]) == list("abcd")
    await until(lambda: bench.pool.state().settled and "e" in bench.gates)
    assert bench.actors[leaving.name].killed
    bench.gates["e"].set()
    assert await late == "e"
    assert bench.finished == Counter("abcde")


async def test_what_outlasts_the_deadline_is_handed_back_and_done_once_elsewhere() -> None:
    bench = Bench(2, slots=1)
    await bench.pool.ready()
    calls = [bench.call("a"), bench.call("b")]
    await until(lambda: len(bench.gates) == 2)
    bench.pool.resize(1, drain_s=0.01)
    await until(lambda: bench.pool.state().settled)
    await until(lambda: any(call.done() for call in calls))
    (lost,) = [call for call in calls if call.done()]
    with pytest.raises(ActorDrained, match="drained"):
        await lost
    assert bench.pool.handed_back == 1
    assert bench.pool.restarts == 0, "a drained actor is not replaced"
    (other,) = [call for call in calls if call is not lost]
    for gate in bench.gates.values():
        gate.set()
    await other
    assert sum(bench.finished.values()) == 1, "the drained actor did not finish it after all"


async def test_a_draining_actor_is_kept_when_the_pool_grows_again() -> None:
    bench = Bench(2, slots=1)
    await bench.pool.ready()
    calls = [bench.call("a"), bench.call("b")]
    await until(lambda: len(bench.gates) == 2)
    bench.pool.resize(1, drain_s=0.05)
    bench.pool.resize(2)
    assert bench.pool.state().settled
    await asyncio.sleep(0.1)
    for gate in bench.gates.values():
        gate.set()
    assert sorted([await call for call in calls]) == ["a", "b"]
    assert len(bench.actors) == 2


async def test_starting_actors_leave_first() -> None:
    bench = Bench(2)
    await bench.pool.ready()
    bench.start_s = 5.0
    bench.pool.resize(4)
    bench.pool.resize(2)
    assert bench.pool.state().settled
    assert [load.name for load in bench.pool.loads()] == ["rollout-0", "rollout-1"]


async def test_an_idle_actor_whose_node_left_is_replaced_without_a_call_that_finds_out() -> None:
    bench = Bench(2)
    await bench.pool.ready()
    bench.actors["rollout-1"].kill()
    await until(lambda: bench.pool.restarts == 1 and bench.pool.state().settled)
    assert [load.name for load in bench.pool.loads()] == ["rollout-0", "rollout-2"]
    assert "rollout-1 was lost" in bench.said[0]


async def test_an_actor_that_hangs_loses_its_calls_and_is_replaced() -> None:
    bench = Bench(2, silent_after_s=0.05)
    await bench.pool.ready()
    held = [asyncio.create_task(bench.retried(job)) for job in "abcd"]
    await until(lambda: bench.pool.occupancy() == (4, 4))
    bench.actors["rollout-0"].hangs = True
    await until(lambda: bench.pool.restarts == 1 and bench.pool.state().settled)
    assert bench.actors["rollout-0"].killed
    assert "rollout-0 was lost: no sign of life for 0.05 s; it is replaced" in bench.said
    for job in "abcd":
        bench.gates[job].set()
    assert [await task for task in held] == list("abcd")
    assert bench.finished == Counter("abcd")


async def test_an_actor_that_starts_may_be_silent() -> None:
    bench = Bench(1, silent_after_s=0.02)
    bench.start_s = 0.2
    await bench.pool.ready()
    assert bench.pool.restarts == 0


async def test_every_actor_hears_a_broadcast() -> None:
    bench = Bench(2)
    await bench.pool.ready()
    bench.pool.broadcast("tell", 7)
    await until(lambda: [actor.worker.told for actor in bench.actors.values()] == [[7], [7]])


async def test_a_pool_refuses_to_be_empty() -> None:
    bench = Bench(1)
    with pytest.raises(ValueError, match="at least one actor"):
        bench.pool.resize(0)


@pytest.mark.parametrize("deaths", [False, True])
async def test_nothing_is_lost_or_done_twice_while_the_pool_breathes(deaths: bool) -> None:
    """Conservation: sixty jobs, sizes that go up and down under them, short drains, actors that die."""
    bench = Bench(3)
    await bench.pool.ready()
    jobs = [f"job{i}" for i in range(60)]
    calls = [asyncio.create_task(bench.retried(job)) for job in jobs]
    sizes = [5, 2, 4, 1, 6, 2, 3]
    for turn, size in enumerate(sizes * 3):
        bench.pool.resize(size, drain_s=0.002 if turn % 2 else 1.0)
        for load in bench.pool.loads()[:1]:
            if deaths and turn % 5 == 0:
                bench.actors[load.name].kill()
        await asyncio.sleep(0.004)
        for gate in list(bench.gates.values())[:: 3 - turn % 2]:
            gate.set()
    async with asyncio.timeout(20):
        while not all(call.done() for call in calls):
            for gate in list(bench.gates.values()):
                gate.set()
            await asyncio.sleep(0.001)
    assert sorted(await asyncio.gather(*calls)) == sorted(jobs)
    if not deaths:  # what an actor finished as it died was never heard of, and is done again
        assert bench.finished == Counter(jobs)
    await until(lambda: bench.pool.state().settled)
    assert bench.pool.occupancy()[0] == 0
    await bench.pool.shutdown()


async def test_actors_of_a_node_that_will_leave_drain_while_others_start() -> None:
    bench = Bench(2, slots=1)
    await bench.pool.ready()
    short, long = bench.call("short"), bench.call("long")
    await until(lambda: len(bench.gates) == 2)
    for actor in bench.actors.values():
        actor.leaves_s = 10.05  # of which 10 are for what is handed back
    await until(lambda: bench.pool.state().live == 2 and len(bench.actors) == 4)
    assert sorted(load.name for load in bench.pool.loads() if load.state is ActorState.LIVE) == [
        "rollout-2",
        "rollout-3",
    ]
    bench.gates["short"].set()
    assert await short == "short", "what ends in time has ended"
    with pytest.raises(ActorDrained):
        await asyncio.wait_for(long, 5)  # well before the node leaves
    assert (bench.pool.handed_back, bench.pool.restarts) == (1, 0), "nobody was lost"
    assert "rollout-0 drains: its node leaves in 10 s; another one starts in its place" in bench.said
    await until(lambda: bench.actors["rollout-0"].killed and bench.actors["rollout-1"].killed)
    assert bench.pool.state().settled


async def test_a_leaving_node_without_a_deadline_and_an_idle_actor() -> None:
    bench = Bench(1)
    await bench.pool.ready()
    bench.actors["rollout-0"].leaves_s = math.inf
    await until(lambda: bench.actors["rollout-0"].killed and bench.pool.state().live == 1)
    assert bench.said == ["rollout-0 drains: its node leaves; another one starts in its place"]
