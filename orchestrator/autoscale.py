"""How large a pool should be, from its queue and its occupancy. Pure; docs/scaling.md explains the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from configs.schema import AutoscaleConfig

FULL = 0.9
"""A pool grows only while this share of its slots is in use: a queue before idle workers waits for something else."""
ROOM = 0.8
"""A pool shrinks only to a size at which at most this share of its slots would have been in use."""
QUIET = 0.25
"""A queue below this share of the target is short. Between it and the target nothing changes."""
PRESSED_S = 5.0
"""How long a queue must be too long before the pool grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool at one moment."""

    size: int
    """Actors it was told to have."""
    settled: bool
    """It has them, and nothing starts or drains."""
    slots_per_actor: int
    busy: int
    """Slots in use."""
    slots: int
    """Slots of live actors."""
    queue_s: float
    """How long the oldest piece of work has waited for a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """What the policy remembers of a pool. Times are of the clock that `policy` is given."""

    changed_s: float
    """Last change of size."""
    pressed_since_s: float | None = None
    calm_since_s: float | None = None
    peak_busy: int = 0
    """Most slots in use since it is calm."""


def policy(view: PoolView, trend: Trend, limits: AutoscaleConfig, cooldown_s: float, now_s: float) -> tuple[int, Trend]:
    """The size that the pool should have now, and what to remember.

    Grows when the queue has been above its target for PRESSED_S with full workers: in proportion to the excess, at most
    to twice the size. Shrinks when the queue has been short for `cooldown_s` and the busiest moment of that time
    would have left room in a smaller pool: at most to half. Either way not before `cooldown_s` after the last change,
    and never while actors start or drain. A size outside the limits is mended at once.
    """
    inside = min(max(view.size, limits.min), limits.max)
    if inside != view.size:
        return inside, Trend(changed_s=now_s)
    trend = _remember(view, trend, limits, now_s)
    if not view.settled or now_s - trend.changed_s < cooldown_s:
        return view.size, trend
    size = view.size
    if trend.pressed_since_s is not None and now_s - trend.pressed_since_s >= PRESSED_S:
        size = min(limits.max, math.ceil(view.size * min(2.0, view.queue_s / limits.target_queue_s)))
    elif trend.calm_since_s is not None and now_s - trend.calm_since_s >= cooldown_s:
        needed = math.ceil(trend.peak_busy / (view.slots_per_actor * ROOM))
        size = min(view.size, max(limits.min, needed, math.ceil(view.size / 2)))
    return size, trend if size == view.size else Trend(changed_s=now_s)


def _remember(view: PoolView, trend: Trend, limits: AutoscaleConfig, now_s: float) -> Trend:
    if view.queue_s > limits.target_queue_s and view.busy >= FULL * view.slots:
        since_s = trend.pressed_since_s
        return Trend(changed_s=trend.changed_s, pressed_since_s=now_s if since_s is None else since_s)
    if view.queue_s <= QUIET * limits.target_queue_s:
        if trend.calm_since_s is None:
            return Trend(changed_s=trend.changed_s, calm_since_s=now_s, peak_busy=view.busy)
        return replace(trend, peak_busy=max(trend.peak_busy, view.busy))
    return Trend(changed_s=trend.changed_s)
