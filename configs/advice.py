"""What about a configuration runs, but wastes what it asks for. Unlike `configs.rules`, nothing here refuses it.

Each piece of advice is a function that yields problems; `ADVICE` is the whole list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from configs.problems import Problem, show
from configs.schema import AdvantageMode, RunConfig


def inflight(config: RunConfig) -> Iterator[Problem]:
    """The bound on groups in flight leaves room for all that the pools and the batch in the learner hold at once.

    A group holds its place until its slowest trajectory has ended, when most of its slots serve others already: twice
    slots / group_size. More than the bounds on staleness and oversampling (M6.1, M6.4) let live is never used.
    """
    scheduler, rollout, size = config.scheduler, config.rollout, config.algorithm.group_size
    slots = rollout.workers * rollout.slots_per_worker
    graded = config.grader is not None and config.algorithm.mode is not AdvantageMode.OUTCOME
    graders = config.grader.workers * config.grader.groups_per_worker if config.grader is not None and graded else 0
    active = [source for source in config.sources.values() if source.groups_per_step > 0]
    batch = sum(source.groups_per_step for source in active)
    steps = scheduler.staleness + 1.0
    if scheduler.oversampling is not None:
        steps = min(steps, 1.0 + scheduler.oversampling.mean)
    live = sum(math.ceil(steps * source.groups_per_step / source.prior_acceptance) for source in active)
    wanted = min(math.ceil(2 * slots / size) + graders + batch, live)
    if scheduler.max_inflight_groups < wanted:
        yield Problem(
            path=("scheduler", "max_inflight_groups"),
            message=f"may leave pools idle: {slots} rollout slots with groups of {size}, {graders} grader slots and a "
            f"batch of {batch} groups can hold {wanted} groups at once; raise it to {wanted}, or rent smaller pools",
            shown=show(scheduler.max_inflight_groups),
        )


ADVICE: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (inflight,)


def find_advice(config: RunConfig) -> list[Problem]:
    """What would make this configuration use what it asks for; empty if there is nothing to say."""
    return [problem for advice in ADVICE for problem in advice(config)]
