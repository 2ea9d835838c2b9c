"""The engines of one checkpoint as the driver sees them: they start, restart, come and go, and share their weights.

starting -> ready -> has the current weights (adopt) -> serves -> draining -> ended
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from configs.schema import EngineConfig
from infra.errors import ConfigError, EngineError
from infra.members import ActorState, PoolState
from infra.placement import actor_options
from rollout.engine import EngineClient, EngineLost, EngineStats, answer

_RESTARTS = 3
"""Restarts of one replica in a row that fail, before it is given up."""
_PING_S = 10.0
"""How often a live replica is asked whether it lives."""
_RETURN_S = 600.0
"""Time that a lost replica gets to come back."""
_SETTLE_S = 2.0
"""Time that Ray gets to notice a death before the survivors are asked again; and that requests already on their way to
a draining replica get to arrive."""
_CALLS_AT_ONCE = 10_000
"""Calls that one replica has open; vLLM queues requests, and a weight update must not wait behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTarget:
    """Where new weights go: all that the learner's ranks need to know of a pool. Picklable."""

    backend: Literal["ray_object", "nccl"]
    handles: tuple[Any, ...]
    """Actor handles of the live replicas."""
    workers_per_replica: int
    """Processes that hold weights in one replica: its tensor parallel size."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Replica:
    """One engine of the pool."""

    number: int
    handle: Any
    ready: Any
    """Result to come of its first `ready`."""
    state: ActorState = ActorState.STARTING
    joined: bool = False
    """Has the weights of the others, or will get them with theirs: it is told of updates, and asked."""


class EnginePool:
    """Driver-side handle on engine actors that all serve one checkpoint, `config.replicas` of them at the start.

    With `ray_object` a replica that dies is restarted, a few times, and given the weights that the learner published
    last (`remember`); so is one that joins later, before it gets its first request. With NCCL one that dies stays away,
    and none can join: the communicator is made once.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        name: str = "policy",
        seed: int = 0,
        silent_after_s: float = 60.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """A live replica that does not answer within `silent_after_s` hangs, and is ended as if it had died; an engine
        answers between two steps. `say` is told, in a line, of replicas that are lost or do not start. Raises
        ConfigError where the combination cannot run."""
        if config.weight_transfer == "nccl" and config.device != "cuda":
            raise ConfigError("engine.weight_transfer=nccl needs engine.device=cuda; use ray_object on a CPU")
        self.config = config
        self.name = name
        self.seed = seed
        self.silent_after_s = silent_after_s
        self.say = say
        self.slots = config.max_num_seqs
        """Sequences that one replica decodes at once."""
        self.restarts = 0
        """Replicas that were lost and serve again, so far."""
        self.handed_back = 0
        """Requests that outlasted the drain of their replica and started again on another one, so far."""
        self.start_s: float | None = None
        """Seconds from `start` until every replica was ready."""
        self._size = config.replicas
        self._started_s = 0.0
        self._made = 0
        self._replicas: list[_Replica] = []
        self._published: tuple[int, dict[str, Any] | None] = (0, None)
        self._quiet = asyncio.Event()
        """Set while no update is on its way."""
        self._quiet.set()
        self._client = EngineClient(name, {})
        self._listeners: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Creates the actors, all at once; does not wait for them to load."""
        self._started_s = time.monotonic()
        while len(self._replicas) < self._size:
            self._add(joined=True)

    async def ready(self, timeout_s: float = 600.0) -> None:
        """Returns when every replica serves. Raises EngineError: which one does not, why, and what to do."""
        if not self._replicas:
            self.start()

        async def one(replica: _Replica) -> None:
            label = f"{self.name} engine {replica.number} of {self.config.replicas}"
            try:
                await asyncio.wait_for(answer(replica.ready), max(0.0, self._started_s + timeout_s - time.monotonic()))
            except TimeoutError:
                resources = self.config.resources
                raise EngineError(
                    f"{label} was not ready within {timeout_s:g} s; if the cluster cannot give it {resources.cpus:g} "
                    f"CPUs and {resources.gpus:g} GPUs it waits for ever: see `ray status`"
                ) from None
            replica.state = ActorState.LIVE
            self._spawn(self._watch(replica))

        await asyncio.gather(*(one(replica) for replica in self._replicas))
        self.start_s = time.monotonic() - self._started_s
        self._notify()

    def resize(self, size: int, *, drain_s: float = 120.0) -> None:
        """Makes the pool `size` engines large, in the background; returns at once.

        A new one gets the current weights before its first request. A surplus one gets no new requests; what it has not
        finished after `drain_s` starts again on another one. Raises ConfigError where that cannot be.
        """
        if size < 1:
            raise ConfigError(f"a pool needs at least one engine, not {size}")
        if self.config.weight_transfer == "nccl" and size != self._size:
            raise ConfigError(
                "engine.weight_transfer=nccl makes its communicator once, for the engines there are: stop the run, and "
                f"go on with --resume engine.replicas={size}"
            )
        self._size = size
        staying = [r for r in self._replicas if r.state in (ActorState.STARTING, ActorState.LIVE)]
        surplus = sorted(staying, key=lambda r: (r.state is ActorState.LIVE, -r.number))[: max(0, len(staying) - size)]
        for replica in surplus:
            starting = replica.state is ActorState.STARTING
            replica.state = ActorState.DRAINING
            if starting:
                self._remove(replica)
            else:
                self._spawn(self._retire(replica, drain_s))
        for _ in range(size - len(staying)):
            self._spawn(self._join(self._add(joined=False)))
        self._notify()

    async def shutdown(self) -> None:
        """Ends the actors at once; requests in flight raise EngineError."""
        for task in list(self._tasks):
            task.cancel()
        for replica in list(self._replicas):
            self._remove(replica)

    # ---- what others see --------------------------------------------------------------------------------------------

    @property
    def handles(self) -> list[Any]:
        """Actors that get new weights."""
        return [r.handle for r in self._replicas if r.joined]

    def replicas(self) -> dict[int, Any]:
        """Actors that take requests, by number; follow it with `on_change`."""
        asked = (ActorState.STARTING, ActorState.LIVE)
        return {r.number: r.handle for r in self._replicas if r.joined and r.state in asked}

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Has `listener` called, in the loop, whenever replicas come or go; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def capacity(self) -> int:
        """Sequences that the replicas decode at once now."""
        return self.slots * self.state().live

    def state(self) -> PoolState:
        """Sizes now; the slots in use are known to the engines only (`stats`)."""
        count = {state: sum(r.state is state for r in self._replicas) for state in ActorState}
        live = count[ActorState.LIVE]
        return PoolState(
            target=self._size,
            live=live,
            starting=count[ActorState.STARTING],
            draining=count[ActorState.DRAINING],
            busy=0,
            slots=live * self.slots,
        )

    def client(self) -> EngineClient:
        """An `Engine` over this pool, to be given to workers. It follows the pool; copies in other processes are told
        with `EngineClient.use`."""
        self._client.use(self.replicas())
        return self._client

    def transfer_target(self) -> TransferTarget:
        """For the learner's `Publisher`, at the begin of an update. Raises ConfigError where updates cannot reach these
        engines."""
        if self.config.weight_transfer == "ray_object" and self.config.tensor_parallel_size > 1:
            raise ConfigError(
                "engine.weight_transfer=ray_object reaches engines of one process only, and "
                f"engine.tensor_parallel_size is {self.config.tensor_parallel_size}; use weight_transfer=nccl"
            )
        self._quiet.clear()
        return TransferTarget(
            backend=self.config.weight_transfer,
            handles=tuple(self.handles),
            workers_per_replica=self.config.tensor_parallel_size,
        )

    def remember(self, version: int, update_info: dict[str, Any] | None) -> None:
        """The update is over: what the learner published last, for replicas that restart or join; the version, and the
        `ray_object` update."""
        self._published = (version, update_info)
        self._quiet.set()

    def expect(self) -> None:
        """The learner was lost, and with it the weights that it had published: who restarts or joins waits for the next
        ones."""
        self._quiet.clear()

    async def stats(self) -> EngineStats:
        """Of the replicas that answer, added up. Raises EngineLost if there is none."""
        answers = await asyncio.gather(*(answer(h.stats.remote()) for h in self.handles), return_exceptions=True)
        parts = [a for a in answers if isinstance(a, EngineStats)]
        if not parts:
            raise EngineLost(f"no {self.name} engine is left")
        return EngineStats(
            version=min(p.version for p in parts),
            running=sum(p.running for p in parts),
            waiting=sum(p.waiting for p in parts),
            generated_tokens=sum(p.generated_tokens for p in parts),
            prompt_tokens=sum(p.prompt_tokens for p in parts),
            cached_prompt_tokens=sum(p.cached_prompt_tokens for p in parts),
            kv_usage=max(p.kv_usage for p in parts),
            start_s=max(p.start_s for p in parts),
        )

    # ---- replicas come, restart and leave ---------------------------------------------------------------------------

    def _add(self, *, joined: bool) -> _Replica:
        """One that has not joined holds its requests until `adopt`, should any come."""
        import ray

        from rollout.engine_actor import EngineActor, environment

        config = self.config
        gpus = config.resources.gpus or (config.tensor_parallel_size if config.device == "cuda" else 0)
        actor = ray.remote(EngineActor).options(
            **actor_options(config.resources, gpus=gpus),
            max_concurrency=_CALLS_AT_ONCE,
            max_restarts=-1 if config.weight_transfer == "ray_object" else 0,  # `_watch` counts those in a row
            runtime_env={"env_vars": environment(config)},
        )
        number, self._made = self._made, self._made + 1
        # On a CPU requests have seeds of their own, which must be the same on every replica.
        seed = self.seed if config.device == "cpu" else self.seed + 1000 * number
        handle = actor.remote(config, f"{self.name} engine {number}", seed, held=not joined)
        replica = _Replica(number=number, handle=handle, ready=handle.ready.remote(), joined=joined)
        self._replicas.append(replica)
        return replica

    async def _join(self, replica: _Replica) -> None:
        """Gives a new replica the current weights; only then is it asked, and told of updates."""
        try:
            await answer(replica.ready)
            await self._adopt(replica)
        except EngineError as e:
            if replica.state is ActorState.STARTING:
                self.say(f"{self.name} engine {replica.number} did not start: {e}")
                self._remove(replica)
                self._notify()
            return
        if replica.state is not ActorState.STARTING:  # not wanted any more
            return
        replica.joined, replica.state = True, ActorState.LIVE
        self._notify()
        await self._watch(replica)

    async def _watch(self, replica: _Replica) -> None:
        """Ends a replica that hangs, and gives one that Ray has restarted the current weights, until it fails at that
        too often in a row."""
        label = f"{self.name} engine {replica.number}"
        while True:
            reason = await self._end_of(replica)
            if replica.state is not ActorState.LIVE:
                return
            self.say(f"{label} was lost: {reason}; it is started again")
            start_s = time.monotonic()
            if not await self._serves_again(replica):
                break
            self.restarts += 1
            self.say(f"{label} serves again after {time.monotonic() - start_s:.0f} s")
        self.say(f"{label} does not come back; the pool stays smaller")
        self._remove(replica)
        self._notify()

    async def _serves_again(self, replica: _Replica) -> bool:
        """Whether a lost replica has come back, with the current weights. It has failed when its engine says so, a few
        times. Until it can be asked Ray is still ending the old process or starting the next, which takes as long as
        the machine is busy."""
        failures, deadline_s = 0, time.monotonic() + _RETURN_S
        while replica.state is ActorState.LIVE and time.monotonic() < deadline_s:
            await asyncio.sleep(_SETTLE_S)
            try:
                await answer(replica.handle.ready.remote())
                await self._adopt(replica)
                return True
            except EngineError as e:
                failures += not isinstance(e, EngineLost)
            if failures == _RESTARTS or self.config.weight_transfer != "ray_object":
                return False
        return False

    async def _end_of(self, replica: _Replica) -> str:
        """Waits until a replica has died, or hangs and has been ended; returns which, and why."""
        import ray

        gone = asyncio.ensure_future(answer(replica.handle.gone.remote()))
        try:
            while True:
                done, _ = await asyncio.wait({gone}, timeout=_PING_S)
                if done:
                    return str(gone.exception())
                try:
                    async with asyncio.timeout(self.silent_after_s):
                        await answer(replica.handle.stats.remote())
                except TimeoutError:
                    if replica.state is ActorState.LIVE:
                        ray.kill(replica.handle, no_restart=False)
                    return f"no sign of life for {self.silent_after_s:g} s"
                except EngineError as e:
                    return str(e)
        finally:
            gone.cancel()

    async def _adopt(self, replica: _Replica) -> None:
        """Gives a replica the weights that were published last, also if they changed meanwhile."""
        while True:
            await self._quiet.wait()
            published = self._published
            await answer(replica.handle.adopt.remote(*published))
            if self._quiet.is_set() and self._published is published:
                return

    async def _retire(self, replica: _Replica, drain_s: float) -> None:
        """Waits until a draining replica has no requests, and ends it; its clients ask others from now on."""
        deadline_s = time.monotonic() + drain_s
        await asyncio.sleep(min(_SETTLE_S, drain_s))
        left = 0
        with contextlib.suppress(EngineError):  # it is gone already
            while True:
                stats: EngineStats = await answer(replica.handle.stats.remote())
                left = stats.running + stats.waiting
                if left == 0 or time.monotonic() >= deadline_s:
                    break
                await asyncio.sleep(0.25)
        self.handed_back += left
        self._remove(replica)
        self._notify()

    def _remove(self, replica: _Replica) -> None:
        import ray

        replica.state, replica.joined = ActorState.DEAD, False
        self._replicas.remove(replica)
        ray.kill(replica.handle)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _notify(self) -> None:
        self._client.use(self.replicas())
        for listener in self._listeners:
            listener()
