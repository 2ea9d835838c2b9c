"""What an inference engine is to everybody else: tokens in, tokens out, with what the loss needs of each sampled token.

Light on purpose: vLLM itself is imported by `rollout.vllm_engine`, inside the engine's own actor only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


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
