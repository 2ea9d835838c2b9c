"""Whether another group may start to roll out: what it is predicted to need, held against what there is. Pure.

Rollouts are bounded by the slots of the rollout pool (one slot is one sandbox), by the sequences that the engines
decode at once, and by the KV cache that the rollouts under way are predicted to fill. How long a source's rollouts get
is learned; until enough of them have ended, each is taken to be as long as the limits allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from configs.schema import RunConfig

LEARNED_AFTER = 32
"""Ended rollouts of a source before its estimate replaces the longest possible one."""
WINDOW = 256
"""Rollouts that an estimate looks back on."""
P90 = 1.2816
"""Standard deviations above the mean below which 90 % of a normal distribution lie."""


class Bound(StrEnum):
    """What keeps a group out."""

    SLOTS = "slots"
    ENGINES = "engines"
    KV = "kv"


@dataclass(slots=True)
class Length:
    """Exponentially weighted mean and variance of a rollout's tokens."""

    seen: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def observe(self, tokens: int) -> None:
        """A rollout ended with so many tokens."""
        self.seen += 1
        gain = max(1.0 / self.seen, 1.0 / WINDOW)
        change = tokens - self.mean
        self.mean += gain * change
        self.variance = (1.0 - gain) * (self.variance + gain * change * change)

    def upper(self, longest: int) -> float:
        """Tokens that about nine of ten rollouts stay below, at most `longest`."""
        if self.seen < LEARNED_AFTER:
            return float(longest)
        return min(self.mean + P90 * math.sqrt(self.variance), float(longest))


class Admission:
    """The bounds on rollouts under way."""

    def __init__(
        self,
        sources: Iterable[str],
        *,
        group_size: int,
        longest_tokens: int,
        engines: int = 1,
        sequences_per_engine: int | None = None,
        kv_tokens_per_engine: int | None = None,
    ) -> None:
        """`longest_tokens`: limit of one rollout. Of one engine, the sequences that it decodes at once and the room in
        its KV cache; None where a bound is not known."""
        self._engines = engines
        self._sequences_per_engine = sequences_per_engine
        self._kv_tokens_per_engine = kv_tokens_per_engine
        self._group_size = group_size
        self._longest = longest_tokens
        self._lengths = {source: Length() for source in sources}

    @classmethod
    def of(cls, config: RunConfig, *, kv_tokens_per_engine: int | None = None) -> Admission:
        """As a run's configuration says; `kv_tokens_per_engine` where the configuration does not give it."""
        return cls(
            config.sources,
            group_size=config.algorithm.group_size,
            longest_tokens=config.rollout.limits.max_total_tokens,
            engines=config.engine.replicas,
            sequences_per_engine=config.engine.max_num_seqs,
            kv_tokens_per_engine=config.scheduler.kv_tokens_per_engine or kv_tokens_per_engine,
        )

    def resize(self, engines: int) -> None:
        """So many engines serve now. One always counts: rollouts wait for the next one, they are not held back."""
        self._engines = max(engines, 1)

    @property
    def sequences(self) -> int | None:
        """Rollouts that all engines decode at once."""
        return None if self._sequences_per_engine is None else self._engines * self._sequences_per_engine

    @property
    def kv_tokens(self) -> int | None:
        """Room in all KV caches."""
        return None if self._kv_tokens_per_engine is None else self._engines * self._kv_tokens_per_engine

    def observe(self, source: str, tokens: int) -> None:
        """A rollout of `source` ended with so many tokens in all."""
        self._lengths[source].observe(tokens)

    def predicted_tokens(self, source: str) -> float:
        """What one rollout of a source is taken to need of the KV cache."""
        return self._lengths[source].upper(self._longest)

    def need_tokens(self, rolling: Mapping[str, int]) -> float:
        """What the rollouts under way are taken to need together."""
        return sum(count * self.predicted_tokens(source) for source, count in rolling.items())

    def full(self, rolling: Mapping[str, int], slots: int) -> Bound | None:
        """What keeps every further group out, or None. `rolling`: source -> trajectories that run or wait for a slot.

        A group is let in while any slot is free: what it has more than that waits for the next ones, so that no slot
        idles while the driver is busy elsewhere.
        """
        under_way = sum(rolling.values())
        if under_way >= slots:
            return Bound.SLOTS
        if self.sequences is not None and under_way >= max(self.sequences, 1):
            return Bound.ENGINES
        return None

    def closed(self, rolling: Mapping[str, int]) -> set[str]:
        """Sources whose next group is predicted not to fit the KV cache. A group alone always fits: a rollout that is
        longer than expected is preempted by the engine, not lost."""
        if self.kv_tokens is None or not any(rolling.values()):
            return set()
        room = self.kv_tokens - self.need_tokens(rolling)
        return {s for s in self._lengths if self._group_size * self.predicted_tokens(s) > room}

    def scalars(self, rolling: Mapping[str, int]) -> dict[str, float]:
        """Metrics `admission/...`."""
        out = {f"admission/predicted_tokens/{s}": self.predicted_tokens(s) for s in self._lengths}
        if self.kv_tokens:
            out["admission/kv_need_share"] = self.need_tokens(rolling) / self.kv_tokens
        return out
