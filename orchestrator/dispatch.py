"""Which source the next group comes from, under every bound on what is under way (docs/scheduling.md). Pure.

mixer (need, staleness, whose turn) + admission (slots, engines, KV caches) + ledger (what lives) -> source, or none
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from configs.schema import RunConfig
from orchestrator.admission import Admission
from orchestrator.ledger import Ledger, Stage
from orchestrator.mixer import Mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What the scheduler is doing when it asks."""

    step: int
    """Optimiser steps done."""
    training: bool
    """A step is running, or its weights are on their way to the engines."""
    slots: int
    """Rollouts that may run at once."""
    graded: int
    """Groups that the graders have."""
    graders_full: bool
    """So many groups wait for a grader that no more of those to be graded should come."""
    probed: Collection[str] = frozenset()
    """Sources of which too many rollouts are lost: only probes of them are sampled, under no other bound, since what is
    ready must not keep the run from learning that they come through again."""


class Dispatcher:
    """Chooses sources. Asked until it answers None; asked again when anything moved."""

    def __init__(
        self, *, config: RunConfig, ledger: Ledger, mixer: Mixer, admission: Admission, graded: Collection[str]
    ) -> None:
        """`graded`: sources whose groups go to the graders."""
        self._limits = config.scheduler
        self._steps = config.steps
        self._group_size = config.algorithm.group_size
        self._ledger = ledger
        self._mixer = mixer
        self._admission = admission
        self._graded = frozenset(graded)

    def next_source(self, now: Moment) -> str | None:
        """The bound on staleness is structural: no more groups live than the steps train that may train on them, the
        running one included. Without asynchronous training that is the step being collected, and no other."""
        limits = self._limits
        for name in sorted(now.probed):
            # Trajectories, not groups: a group that hangs on its last one must not stand for a probe.
            if self._ledger.rolling().get(name, 0) < limits.starve_probes * self._group_size:
                return name
        if now.graded and not limits.overlap:
            return None
        if self._ledger.inflight >= limits.max_inflight_groups or (now.training and not limits.asynchronous):
            return None
        rolling = self._ledger.rolling()
        if self._admission.full(rolling, now.slots) is not None:
            return None
        closed = self._admission.closed(rolling) | set(now.probed)
        if now.graders_full:
            closed |= self._graded
        steps = min(limits.staleness + 1, self._steps - now.step)
        outstanding = {name: self._outstanding(name, now.step) for name in self._mixer.sources}
        return self._mixer.choose(outstanding, steps, rolling=rolling, slots=now.slots, closed=closed)

    def _outstanding(self, source: str, step: int) -> int:
        """Groups of a source that hold a place under the bound on staleness: all that live.

        But of a source that starves what is ready holds none while its quota is not met, or no probe would ever start.
        And without overlap nothing is sampled beyond what the step still misses: a group that came through stands for
        the 1 / r_i that were sampled to get it.
        """
        ledger, state = self._ledger, self._mixer.sources[source]
        rolling, grading, ready = (ledger.count(stage, source) for stage in Stage)
        if self._mixer.starved(source) and ready < state.quota:
            return rolling + grading
        if self._limits.overlap:
            return ledger.outstanding(source, oldest=step - self._limits.staleness)
        return rolling + math.ceil((grading + ready) / state.acceptance)
