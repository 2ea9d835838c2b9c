"""Which source the next group comes from (M6.1-M6.3), with estimates learned online.

Pure state: no clock, no Ray. The scheduler tells it what happened; docs/scheduling.md explains the rules in words.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.schema import OversamplingConfig, SchedulerConfig, SourceBase

PRIOR_WEIGHT = 9
"""Observations that a prior is worth."""
SHORTEST_WINDOW = 10
"""Least number of observations that an estimate looks back on; a source with a large quota looks back two steps."""
LEAST_ACCEPTANCE = 0.05
"""r_i is not taken to be less: the need B_i / r_i stays finite."""
SHARE_SLACK = 1.25
"""How far a source may exceed its concurrency share while another one that is below its own could use the room."""


@dataclass(slots=True, kw_only=True)
class SourceState:
    """What the mixer knows of one source."""

    quota: int
    """B_i: groups wanted in every step."""
    acceptance: float
    """r_i estimate."""
    time_s: float
    """t_i estimate: effective time of one rollout, pauses left out."""
    min_concurrency: int = 0
    max_concurrency: int | None = None
    """Trajectories at once."""
    accepted_seen: int = 0
    """Observations behind the acceptance."""
    times_seen: int = 0
    """Observations behind the time."""
    next_index: int = 0
    """First task of the stream that was never dispatched."""
    again: list[int] = field(default_factory=list)
    """Tasks that a resume samples again before the stream goes on."""
    credit: float = 0.0
    """Smooth weighted round-robin."""
    accepted: int = 0
    """A_i: groups ready for the step that is being collected; surplus of the step before included (M6.3)."""
    barren: int = 0
    """Groups that ended in a row without one to train on."""
    dispatched_total: int = 0
    accepted_total: int = 0
    trained_total: int = 0
    ended_total: int = 0

    @property
    def need(self) -> float:
        """m_i = B_i / r_i: groups to be sampled for one step."""
        return self.quota / self.acceptance


_SETTINGS = ("quota", "min_concurrency", "max_concurrency")
"""Fields that a resume takes from the configuration."""


class Mixer:
    """Smooth weighted round-robin over the sources with weight w_i of M6.2, within the budgets of M6.1."""

    def __init__(
        self,
        sources: Mapping[str, SourceBase],
        *,
        alpha: float,
        oversampling: OversamplingConfig | None = None,
        group_size: int = 1,
        wait: bool = False,
        starve_after: int = 64,
        probes: int = 1,
    ) -> None:
        """`oversampling` None: only staleness bounds what is under way. `wait`: no group may grow too old, so no more
        groups are under way than the steps left to them train, whatever share of them is accepted. A source of which
        `starve_after` groups in a row came to nothing gets only `probes` groups at once."""
        self._alpha = alpha
        self._oversampling = oversampling
        self._group_size = group_size
        self._wait = wait
        self._starve_after = starve_after
        self._probes = probes
        self.sources = {
            name: SourceState(
                quota=c.groups_per_step,
                acceptance=c.prior_acceptance,
                time_s=c.prior_time_s,
                min_concurrency=c.min_concurrency,
                max_concurrency=c.max_concurrency,
            )
            for name, c in sources.items()
            if c.groups_per_step > 0
        }
        self._budgets: dict[str, float] | None = None
        """p_i by source; None: an estimate has changed since."""

    @classmethod
    def of(cls, sources: Mapping[str, SourceBase], scheduler: SchedulerConfig, *, group_size: int) -> Mixer:
        """As a run's configuration says."""
        return cls(
            sources,
            alpha=scheduler.alpha,
            oversampling=scheduler.oversampling,
            group_size=group_size,
            wait=scheduler.stale == "wait",
            starve_after=scheduler.starve_after_groups,
            probes=scheduler.starve_probes,
        )

    @property
    def quotas(self) -> dict[str, int]:
        """B_i by source."""
        return {name: s.quota for name, s in self.sources.items()}

    # ---- M6.1: how much is under way --------------------------------------------------------------------------------

    def oversampling(self) -> dict[str, float]:
        """p_i by source; infinite where no budget is configured."""
        if self._budgets is None:
            states = list(self.sources.values())
            if self._oversampling is None:
                budgets = [math.inf] * len(states)
            else:
                budgets = oversampling_budgets([s.time_s for s in states], [s.need for s in states], self._oversampling)
            self._budgets = dict(zip(self.sources, budgets, strict=True))
        return self._budgets

    def limit(self, name: str, steps: int) -> int:
        """Most groups of a source between admission and training, where the next `steps` steps may train on them."""
        s = self.sources[name]
        if self.starved(name):
            return min(self._probes, math.ceil(steps * s.need))
        if s.quota and steps <= 0:
            return 0
        fresh = steps * s.quota if self._wait else steps * s.need
        return math.ceil(min(fresh, (1.0 + self.oversampling()[name]) * s.need))

    def shares(self) -> dict[str, float]:
        """Concurrency shares, proportional to t_i m_i (M6.1)."""
        products = {name: s.time_s * s.need for name, s in self.sources.items()}
        total = sum(products.values())
        return {name: product / total for name, product in products.items()}

    # ---- M6.2: who is next ------------------------------------------------------------------------------------------

    def weight(self, name: str) -> float:
        """w_i = alpha B_i / r_i + (1 - alpha) max(B_i - A_i, 0) / r_i (M6.2)."""
        s = self.sources[name]
        missing = max(s.quota - s.accepted, 0)
        return (self._alpha * s.quota + (1.0 - self._alpha) * missing) / s.acceptance

    def choose(
        self,
        outstanding: Mapping[str, int],
        steps: int,
        *,
        rolling: Mapping[str, int] | None = None,
        slots: int | None = None,
        closed: Collection[str] = (),
    ) -> str | None:
        """The source of the next group, or None while every source holds what the next `steps` steps need.

        `outstanding`: groups between admission and training; `rolling`: trajectories that run or wait for a slot;
        `slots`: trajectories that may run at once; `closed`: sources that nothing is admitted from now. A source below
        its minimal concurrency comes first, one above its share last.
        """
        rolling = rolling or {}
        candidates = [
            name
            for name in self.sources
            if name not in closed
            and self._below_maximum(name, rolling.get(name, 0))
            and outstanding.get(name, 0) < self.limit(name, steps)
        ]
        if len(candidates) > 1:
            candidates = self._preferred(candidates, rolling, slots)
        return self._round_robin(candidates)

    def _below_maximum(self, name: str, rolling: int) -> bool:
        most = self.sources[name].max_concurrency
        return most is None or rolling == 0 or rolling + self._group_size <= most

    def _preferred(self, candidates: list[str], rolling: Mapping[str, int], slots: int | None) -> list[str]:
        """Those below their minimum, else those not far above their share, else all."""
        hungry = [n for n in candidates if rolling.get(n, 0) < self.sources[n].min_concurrency]
        if hungry or slots is None:
            return hungry or candidates
        shares = self.shares()
        room = {n: max(SHARE_SLACK * shares[n] * slots, self._group_size) for n in candidates}
        return [n for n in candidates if rolling.get(n, 0) < room[n]] or candidates

    def _round_robin(self, candidates: Sequence[str]) -> str | None:
        weights = {n: self.weight(n) for n in candidates}
        total = sum(weights.values())
        if total <= 0.0:
            return None
        for name, weight in weights.items():
            self.sources[name].credit += weight
        best = max(candidates, key=lambda n: self.sources[n].credit)
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

    # ---- what happened ----------------------------------------------------------------------------------------------

    def observe(self, name: str, *, accepted: bool, time_s: float | None) -> None:
        """A group of this source is ready (accepted) or ended without being trainable. `time_s`: mean effective time of
        its rollouts, None if it is not known (a resume brought them back)."""
        s = self.sources[name]
        s.accepted_seen += 1
        s.acceptance += self._gain(s, s.accepted_seen) * (float(accepted) - s.acceptance)
        s.acceptance = max(s.acceptance, LEAST_ACCEPTANCE)
        if time_s is not None:
            s.times_seen += 1
            s.time_s += self._gain(s, s.times_seen) * (time_s - s.time_s)
        s.ended_total += 1
        if accepted:
            s.accepted += 1
            s.accepted_total += 1
            s.barren = 0
        else:
            s.barren += 1
        self._budgets = None

    @staticmethod
    def _gain(s: SourceState, seen: int) -> float:
        """Weight of the newest observation: a running mean with the prior, until the window is full."""
        return max(1.0 / max(SHORTEST_WINDOW, 2 * s.quota), 1.0 / (PRIOR_WEIGHT + seen))

    def stale(self, name: str, *, ready: bool) -> None:
        """A group grew too old. `ready`: it had been accepted, and no longer counts for the step."""
        s = self.sources[name]
        s.barren += 1
        if ready:
            s.accepted -= 1

    def lost(self, name: str) -> None:
        """An accepted group is gone through no fault of its source, and no longer counts for the step."""
        self.sources[name].accepted -= 1

    def returned(self) -> None:
        """The step that took its quotas did not happen: `consumed` undone."""
        for s in self.sources.values():
            s.accepted += s.quota

    def consumed(self) -> None:
        """A step took its quotas; what is left counts for the next one (M6.3)."""
        for s in self.sources.values():
            s.accepted -= s.quota

    def trained(self, name: str) -> None:
        """A group of this source was trained on."""
        self.sources[name].trained_total += 1
        self.sources[name].barren = 0

    def starved(self, name: str) -> bool:
        """Whether so many groups in a row came to nothing that only probes of the source are sampled."""
        return self.sources[name].barren >= self._starve_after

    # ---- figures and state ------------------------------------------------------------------------------------------

    def scalars(self, rolling: Mapping[str, int]) -> dict[str, float]:
        """Metrics `mixer/<source>/...`; shares count from the start of the run."""
        out: dict[str, float] = {}
        kinds = ("dispatched", "accepted", "trained")
        totals = {kind: sum(getattr(s, f"{kind}_total") for s in self.sources.values()) for kind in kinds}
        budgets = self.oversampling()
        for name, s in self.sources.items():
            for kind, total in totals.items():
                if total:
                    out[f"mixer/{name}/{kind}_share"] = getattr(s, f"{kind}_total") / total
            out[f"mixer/{name}/acceptance"] = s.acceptance
            out[f"mixer/{name}/time_s"] = s.time_s
            out[f"mixer/{name}/need"] = s.need
            out[f"mixer/{name}/concurrency"] = float(rolling.get(name, 0))
            out[f"mixer/{name}/starved"] = float(self.starved(name))
            if math.isfinite(budgets[name]):
                out[f"mixer/{name}/oversampling"] = budgets[name]
        return out

    def state(self, pending: Mapping[str, list[int]]) -> dict[str, Any]:
        """JSON state for a checkpoint. `pending`: dispatched tasks that a resume must sample again."""
        out = {name: asdict(s) for name, s in self.sources.items()}
        for name, s in out.items():
            s["again"] = sorted({*s["again"], *pending.get(name, [])})
            s["accepted"] = 0
            s["credit"] = 0.0
        return out

    def restore(self, state: Mapping[str, Any], kept: Mapping[str, Collection[int]] | None = None) -> None:
        """Take over estimates and stream positions of a checkpoint; settings stay those of the configuration.

        `kept`: tasks whose groups the ledger brings back, which are therefore not sampled again. What was dispatched
        after the checkpoint and is not among them is.
        """
        for name, s in self.sources.items():
            if name in state:
                settings = {key: getattr(s, key) for key in _SETTINGS}
                s = self.sources[name] = SourceState(**{**state[name], **settings})
            living = set((kept or {}).get(name, ()))
            reached = max([s.next_index, *(index + 1 for index in living)])
            s.again = sorted({*s.again, *range(s.next_index, reached)} - living)
            s.next_index = reached
        self._budgets = None


def oversampling_budgets(times_s: Sequence[float], needs: Sequence[float], config: OversamplingConfig) -> list[float]:
    """p_i = clip(c t_i - 1, p_min, p_max) with the one c for which sum(m_i p_i) / sum(m_i) = p_bar (M6.1).

    The mean rises with c and is linear between the points where a p_i enters or leaves its range, so c is found there.
    """

    def budgets(c: float) -> list[float]:
        return [min(max(c * t - 1.0, config.min), config.max) for t in times_s]

    def mean(c: float) -> float:
        return sum(m * p for m, p in zip(needs, budgets(c), strict=True)) / sum(needs)

    if not times_s:
        return []
    corners = sorted((1.0 + edge) / t for t in times_s for edge in (config.min, config.max))
    low = corners[0]
    for high in corners:
        if mean(high) >= config.mean:
            rise = mean(high) - mean(low)
            return budgets(low + (high - low) * (config.mean - mean(low)) / rise if rise > 0.0 else high)
        low = high
    return budgets(corners[-1])
