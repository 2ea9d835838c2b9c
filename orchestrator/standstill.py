"""What the watchdog says of a training run: its waits, and the pools behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from configs.schema import SchedulerConfig
from infra.pool import ActorPool
from infra.waits import Waits
from infra.watchdog import PoolReport, Watchdog
from orchestrator.parts import Parts

LEAVE_S = 120.0
"""What a run that ends for itself gets to shut its parts down: W&B alone may take a minute."""


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
