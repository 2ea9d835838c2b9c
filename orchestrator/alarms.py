"""Rolling figures of the graders, and the alarms on them and on the supply of groups (M7). Pure: no clock, no files.

docs/metrics.md explains each name. After a resume the canaries go on from canaries.jsonl; the window over groups
starts anew.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from configs.schema import GraderConfig
from grader.verdict import NO_VERDICT, FallbackReason
from orchestrator.mixer import Mixer

ENDS_AT = 0.8
"""An alarm that is on ends when what is wrong has fallen to this part of its threshold: a figure that stays at the
threshold would begin and end one with every group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm that began or ended."""

    name: str
    """`alarm/<name>` is its metric."""
    on: bool
    text: str
    """What a person should know, in one line."""


class GraderWatch:
    """The last graded groups and canaries. Tells of each change of an alarm once."""

    def __init__(self, config: GraderConfig, past: Sequence[Mapping[str, Any]] = ()) -> None:
        """`past`: lines of canaries.jsonl from before a resume."""
        self._config = config
        self._groups: deque[FallbackReason | None] = deque(maxlen=config.alarms.window)
        self._canaries: deque[Mapping[str, Any]] = deque(past, maxlen=config.canaries.window)
        self._on: set[str] = set()

    def group(self, reason: FallbackReason | None) -> list[Alarm]:
        """A group was graded, or fell back for a reason; returns the alarms that this begins or ends."""
        self._groups.append(reason)
        return self._changes()

    def canary(self, line: Mapping[str, Any]) -> list[Alarm]:
        """A canary was graded, as its line says; returns the alarms that this begins or ends."""
        self._canaries.append(line)
        return self._changes()

    @property
    def alarms(self) -> tuple[str, ...]:
        """Names of the alarms that are on."""
        return tuple(sorted(self._on))

    def scalars(self) -> dict[str, float]:
        """The figures now, by metric name; what has no data has no key."""
        out: dict[str, float] = {}
        on = {name: float(on) for name, on, _ in self._states()}
        if self._groups:
            out["grader/fallback_rate"] = self._fallbacks / len(self._groups)
            out["alarm/fallback_rate"] = on["fallback_rate"]
        _put(out, "grader/validity_rate", validity(list(self._groups)))
        if self._canaries:
            reasons = [line["fallback_reason"] for line in self._canaries]
            _put(out, "canary/tier_agreement", self._mean("tier_agreement"))
            _put(out, "canary/kendall_tau_b", self._mean("kendall_tau_b"))
            _put(out, "canary/validity_rate", validity([r and FallbackReason(r) for r in reasons]))
            out["alarm/canary_agreement"] = on["canary_agreement"]
        return out

    @property
    def _fallbacks(self) -> int:
        return sum(reason is not None for reason in self._groups)

    def _mean(self, key: str) -> float | None:
        values = [line[key] for line in self._canaries if line[key] is not None]
        return fmean(values) if values else None

    def _changes(self) -> list[Alarm]:
        changes = [Alarm(name=n, on=on, text=text) for n, on, text in self._states() if on != (n in self._on)]
        for alarm in changes:
            (self._on.add if alarm.on else self._on.discard)(alarm.name)
        return changes

    def _states(self) -> Iterator[tuple[str, bool, str]]:
        """Every alarm: its name, whether it is on, and what to say about that."""
        yield "fallback_rate", *self._fallback_rate()
        yield "canary_agreement", *self._canary_agreement()

    def _most(self, name: str, threshold: float) -> float:
        """How much of what is wrong leaves an alarm off, or ends it."""
        return threshold * (ENDS_AT if name in self._on else 1.0)

    def _fallback_rate(self) -> tuple[bool, str]:
        """On as soon as the rest of the window could not bring the share down: a dead grader is told of early."""
        limit, fallbacks = self._config.alarms, self._fallbacks
        said = f"{fallbacks} of the last {len(self._groups)} groups fell back to outcome advantages"
        if fallbacks <= self._most("fallback_rate", limit.fallback_above * limit.window):
            return False, said
        reasons = Counter(r.value for r in self._groups if r is not None).most_common(3)
        counts = ", ".join(f"{name} {n}" for name, n in reasons)
        return True, f"{said} ({counts}); grader.detail in groups.jsonl says more"

    def _canary_agreement(self) -> tuple[bool, str]:
        share, below = self._mean("tier_agreement"), self._config.canaries.alarm_below
        if share is None:  # nothing can be said of agreement, so the alarm stays as it is
            return "canary_agreement" in self._on, "no canary got a valid verdict"
        said = f"{share:.0%} of the tiers in the last {len(self._canaries)} canaries are right"
        most = self._most("canary_agreement", 1.0 - below)
        if 1.0 - share <= most or len(self._canaries) < self._config.canaries.window:
            return False, said
        return True, f"{said}, below grader.canaries.alarm_below = {below:g}; canaries.jsonl has each verdict"


class SupplyWatch:
    """Which sources starve: nothing of them can be trained on. Tells of each change once."""

    def __init__(self, mixer: Mixer) -> None:
        self._mixer = mixer
        self._on: set[str] = set()

    @property
    def alarms(self) -> tuple[str, ...]:
        """Names of the alarms that are on."""
        return tuple(f"starved/{source}" for source in sorted(self._on))

    def changes(self) -> list[Alarm]:
        """The alarms that what happened since the last call begins or ends."""
        out = []
        for source, s in self._mixer.sources.items():
            on = self._mixer.starved(source)
            if on == (source in self._on):
                continue
            (self._on.add if on else self._on.discard)(source)
            text = (
                f"none of the last {s.barren} groups of {source} could be trained on (groups.jsonl says why); only "
                "probes of it are sampled until one can, and no step ends without its quota"
                if on
                else f"a group of {source} can be trained on again; it is sampled as before"
            )
            out.append(Alarm(name=f"starved/{source}", on=on, text=text))
        return out


def validity(reasons: Sequence[FallbackReason | None]) -> float | None:
    """Share of the verdicts that were valid (M2.6), given how each grading ended; None without any verdict."""
    verdicts = [reason for reason in reasons if reason not in NO_VERDICT]
    return sum(reason is None for reason in verdicts) / len(verdicts) if verdicts else None


def _put(out: dict[str, float], name: str, value: float | None) -> None:
    if value is not None:
        out[name] = value
