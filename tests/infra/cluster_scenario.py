"""A pool over nodes that come and go, in a cluster of its own; run by test_pool_cluster.py, prints what it saw as JSON.

A process apart, because the tests' own process may be connected to another Ray.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

from configs.schema import Resources
from infra.placement import actor_options
from infra.pool import ActorLost, ActorPool

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

RESOURCES = Resources(custom={"worker_node": 1}, labels={"pool": "rollout"})


class Worker:
    """Says where it works."""

    async def work(self, job: int) -> tuple[int, str]:
        await asyncio.sleep(0.3)
        return job, ray.get_runtime_context().get_node_id()


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def drained(
    cluster: Cluster, pool: ActorPool, node_id: str, add: Callable[[], Any], said: list[str]
) -> dict[str, Any]:
    """A node is told to leave while it works: its calls end, and the pool works on another node.

    Ray may still send a replacement to the leaving node, where it cannot start; the pool starts another one then. That
    loses nothing; a live actor or a call that is lost does.
    """
    already = len(said)
    running = [asyncio.create_task(pool.call("work", number)) for number in range(8)]
    await asyncio.sleep(0.1)
    gcs = ray._raylet.GcsClient(address=cluster.address)
    deadline_ms = int((time.time() + 60) * 1e3)
    accepted, _ = gcs.drain_node(node_id, DRAIN_NODE_REASON_PREEMPTION, "it stops", deadline_ms)
    await until(lambda: pool.state().starting == 2)  # they wait for a node with room
    add()
    await until(lambda: pool.state().settled)
    ended = await asyncio.gather(*running)
    where = {where for _, where in await asyncio.gather(*(pool.call("work", -1) for _ in range(8)))}
    return {
        "accepted": accepted,
        "ended": len(ended),
        "left": node_id not in where and len(where) == 2,
        "lost_by_leaving": [line for line in said[already:] if "was lost" in line],
        "handed_back": pool.handed_back,
    }


async def scenario(cluster: Cluster) -> dict[str, Any]:
    def node(label: str = "rollout") -> Any:
        return cluster.add_node(num_cpus=1, resources={"worker_node": 2}, labels={"pool": label})

    said: list[str] = []
    actor = ray.remote(**actor_options(RESOURCES), max_concurrency=4)(Worker)
    pool = ActorPool("rollout", lambda _: actor.remote(), size=2, slots=2, first_backoff_s=0.05, ping_s=0.5)
    pool.say = said.append
    node("graders")
    first = node()
    await pool.ready(60)

    pool.resize(4)
    await asyncio.sleep(1.0)
    unplaced = pool.state().starting  # the other node has room, but not the label
    second = node()
    await until(lambda: pool.state().settled)

    done: list[tuple[int, str]] = []
    lost = 0

    async def job(number: int) -> None:
        nonlocal lost
        while True:
            try:
                done.append(await pool.call("work", number))
                return
            except ActorLost:
                lost += 1

    jobs = [asyncio.create_task(job(i)) for i in range(40)]
    await until(lambda: len({where for _, where in done}) == 2)
    gone = second.node_id
    left_s = time.monotonic()
    cluster.remove_node(second, allow_graceful=False)
    await until(lambda: pool.state().live == 2)
    noticed_s = time.monotonic() - left_s
    third = node()
    await until(lambda: pool.state().settled)
    refilled_s = time.monotonic() - left_s
    await asyncio.wait_for(asyncio.gather(*jobs), 60)
    after = {(await pool.call("work", -1))[1] for _ in range(4)}
    after |= {where for _, where in await asyncio.gather(*(pool.call("work", -1) for _ in range(8)))}
    leaving = await drained(cluster, pool, third.node_id, node, said)
    await pool.shutdown()
    return {
        **leaving,
        "unplaced": unplaced,
        "jobs": sorted(number for number, _ in done),
        "lost": lost,
        "nodes_after": sorted(after) == sorted([first.node_id, third.node_id]),
        "gone_is_gone": gone not in after,
        "restarts": pool.restarts,
        "noticed_s": round(noticed_s, 1),
        "refilled_s": round(refilled_s, 1),
        "said": said,
    }


def main() -> None:
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        print(json.dumps(asyncio.run(scenario(cluster))))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
