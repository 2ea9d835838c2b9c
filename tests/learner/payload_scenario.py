"""Payloads whose node leaves, in a cluster of its own; run by test_payloads.py, prints what a rank saw as JSON.

A process apart, because the tests' own process may be connected to another Ray.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayError

from learner.payloads import hold, hold_what_is_left, is_loss
from rollout.trajectory import Payload

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def payload(tokens: int) -> Payload:
    """Large enough for the object store: what is small travels with the call, and is never lost."""
    return Payload(
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.ones(tokens, dtype=np.bool_),
        logprobs=np.zeros(tokens, dtype=np.float32),
        versions=np.zeros(tokens, dtype=np.int32),
    )


class Worker:
    def roll(self) -> tuple[int, Payload]:
        return 1, payload(100_000)


class Rank:
    """As `learner.group.LearnerRank`, without a model."""

    def __init__(self) -> None:
        self.core: Any = SimpleNamespace(payloads=())

    def run(self, function: Any, *args: Any) -> Any:
        return function(self.core, *args), [len(p.token_ids) for p in self.core.payloads]


def main() -> dict[str, Any]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {"head": 4}})
    leaving = cluster.add_node(num_cpus=1, resources={"leaving": 1})
    ray.init(cluster.address, log_to_driver=False, logging_level="error")
    worker, rank = ray.remote(num_cpus=0)(Worker), ray.remote(num_cpus=0)(Rank).options(resources={"head": 1}).remote()
    refs = []
    for resource in ("head", "leaving"):
        roll = worker.options(resources={resource: 1}).remote().roll.options(num_returns=2)
        done, ref = roll.remote()
        ray.get(done)
        refs.append(ref)
    cluster.remove_node(leaving)
    out: dict[str, Any] = {}
    start_s = time.monotonic()
    try:
        asyncio.run(_wait(rank.run.remote(hold, *refs)))
        out["hold"] = "held"
    except RayError as e:
        out["hold"], out["is_loss"] = type(getattr(e, "cause", e)).__name__, is_loss(e)
    out["noticed_s"] = time.monotonic() - start_s
    out["gone"], out["held"] = ray.get(rank.run.remote(hold_what_is_left, refs, [None, None]))
    out["rest"] = ray.get(rank.run.remote(hold, refs[0]))[1]
    ray.shutdown()
    cluster.shutdown()
    return out


async def _wait(ref: Any) -> Any:
    return await ref


if __name__ == "__main__":
    print(json.dumps(main()))
