"""An engine that samples what no text would give back, and remembers all of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Literal

from rollout.engine import Generation

Script = Callable[[Sequence[int]], Sequence[int] | None]


class SamplingEngine:
    """Random tokens, log-probabilities and rising versions, unless `script` says the reply's tokens for a prompt.

    The random tokens are bytes as they come: text made of them and tokenised again is something else.
    """

    def __init__(self, vocabulary: Sequence[int], *, seed: int = 0, script: Script = lambda prompt: None) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._version = 0
        self.script = script
        self.sampled: list[tuple[str, tuple[int, ...], Generation]] = []
        """(request id, prompt, what was sampled) of every call."""
        self.hold: asyncio.Event | None = None
        """Generations wait for it."""

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
        if self.hold is not None:
            await self.hold.wait()
        await asyncio.sleep(0)
        said = self.script(prompt_ids)
        ids = list(said) if said is not None else self._random.choices(self._vocabulary, k=self._random.randint(1, 12))
        reason: Literal["stop", "length"] = "length"
        if len(ids) < max_tokens and (said is not None or self._random.random() < 0.8):
            ids.append(stop_ids[0])
            reason = "stop"
        ids = ids[:max_tokens]
        versions = []
        for _ in ids:
            self._version += self._random.random() < 0.1
            versions.append(self._version)
        generation = Generation(
            token_ids=tuple(ids),
            logprobs=tuple(-self._random.random() for _ in ids),
            versions=tuple(versions),
            finish_reason=reason,
        )
        self.sampled.append((request_id, tuple(prompt_ids), generation))
        return generation
