"""What an inference engine is to everybody else: tokens in, tokens out, with what the loss needs of each sampled token.

Light on purpose: vLLM itself is imported inside the engine's own actor only (`rollout.vllm_engine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from configs.schema import EngineConfig
from infra.errors import ConfigError, EngineError

_RESTARTS = 3
"""Restarts of one replica before it counts as dead."""
_SETTLE_S = 2.0
"""Time that Ray gets to notice a death before the survivors are asked again."""
_CALLS_AT_ONCE = 10_000
"""Calls that one replica has open; vLLM queues requests, and a weight update must not wait behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled continuation of T tokens."""

    token_ids: tuple[int, ...]
    """[T], the stop token included where one was sampled."""
    logprobs: tuple[float, ...]
    """[T] log mu: log-probability of each token in the distribution it was sampled from, after temperature (M5.1)."""
    versions: tuple[int, ...]
    """[T] policy version that sampled each token; never falls (M6.4)."""
    finish_reason: Literal["stop", "length"]


class Engine(Protocol):
    """Samples from the policy or the grader."""

    async def generate(
        self,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        json_schema: str | None = None,
    ) -> Generation:
        """Continue `prompt_ids` by at most `max_tokens` tokens, up to and including the first of `stop_ids`.

        `request_id` is unique; the part before its first "/" is the group, whose requests share one replica's prefix
        cache. `temperature` 0 is greedy (its log-probabilities are those at temperature 1). `json_schema` forces output
        that is compact JSON of that schema. Raises EngineError if the engine was lost or refused the request.
        """
        ...


class ScriptedEngine:
    """An engine for tests: the continuation comes from a function of the request's id and prompt.

    A token of `stop_ids` in it ends the generation, `max_tokens` cuts it; the function may raise EngineError. Every
    token has log-probability -0.5 and the version that `version` holds when generation starts.
    """

    def __init__(self, respond: Callable[[str, Sequence[int]], Sequence[int]], *, version: int = 0) -> None:
        self.respond = respond
        self.version = version
        self.requests: list[tuple[str, tuple[int, ...]]] = []
        """(request_id, prompt) of every call, in order."""

    async def generate(
        self,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        json_schema: str | None = None,
    ) -> Generation:
        """See `Engine.generate`."""
        self.requests.append((request_id, tuple(prompt_ids)))
        version = self.version
        await asyncio.sleep(0)
        ids: list[int] = []
        finish_reason: Literal["stop", "length"] = "length"
        for token in self.respond(request_id, prompt_ids)[:max_tokens]:
            ids.append(token)
            if token in stop_ids:
                finish_reason = "stop"
                break
        return Generation(
            token_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            versions=(version,) * len(ids),
            finish_reason=finish_reason,
        )


class EngineLost(EngineError):
    """The engine of one replica is gone; another replica may serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What one replica, or (added up) a pool, has done and is doing."""

    version: int
    """Policy version that samples now; of a pool the lowest."""
    running: int
    waiting: int
    """Requests that wait for room in the batch."""
    generated_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    """Prompt tokens of finished requests that the prefix cache held."""
    kv_usage: float
    """Share of the KV cache in use; of a pool the highest."""
    start_s: float
    """Seconds of loading; of a pool the longest."""

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache held."""
        return self.cached_prompt_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTarget:
    """Where new weights go: all that the learner's ranks need to know of a pool. Picklable."""

    backend: Literal["ray_object", "nccl"]
    handles: tuple[Any, ...]
    """Actor handles of the live replicas."""
    workers_per_replica: int
    """Processes that hold weights in one replica: its tensor parallel size."""


class EngineClient:
    """`Engine` over the replicas of a pool. Picklable: every worker has its own.

    All requests of a group go to one replica, whose prefix cache their siblings fill. If it is lost, the request in
    flight starts again on the next one; nothing of it had been used. A replica that was lost is asked again after all
    others, and once more a little later: it may be restarting. Only then is the request lost.
    """

    def __init__(self, name: str, handles: Sequence[Any]) -> None:
        self.name = name
        self._handles = tuple(handles)
        self._suspect: set[int] = set()

    async def generate(
        self,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        json_schema: str | None = None,
    ) -> Generation:
        """See `Engine.generate`."""
        request = {
            "request_id": request_id,
            "prompt_ids": tuple(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop_ids": tuple(stop_ids),
            "json_schema": json_schema,
        }
        try:
            return await self._try_all(request)
        except EngineLost:
            await asyncio.sleep(_SETTLE_S)
            return await self._try_all(request)

    async def _try_all(self, request: dict[str, Any]) -> Generation:
        """The first replica that answers; one that restarts keeps the request until it serves."""
        reason = ""
        for replica in self.replicas(request["request_id"]):
            handle = self._handles[replica]
            try:
                generation: Generation = await _answer(handle.generate.remote(**request))
            except EngineLost as e:
                self._suspect.add(replica)
                reason = e.message
            except asyncio.CancelledError:
                handle.abort.remote(request["request_id"])
                raise
            else:
                self._suspect.discard(replica)
                return generation
        raise EngineLost(f"no {self.name} engine answers ({reason})")

    def replicas(self, request_id: str) -> list[int]:
        """Replicas in the order in which this request tries them; the same for all requests of its group."""
        group = request_id.split("/", 1)[0]
        first = int.from_bytes(hashlib.blake2b(group.encode(), digest_size=8).digest(), "big")
        count = len(self._handles)
        ring = [(first + i) % count for i in range(count)]
        return sorted(ring, key=self._suspect.__contains__)


class EnginePool:
    """Driver-side handle on `config.replicas` engine actors that all serve one checkpoint.

    With `ray_object` a replica that dies is restarted, a few times, and given the weights that the learner published
    last (`remember`). With NCCL it stays away: its place in the communicator is gone.
    """

    def __init__(self, config: EngineConfig, *, name: str = "policy", seed: int = 0) -> None:
        """Raises ConfigError where the combination cannot run."""
        if config.weight_transfer == "nccl" and config.device != "cuda":
            raise ConfigError("engine.weight_transfer=nccl needs engine.device=cuda; use ray_object on a CPU")
        self.config = config
        self.name = name
        self.seed = seed
        self.handles: list[Any] = []
        self.restarts = 0
        """Replicas that were lost and serve again, so far."""
        self.start_s: float | None = None
        """Seconds from `start` until every replica was ready."""
        self._started_s = 0.0
        self._starting: list[Any] = []
        self._published: tuple[int, dict[str, Any] | None] = (0, None)
        self._watching: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Creates the actors, all at once; does not wait for them to load."""
        import ray

        from rollout.engine_actor import EngineActor, environment

        self._started_s = time.monotonic()
        resources = self.config.resources
        gpus = resources.gpus or (self.config.tensor_parallel_size if self.config.device == "cuda" else 0)
        actor = ray.remote(EngineActor).options(
            num_cpus=resources.cpus,
            num_gpus=gpus,
            resources=resources.custom or None,
            max_concurrency=_CALLS_AT_ONCE,
            max_restarts=_RESTARTS if self.config.weight_transfer == "ray_object" else 0,
            runtime_env={"env_vars": environment(self.config)},
        )
        for replica in range(self.config.replicas):
            handle = actor.remote(self.config, f"{self.name} engine {replica}", self.seed + 1000 * replica)
            self.handles.append(handle)
            self._starting.append(handle.ready.remote())

    async def ready(self, timeout_s: float = 600.0) -> None:
        """Returns when every replica serves. Raises EngineError: which one does not, why, and what to do."""
        if not self.handles:
            self.start()

        async def one(replica: int, ref: Any) -> None:
            label = f"{self.name} engine {replica} of {self.config.replicas}"
            try:
                await asyncio.wait_for(_answer(ref), max(0.0, self._started_s + timeout_s - time.monotonic()))
            except TimeoutError:
                resources = self.config.resources
                raise EngineError(
                    f"{label} was not ready within {timeout_s:g} s; if the cluster cannot give it {resources.cpus:g} "
                    f"CPUs and {resources.gpus:g} GPUs it waits for ever: see `ray status`"
                ) from None

        await asyncio.gather(*(one(i, ref) for i, ref in enumerate(self._starting)))
        self.start_s = time.monotonic() - self._started_s
        self._watching = [asyncio.create_task(self._watch(handle)) for handle in self.handles]

    def remember(self, version: int, update_info: dict[str, Any] | None) -> None:
        """What the learner published last, for replicas that restart: the version, and the `ray_object` update."""
        self._published = (version, update_info)

    async def _watch(self, handle: Any) -> None:
        """Gives a replica the current weights whenever Ray has restarted it, until Ray gives it up."""
        failures = 0
        while failures < _RESTARTS:
            with contextlib.suppress(EngineLost):
                await _answer(handle.gone.remote())
            await asyncio.sleep(_SETTLE_S)
            try:
                await _answer(handle.ready.remote())
                await _answer(handle.adopt.remote(*self._published))
            except EngineError:
                failures += 1
            else:
                failures = 0
                self.restarts += 1

    def client(self) -> EngineClient:
        """An `Engine` over this pool, to be given to workers."""
        return EngineClient(self.name, self.handles)

    def transfer_target(self) -> TransferTarget:
        """For the learner's `Publisher`. Raises ConfigError where updates cannot reach these engines."""
        if self.config.weight_transfer == "ray_object" and self.config.tensor_parallel_size > 1:
            raise ConfigError(
                "engine.weight_transfer=ray_object reaches engines of one process only, and "
                f"engine.tensor_parallel_size is {self.config.tensor_parallel_size}; use weight_transfer=nccl"
            )
        return TransferTarget(
            backend=self.config.weight_transfer,
            handles=tuple(self.handles),
            workers_per_replica=self.config.tensor_parallel_size,
        )

    async def stats(self) -> EngineStats:
        """Of the live replicas, added up. Raises EngineLost if there is none."""
        answers = await asyncio.gather(*(_answer(h.stats.remote()) for h in self.handles), return_exceptions=True)
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

    async def shutdown(self) -> None:
        """Ends the actors at once; requests in flight raise EngineError."""
        import ray

        for task in self._watching:
            task.cancel()
        for handle in self.handles:
            ray.kill(handle)
        self.handles, self._watching = [], []


async def _answer(ref: Any) -> Any:
    """Awaits an engine actor's answer; errors come out as the actor raised them, a dead actor as EngineLost."""
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError

    try:
        return await ref
    except RayTaskError as e:
        if isinstance(e.cause, EngineError):
            raise e.cause from None
        raise EngineError(f"an engine actor failed ({type(e.cause).__name__}: {e.cause})") from e
    except (RayActorError, NodeDiedError, OutOfMemoryError) as e:  # the memory monitor's kill is no RayActorError
        reason = [line.strip() for line in str(e).splitlines() if line.strip()][-1]
        raise EngineLost(f"an engine actor died ({reason})") from e
