"""From a configuration to running parts: pools, engines, the learner, and the Ray and the event loop they live in."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from configs.models import read_facts
from configs.schema import (
    AdvantageMode,
    EndpointGraderBackend,
    EngineConfig,
    GraderConfig,
    RayConfig,
    Resources,
    RunConfig,
    VllmGraderBackend,
)
from grader.worker import GraderWorker
from infra import access
from infra.errors import GagarError, first_error
from infra.placement import actor_options
from infra.pool import ActorPool
from learner.group import LearnerGroup
from orchestrator.progress import Progress
from rollout.engine import EngineClient
from rollout.engine_pool import EnginePool
from rollout.worker import RolloutWorker

T = TypeVar("T")
CLOSE_S = 5.0
"""What workers get at the end of a run to end the sandboxes that they have started ahead."""
STOPPED = "stopped by SIGTERM; the same command with --resume goes on from the last checkpoint"
_RAY_STARTS = 3
Starting = Callable[[], Coroutine[Any, Any, T]]
"""Await the call for the part, ready to be used."""


def most_actors(config: RunConfig) -> dict[str, int]:
    """Pools that cannot grow at will. Graders share the requests that their endpoint takes by their largest number."""
    if config.grader is None or not isinstance(config.grader.backend, EndpointGraderBackend):
        return {}
    return {"grader": max(config.grader.workers, config.scaling.grader.max if config.scaling.grader else 0)}


def _sharing(config: RunConfig, grader: GraderConfig) -> GraderConfig:
    """What each grader is told: how many there may be, so that they never ask more of their endpoint together."""
    return grader.model_copy(update={"workers": most_actors(config).get("grader", grader.workers)})


# ---- parts ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def rollout_pool(
    config: RunConfig, progress: Progress, keep: Path | None = None
) -> AsyncIterator[tuple[EnginePool, Starting[ActorPool]]]:
    """The policy's engines and the rollout workers, starting; await the call for the ready pool. `keep`: where workers
    write the rollouts that they have finished for training."""
    silent_s = config.supervision.silent_after_s
    async with _engines("policy", config.engine, config.seed, progress, silent_s) as (engines, engines_ready):
        pool = _pool(
            "rollout",
            RolloutWorker,
            (config.rollout, config.engine.model, engines.client(), keep),
            workers=config.rollout.workers,
            slots=config.rollout.slots_per_worker,
            resources=config.rollout.resources,
            silent_after_s=silent_s,
            say=progress.event,
        )

        engines.on_change(lambda: pool.broadcast("use_engines", engines.replicas()))

        async def ready() -> ActorPool:
            await asyncio.gather(engines_ready(), pool.ready())
            return pool

        try:
            yield engines, ready
        finally:
            if getattr(config.rollout.sandbox, "warm", 0):
                pool.broadcast("close")
                await asyncio.sleep(CLOSE_S)
            await pool.shutdown()


@asynccontextmanager
async def grader_pool(config: RunConfig, progress: Progress) -> AsyncIterator[Starting[ActorPool | None]]:
    """The graders, starting; await the call for the ready pool, or for None where the mode needs no grades."""
    grader, silent_s = config.grader, config.supervision.silent_after_s
    async with contextlib.AsyncExitStack() as stack:
        waits: list[Callable[[], Awaitable[None]]] = []
        pool: ActorPool | None = None
        if grader is not None and config.algorithm.mode is not AdvantageMode.OUTCOME:
            client: EngineClient | None = None
            if isinstance(grader.backend, VllmGraderBackend):
                engine = grader.backend.engine
                starting = _engines("grader", engine, config.seed + 1, progress, silent_s)
                engines, engines_ready = await stack.enter_async_context(starting)
                client = engines.client()
                waits.append(engines_ready)
            pool = _pool(
                "grader",
                GraderWorker,
                (_sharing(config, grader), config.algorithm.rubric),
                kwargs={"engine": client, "sandbox": config.rollout.sandbox},
                workers=grader.workers,
                slots=grader.groups_per_worker,
                resources=grader.resources,
                silent_after_s=silent_s,
                say=progress.event,
            )
            stack.push_async_callback(pool.shutdown)
            waits.append(pool.ready)

        async def ready() -> ActorPool | None:
            await asyncio.gather(*(wait() for wait in waits))
            return pool

        yield ready


@asynccontextmanager
async def _engines(
    name: str, config: EngineConfig, seed: int, progress: Progress, silent_after_s: float
) -> AsyncIterator[tuple[EnginePool, Starting[None]]]:
    engines = EnginePool(config, name=name, seed=seed, silent_after_s=silent_after_s, say=progress.event)
    start_s = time.monotonic()
    engines.start()

    async def ready() -> None:
        await engines.ready()
        progress.event(f"{name} engine ready ({config.replicas} x {config.device}, {time.monotonic() - start_s:.0f} s)")

    try:
        yield engines, ready
    finally:
        await engines.shutdown()


@asynccontextmanager
async def learner_group(config: RunConfig, progress: Progress) -> AsyncIterator[Starting[LearnerGroup]]:
    """The learner group, starting; await the call for the ready one."""
    group = LearnerGroup(config.learner, config.loss, config.rollout.sampling.temperature, config.supervision)
    start_s = time.monotonic()
    group.start()

    async def ready() -> LearnerGroup:
        await group.ready()
        c = config.learner
        progress.event(
            f"learner ready ({c.world_size} x {c.device}, ZeRO {c.zero_stage}, {time.monotonic() - start_s:.0f} s)"
        )
        return group

    try:
        yield ready
    finally:
        group.shutdown()


def kv_tokens(config: EngineConfig) -> int | None:
    """Room in the KV cache of one engine, where the configuration says how large it is."""
    if config.device != "cpu":
        return None
    values = read_facts(Path(config.model)).kv_values_per_token
    if values is None:
        return None
    return int(config.kv_cache_gib * 2**30) // (values * (4 if config.dtype == "float32" else 2))


def _pool(
    name: str,
    actor: type,
    args: tuple[Any, ...],
    *,
    workers: int,
    slots: int,
    resources: Resources,
    silent_after_s: float,
    say: Callable[[str], None],
    kwargs: dict[str, Any] | None = None,
) -> ActorPool:
    """A started pool of `actor(*args, **kwargs)`; the light arguments go to each actor by value."""
    import ray

    remote = ray.remote(**actor_options(resources), max_concurrency=slots + 2)(actor)
    pool = ActorPool(
        name,
        lambda _: remote.remote(*args, **(kwargs or {})),
        size=workers,
        slots=slots,
        silent_after_s=silent_after_s,
        say=say,
    )
    pool.start()
    return pool


@contextmanager
def ray_session(config: RunConfig) -> Iterator[None]:
    """Ray as the configuration wants it: a local one that nobody else can reach, or a running cluster."""
    import ray

    with access.own_ray() if config.ray.address is None else contextlib.nullcontext():
        _start_ray(config.ray, config.name)
        try:
            yield
        finally:
            ray.shutdown()


def _start_ray(config: RayConfig, name: str) -> None:
    """`ray.init`. Ray gives a node of its own 30 s to start, which a busy machine can exceed, so that is tried again.

    Raises:
        GagarError: it does not start, or there is no cluster at the address.
    """
    import ray

    local = config.address is None
    size = config.object_store_mib
    options: dict[str, Any] = (
        {"_node_ip_address": access.LOOPBACK, "include_dashboard": False} if local else {"address": config.address}
    )
    if local and size:
        options["object_store_memory"] = size * 2**20
    for left in reversed(range(_RAY_STARTS if local else 1)):
        try:
            ray.init(
                log_to_driver=False,
                logging_level="error",
                configure_logging=True,
                namespace=f"gagar-{name}",
                **options,
            )
        except Exception as e:  # Ray raises plain Exceptions here
            ray.shutdown()
            if left:
                continue
            if local:
                raise GagarError(
                    f"Ray did not start on this machine ({e}); if it is busy, try again later; `gagar doctor` looks at "
                    "memory, /dev/shm and limits"
                ) from e
            raise GagarError(
                f"ray.address={config.address}: no cluster answers there ({e}); see that it runs, with the same Ray "
                "and the same token (RAY_AUTH_TOKEN_PATH)"
            ) from e
        else:
            return


def run_loop(main: Coroutine[Any, Any, T], *, stopped: str = STOPPED) -> T:
    """asyncio.run, with the one GagarError of a group of failed loops brought to the surface.

    SIGTERM ends the work as an interrupt does: parts are shut down, and `stopped` is the error's message.
    """
    told = False

    async def go() -> T:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal told
            told = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        return await main

    try:
        return asyncio.run(go())
    except asyncio.CancelledError:
        if not told:
            raise
        raise GagarError(stopped) from None
    except BaseExceptionGroup as group:
        error = first_error(group, GagarError)
        if error is None:
            raise
        raise error from group
