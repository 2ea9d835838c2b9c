"""What an inference engine is to everybody else: tokens in, tokens out, with what the loss needs of each sampled token.

Light on purpose: vLLM itself is imported inside the engine's own actor only (`rollout.vllm_engine`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from infra.errors import EngineError

_AGAIN_S = 2.0
"""Pause before replicas that were all lost are asked again."""


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


class EngineClient:
    """`Engine` over the replicas of a pool. Picklable: every worker has its own.

    All requests of a group go to one replica, whose prefix cache their siblings fill. If it is lost, the request in
    flight starts again on the next one; nothing of it had been used. A replica that was lost is asked again after all
    others, and for `patience_s` again and again: it may be restarting. Only then is the request lost.
    """

    def __init__(self, name: str, handles: Sequence[Any] | Mapping[int, Any], *, patience_s: float = 60.0) -> None:
        """`handles` by number of the replica, or in order."""
        self.name = name
        self.patience_s = patience_s
        self._handles = dict(handles if isinstance(handles, Mapping) else enumerate(handles))
        self._suspect: set[int] = set()

    def use(self, handles: Mapping[int, Any]) -> None:
        """The replicas from now on; requests in flight stay where they are."""
        self._handles = dict(handles)
        self._suspect &= self._handles.keys()

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
        deadline_s = time.monotonic() + self.patience_s
        while True:
            try:
                return await self._try_all(request)
            except EngineLost:
                if not self._handles or time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _try_all(self, request: dict[str, Any]) -> Generation:
        """The first replica that answers; one that restarts keeps the request until it serves."""
        reason = ""
        for replica in self.replicas(request["request_id"]):
            handle = self._handles.get(replica)
            if handle is None:  # the pool has given it up meanwhile
                continue
            try:
                generation: Generation = await answer(handle.generate.remote(**request))
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
        """Replicas in the order in which this request tries them; the same for all requests of its group.

        Each group ranks the replicas by itself, so that one that comes or goes moves its own share of groups only.
        """
        group = request_id.split("/", 1)[0]

        def rank(replica: int) -> bytes:
            return hashlib.blake2b(f"{group}@{replica}".encode(), digest_size=8).digest()

        return sorted(sorted(self._handles, key=rank), key=self._suspect.__contains__)


async def answer(ref: Any) -> Any:
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
