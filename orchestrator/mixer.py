"""Which source the next group comes from (M6.1, M6.2), with estimates learned online.

Pure state: no clock, no Ray. The scheduler tells it what happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.schema import SourceBase

EWMA = 0.1
"""Weight of the newest observation in the estimates of acceptance and time."""


@dataclass(slots=True, kw_only=True)
class SourceState:
    """What the mixer knows of one source."""

    quota: int
    """B_i: groups wanted in every step."""
    acceptance: float
    """r_i estimate."""
    time_s: float
    """t_i estimate: effective rollout time of a group."""
    next_index: int = 0
    """First task of the stream that was never dispatched."""
    again: list[int] = field(default_factory=list)
    """Tasks that a resume samples again before the stream goes on."""
    credit: float = 0.0
    """Smooth weighted round-robin."""
    accepted: int = 0
    """A_i: groups ready for the step that is being collected."""
    dispatched_total: int = 0
    accepted_total: int = 0
    ended_total: int = 0


class Mixer:
    """Smooth weighted round-robin over the sources with weight w_i of M6.2."""

    def __init__(self, sources: Mapping[str, SourceBase], *, alpha: float) -> None:
        self._alpha = alpha
        self.sources = {
            name: SourceState(quota=c.groups_per_step, acceptance=c.prior_acceptance, time_s=c.prior_time_s)
            for name, c in sources.items()
            if c.groups_per_step > 0
        }

    @property
    def quotas(self) -> dict[str, int]:
        """B_i by source."""
        return {name: s.quota for name, s in self.sources.items()}

    def weight(self, name: str) -> float:
        """w_i = alpha B_i / r_i + (1 - alpha) max(B_i - A_i, 0) / r_i (M6.2)."""
        s = self.sources[name]
        missing = max(s.quota - s.accepted, 0)
        return (self._alpha * s.quota + (1.0 - self._alpha) * missing) / s.acceptance

    def limit(self, name: str, steps: int) -> int:
        """Most groups of a source between admission and training: its need m_i = B_i / r_i (M6.1) for `steps` steps,
        rounded up."""
        s = self.sources[name]
        return math.ceil(steps * s.quota / s.acceptance)

    def choose(self, outstanding: Mapping[str, int], steps: int) -> str | None:
        """The source of the next group, or None while every source holds what the next `steps` steps need."""
        open_sources = [n for n in self.sources if outstanding.get(n, 0) < self.limit(n, steps)]
        weights = {n: self.weight(n) for n in open_sources}
        total = sum(weights.values())
        if total <= 0.0:
            return None
        for name, weight in weights.items():
            self.sources[name].credit += weight
        best = max(open_sources, key=lambda n: self.sources[n].credit)
        self.sources[best].credit -= total
        return best

    def take_index(self, name: str) -> int:
        """The next task of a source's stream."""
        s = self.sources[name]
        s.dispatched_total += 1
        if s.again:
            return s.again.pop(0)
        s.next_index += 1
        return s.next_index - 1

    def observe(self, name: str, *, accepted: bool, time_s: float) -> None:
        """A group of this source is ready (accepted) or ended without being trainable."""
        s = self.sources[name]
        s.acceptance = max((1.0 - EWMA) * s.acceptance + EWMA * float(accepted), 0.05)
        s.time_s = (1.0 - EWMA) * s.time_s + EWMA * time_s
        s.ended_total += 1
        if accepted:
            s.accepted += 1
            s.accepted_total += 1

    def lost(self, name: str) -> None:
        """A ready group was dropped: it no longer counts for the step."""
        self.sources[name].accepted -= 1

    def consumed(self) -> None:
        """A step took its quotas; what is left counts for the next one."""
        for s in self.sources.values():
            s.accepted -= s.quota

    def state(self, pending: Mapping[str, list[int]]) -> dict[str, Any]:
        """JSON state for a checkpoint. `pending`: dispatched tasks that a resume must sample again."""
        out = {name: asdict(s) for name, s in self.sources.items()}
        for name, s in out.items():
            s["again"] = sorted({*s["again"], *pending.get(name, [])})
            s["accepted"] = 0
            s["credit"] = 0.0
        return out

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over estimates and stream positions of a checkpoint; quotas stay those of the configuration."""
        for name, saved in state.items():
            if name in self.sources:
                self.sources[name] = SourceState(**{**saved, "quota": self.sources[name].quota})
