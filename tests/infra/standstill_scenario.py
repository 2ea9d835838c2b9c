"""A driver with a real Ray of its own that hangs: run by test_standstill_ray.py as a process, with a folder.

Two actors; one blocks in a function that has a name, one is stopped by a signal. The event loop then blocks too, so
the watchdog ends the process. Before that it prints a line of JSON for each listening socket of its processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import ray

from configs.schema import RunConfig
from infra import process, scrub
from infra.pool import ActorPool
from infra.waits import Waits
from infra.watchdog import Watchdog
from orchestrator.build import ray_session
from orchestrator.standstill import report_of


class Worker:
    """As the run's own actors."""

    def __init__(self) -> None:
        process.enter()

    async def pid(self) -> tuple[int, bool]:
        """Process id, and whether its signal to the node's network devices has arrived."""
        return os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME") == "lo"

    async def block(self) -> None:
        """Never answers again."""
        self.a_function_that_blocks()

    def a_function_that_blocks(self) -> None:
        """What a stack must name."""
        time.sleep(600)


def listeners() -> None:
    """Of every process that this one has started."""
    me = psutil.Process()
    for one in [me, *me.children(recursive=True)]:
        for connection in one.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                print(json.dumps({"process": one.name(), "address": connection.laddr.ip}), flush=True)


def config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "standstill",
            "output": str(folder),
            "steps": 1,
            "sources": {"chat": {"type": "arith", "groups_per_step": 1}},
            "engine": {"model": "policy"},
            "learner": {"model": "policy"},
            "ray": {"object_store_mib": 100},
            "eval": None,
        }
    )


async def main(watchdog: Watchdog) -> None:
    actor = ray.remote(num_cpus=0, max_concurrency=4)(Worker)
    pool = ActorPool("rollout", lambda _: actor.remote(), size=2, slots=1, silent_after_s=600.0)
    await pool.ready()
    watchdog.pools = lambda: [report_of(pool)]
    calls = [asyncio.create_task(pool.call("pid")) for _ in range(2)]
    pids = [await call for call in calls]
    assert all(local for _, local in pids), "torch and vLLM are told to stay on the loopback device"
    blocked = asyncio.create_task(pool.call("block"))
    await asyncio.sleep(0.5)
    (stopped,) = [ray.get(member.handle.pid.remote())[0] for member in pool._members if not member.busy]
    os.kill(stopped, signal.SIGSTOP)
    late = asyncio.create_task(pool.call("pid"))
    await asyncio.sleep(3.0)  # the node's agents come up last
    await asyncio.to_thread(listeners)
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    print(
        json.dumps({"stopped": stopped, "token": os.environ["RAY_AUTH_TOKEN_PATH"], "children": children}), flush=True
    )
    watchdog.moved()
    with watchdog.waits.on("rollouts", "a call that never ends"):
        time.sleep(600)  # noqa: ASYNC251
    await asyncio.gather(blocked, late)


if __name__ == "__main__":
    run_dir = Path(sys.argv[1])
    scrub.install()
    watching = Watchdog(
        run_dir,
        Waits(),
        stall_after_s=2.0,
        abort_after_s=14.0,
        say=lambda text: print(text, file=sys.stderr, flush=True),
        ended=lambda text: None,
        leave_s=30.0,
    )
    with ray_session(config(run_dir)):
        watching.start()
        asyncio.run(watching.attended(main(watching)))
