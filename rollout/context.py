"""The tokens of one conversation with the policy, as they were shown and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from rollout.engine import Generation
from rollout.trajectory import Payload


@dataclass(slots=True, kw_only=True, eq=False)
class Context:
    """The tokens so far; each list has one entry a token."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def show(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy is shown."""
        self.token_ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def take(self, generation: Generation) -> None:
        """Append what the policy sampled."""
        self.token_ids += generation.token_ids
        self.sampled += [True] * len(generation.token_ids)
        self.logprobs += generation.logprobs
        self.versions += generation.versions

    @property
    def response_tokens(self) -> int:
        """Tokens that were sampled."""
        return sum(self.sampled)


def join(contexts: Sequence[Context]) -> Payload:
    """One trajectory's contexts, back to back."""

    def joined(name: str) -> list[Any]:
        return [value for context in contexts for value in getattr(context, name)]

    return Payload(
        token_ids=np.asarray(joined("token_ids"), dtype=np.int32),
        loss_mask=np.asarray(joined("sampled"), dtype=np.bool_),
        logprobs=np.asarray(joined("logprobs"), dtype=np.float32),
        versions=np.asarray(joined("versions"), dtype=np.int32),
        contexts=tuple(accumulate((len(context.token_ids) for context in contexts[:-1]), initial=0)),
    )
