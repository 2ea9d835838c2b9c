"""What the watchdog says of a training run: what its loops wait for, and the pools behind that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import SchedulerConfig
from infra.pool import ActorPool
from infra.waits import Waits
from infra.watchdog import PoolReport, Watchdog
from orchestrator.ledger import Stage
from orchestrator.parts import Parts
from orchestrator.progress import Activity

if TYPE_CHECKING:
    from orchestrator.loop import Scheduler

LEAVE_S = 120.0
"""What a run that ends for itself gets to shut its parts down: W&B alone may take a minute."""

WAITS_FOR: dict[Activity, str] = {
    "learning": "the learner's ranks: an optimiser step",
    "publishing": "the learner's ranks and the engines: new weights",
    "checkpointing": "the learner's ranks and the disk: a checkpoint",
}
"""Whom training waits for while it does something."""


def bounds(scheduler: Scheduler) -> str:
    """What may keep the next group out."""
    limit = scheduler.config.scheduler.max_inflight_groups
    slots = scheduler.rollouts.slots
    return f"{scheduler.ledger.inflight} of {limit} groups in flight, {slots.taken} of {slots.size} rollout slots taken"


def missing(scheduler: Scheduler) -> str:
    """What the next batch lacks."""
    quotas = scheduler.mixer.quotas.items()
    ready = ((name, scheduler.ledger.count(Stage.READY, name), n) for name, n in quotas)
    return ", ".join(f"{name} {have} of {n}" for name, have, n in ready if have < n) or "none is missing"


def make_watchdog(
    run_dir: Path, config: SchedulerConfig, *, say: Callable[[str], None], ended: Callable[[str], None]
) -> Watchdog:
    """The watchdog of a run, not started; `say` prints, `ended` writes the run's state down."""
    return Watchdog(
        run_dir,
        Waits(),
        stall_after_s=config.stall_after_s,
        abort_after_s=config.abort_after_s,
        say=say,
        ended=ended,
        leave_s=LEAVE_S,
    )


def pool_reports(parts: Parts) -> Sequence[PoolReport]:
    """All pools of a run, as they are now."""
    pools = [parts.rollout] if parts.grader is None else [parts.rollout, parts.grader]
    return [*(report_of(pool) for pool in pools), *_engines(parts)]


def report_of(pool: ActorPool) -> PoolReport:
    """One pool."""
    state, oldest = pool.state(), pool.oldest_call()
    sizes = (
        f"{state.live} live, {state.starting} starting, {state.draining} draining; "
        f"{state.busy} of {state.slots} slots busy, {pool.waiting} calls wait"
    )
    if pool.waiting:
        sizes += f" (the oldest since {pool.queue_s():.0f} s)"
    if oldest is None:
        return PoolReport(name=pool.name, sizes=sizes)
    return PoolReport(
        name=pool.name,
        sizes=sizes,
        actor=oldest.actor,
        method=oldest.method,
        age_s=oldest.age_s,
        actor_id=oldest.actor_id,
    )


def _engines(parts: Parts) -> Iterator[PoolReport]:
    """What an engine is asked is known to the workers that ask."""
    state = parts.engines.state()
    yield PoolReport(name="engine", sizes=f"{state.live} live, {state.starting} starting, {state.draining} draining")
