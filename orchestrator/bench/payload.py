"""How fast payloads go from a rollout worker to a learner rank, by reference through Ray's object store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from orchestrator.bench.figures import Figure, Options, figure, local_ray, ratios

TOKENS, TRAJECTORIES = 32_768, 64
"""Length of a trajectory, and how many a rank gets with one call."""


class Worker:
    """Makes payloads in an actor, as a rollout worker does."""

    def __init__(self) -> None:
        import numpy as np

        from rollout.trajectory import Payload

        self._payload = Payload(
            token_ids=np.arange(TOKENS, dtype=np.int32),
            loss_mask=np.ones(TOKENS, dtype=np.bool_),
            logprobs=np.full(TOKENS, -0.5, dtype=np.float32),
            versions=np.zeros(TOKENS, dtype=np.int32),
        )

    def size(self) -> int:
        """Bytes of one payload's arrays."""
        p = self._payload
        return sum(int(a.nbytes) for a in (p.token_ids, p.loss_mask, p.logprobs, p.versions))

    def make(self, index: int) -> tuple[int, Any]:
        """Metadata, which the caller fetches, and the payload, which stays in the store."""
        return index, self._payload


class Rank:
    """Reads payloads in an actor, as a learner rank does."""

    def take(self, *payloads: Any) -> int:
        """Looks at every byte once."""
        return sum(int(a.sum()) for p in payloads for a in (p.token_ids, p.loss_mask, p.logprobs, p.versions))

    def copy(self, *payloads: Any) -> float:
        """Seconds of copying the same arrays in this process's memory, and looking at them."""
        start_s = time.perf_counter()
        copies = [a.copy() for p in payloads for a in (p.token_ids, p.loss_mask, p.logprobs, p.versions)]
        sum(int(a.sum()) for a in copies)
        return time.perf_counter() - start_s


def run(options: Options) -> list[Figure]:
    """MB/s of storing (worker to object store), of taking (object store to rank, read once), and of a memory copy."""
    import ray

    with local_ray():
        worker = ray.remote(Worker).options(num_cpus=0, max_concurrency=8).remote()
        rank = ray.remote(Rank).options(num_cpus=0).remote()
        return asyncio.run(_measure(worker, rank, options.times(7)))


async def _measure(worker: Any, rank: Any, times: int) -> list[Figure]:
    megabytes = TRAJECTORIES * await worker.size.remote() / 1e6
    stored, taken, copied = [], [], []
    for repetition in range(times + 1):  # the first one makes the processes ready
        start_s = time.perf_counter()
        refs = [worker.make.options(num_returns=2).remote(i) for i in range(TRAJECTORIES)]
        await asyncio.gather(*(meta for meta, _ in refs))
        put_s = time.perf_counter() - start_s
        payloads = [payload for _, payload in refs]
        start_s = time.perf_counter()
        await rank.take.remote(*payloads)
        get_s = time.perf_counter() - start_s
        copy_s = await rank.copy.remote(*payloads)
        if repetition:
            stored.append(megabytes / put_s)
            taken.append(megabytes / get_s)
            copied.append(megabytes / copy_s)
        del refs, payloads
    what = f"{TRAJECTORIES} payloads of {TOKENS} tokens"
    get, copy = (
        figure("object store to rank, read once", "MB/s", taken),
        figure("memory copy, read once", "MB/s", copied),
    )
    return [
        figure(f"worker to object store, {what}", "MB/s", stored),
        get,
        copy,
        ratios("taking over copying", get, copy),
    ]
