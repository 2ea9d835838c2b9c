"""What surrounds the engines: routing, losses, refused configurations, and the scripted stand-in."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from configs.schema import EngineConfig
from infra.errors import ConfigError, EngineError
from infra.members import ActorState
from rollout.engine import EngineClient, EngineLost, Generation, ScriptedEngine, answer
from rollout.engine_pool import EnginePool, _Replica

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Replica:
    """Stands for an engine actor: answers with its own number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.aborted: list[str] = []

    async def generate(self, *, request_id: str, **request: Any) -> Generation:
        if request_id == "hang/0":
            await asyncio.sleep(60)
        if request_id == "refuse/0":
            raise EngineError("the prompt is too long")
        return Generation(token_ids=(self.number,), logprobs=(0.0,), versions=(0,), finish_reason="stop")

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def seen(self) -> list[str]:
        return self.aborted


def start(count: int) -> list[Any]:
    return [ray.remote(Replica).options(num_cpus=0, max_concurrency=8).remote(i) for i in range(count)]


async def ask(client: EngineClient, request_id: str) -> int:
    generation = await client.generate(
        request_id=request_id, prompt_ids=[1], max_tokens=1, temperature=1.0, stop_ids=[2]
    )
    return generation.token_ids[0]


def test_a_group_stays_on_one_replica_and_groups_spread() -> None:
    client = EngineClient("policy", [object()] * 4)
    first = Counter(client.replicas(f"minirepo-{i:06d}/0.0")[0] for i in range(400))
    assert set(first) == {0, 1, 2, 3}
    assert min(first.values()) > 60
    for i in range(20):
        order = client.replicas(f"minirepo-{i:06d}/0.0")
        assert sorted(order) == [0, 1, 2, 3]
        assert client.replicas(f"minirepo-{i:06d}/5.2#7") == order


def test_a_replica_that_comes_or_goes_moves_its_own_share_of_groups_only() -> None:
    client = EngineClient("policy", [object()] * 4)
    groups = [f"minirepo-{i:06d}/0.0" for i in range(400)]
    before = {g: client.replicas(g)[0] for g in groups}
    client.use({0: object(), 1: object(), 3: object(), 7: object()})
    after = {g: client.replicas(g)[0] for g in groups}
    assert set(after.values()) == {0, 1, 3, 7}
    assert all(after[g] == 7 for g in groups if after[g] != before[g] and before[g] != 2)
    assert 2 not in {r for g in groups for r in client.replicas(g)}


@pytest.mark.e2e
async def test_requests_move_away_from_a_dead_replica(ray_session: None) -> None:
    handles = start(2)
    client: EngineClient = pickle.loads(pickle.dumps(EngineClient("policy", handles, patience_s=3.0)))
    group = next(f"g{i}" for i in range(100) if client.replicas(f"g{i}/0")[0] == 0)
    assert [await ask(client, f"{group}/{i}") for i in range(3)] == [0, 0, 0]
    ray.kill(handles[0])
    async with asyncio.timeout(60):  # a kill takes its time on a busy machine
        while await ask(client, f"{group}/3") != 1:
            pass
    assert [await ask(client, f"{group}/{i}") for i in range(4, 7)] == [1, 1, 1]
    assert client.replicas(f"{group}/0") == [1, 0], "the dead one is asked last: it may have been restarted"
    ray.kill(handles[1])
    with pytest.raises(EngineLost, match="no policy engine answers"):  # noqa: PT012
        async with asyncio.timeout(60):
            while True:
                await ask(client, f"{group}/9")


@pytest.mark.e2e
async def test_a_refusal_comes_out_as_it_was_raised(ray_session: None) -> None:
    client = EngineClient("policy", start(2))
    with pytest.raises(EngineError) as refused:
        await ask(client, "refuse/0")
    assert str(refused.value) == "the prompt is too long"
    assert not isinstance(refused.value, EngineLost)


@pytest.mark.e2e
async def test_a_cancelled_request_is_aborted_in_its_replica(ray_session: None) -> None:
    (handle,) = start(1)
    await handle.__ray_ready__.remote()
    call = asyncio.create_task(ask(EngineClient("policy", [handle]), "hang/0"))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    async with asyncio.timeout(20):
        while not (seen := await handle.seen.remote()):  # noqa: ASYNC110 - the two calls may arrive in either order
            await asyncio.sleep(0.05)
    assert seen == ["hang/0"]


@pytest.mark.e2e
async def test_an_engine_that_cannot_load_is_named_with_reason_and_remedy(ray_session: None) -> None:
    pool = EnginePool(EngineConfig(model="/nowhere/policy"), name="policy")
    with pytest.raises(
        EngineError, match=r"policy engine 0: no HF checkpoint at /nowhere/policy; set model to a folder"
    ):
        await pool.ready(60)
    await pool.shutdown()


def test_updates_that_cannot_reach_the_engines_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"nccl needs engine\.device=cuda"):
        EnginePool(EngineConfig(model="m", weight_transfer="nccl"))
    sharded = EnginePool(EngineConfig(model="m", device="cuda", tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; use weight_transfer=nccl"):
        sharded.transfer_target()
    by_nccl = EnginePool(EngineConfig(model="m", device="cuda", tensor_parallel_size=2, weight_transfer="nccl"))
    assert by_nccl.transfer_target().workers_per_replica == 2


async def test_scripted_engine_stops_and_cuts() -> None:
    engine = ScriptedEngine(lambda _, prompt: [*prompt, 7, 8, 9], version=3)
    ask_for = {"prompt_ids": [1, 2], "temperature": 1.0}
    stopped = await engine.generate(request_id="a/0", max_tokens=10, stop_ids=[8], **ask_for)
    assert (stopped.token_ids, stopped.finish_reason, stopped.versions) == ((1, 2, 7, 8), "stop", (3, 3, 3, 3))
    cut = await engine.generate(request_id="a/1", max_tokens=3, stop_ids=[8], **ask_for)
    assert (cut.token_ids, cut.finish_reason) == ((1, 2, 7), "length")
    assert engine.requests == [("a/0", (1, 2)), ("a/1", (1, 2))]


async def test_a_replica_killed_for_memory_is_lost_so_that_others_serve() -> None:
    async def killed() -> None:
        raise OutOfMemoryError("the node ran low on memory")

    with pytest.raises(EngineLost, match="low on memory"):
        await answer(killed())


class LostReplica:
    """An engine actor that has died: what its next calls of `ready` raise, in order; then it serves."""

    def __init__(self, raises: list[BaseException]) -> None:
        self.raises = raises
        self.died = False
        self.gone, self.ready, self.adopt = (SimpleNamespace(remote=f) for f in (self._gone, self._ready, self._adopt))

    async def _gone(self) -> None:
        if self.died:
            await asyncio.Event().wait()
        self.died = True
        raise RayActorError

    async def _ready(self) -> None:
        if self.raises:
            raise self.raises.pop(0)

    async def _adopt(self, version: int, update: Any) -> None:
        pass


@pytest.mark.parametrize("back", [True, False])
async def test_a_lost_replica_is_waited_for_as_long_as_ray_takes(monkeypatch: pytest.MonkeyPatch, back: bool) -> None:
    """Calls that fail at once say that Ray is at it; only what the engine itself answers counts as a failure."""
    monkeypatch.setattr("rollout.engine_pool._SETTLE_S", 0.001)
    said: list[str] = []
    pool = EnginePool(EngineConfig(model="m"), say=said.append)
    failures: list[BaseException] = [EngineError("no memory")] * (2 if back else 3)
    handle = LostReplica([*(RayActorError() for _ in range(20)), *failures])
    replica = _Replica(number=0, handle=handle, ready=None, state=ActorState.LIVE, joined=True)
    pool._replicas.append(replica)
    watch = asyncio.create_task(pool._watch(replica))
    async with asyncio.timeout(10):
        while len(said) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert "is started again" in said[0]
    assert ("serves again" if back else "does not come back") in said[1]
    assert pool.restarts == int(back)
    watch.cancel()
