"""Groups a minute of the graders of a configuration, as many at once as they have slots."""

from __future__ import annotations

import time

from infra.errors import ConfigError
from infra.pool import ActorPool
from orchestrator.bench.figures import Figure, Options, figure, percentile
from orchestrator.trust import GroupResult

GROUPS = 8
"""Groups of one repetition; each has groups of its own, which no prefix cache has seen."""


def run(options: Options) -> list[Figure]:
    """Built-in canaries through the real graders. Raises ConfigError where the configuration has none."""
    from grader.canary import builtin_canaries
    from orchestrator.grading import default_order_seed, grade_groups, gradings_of, with_graders
    from orchestrator.progress import Progress

    config = options.load()
    if config.grader is None:
        raise ConfigError(f"{options.config}: grader = null: give --config a configuration with a grader")
    timeout_s, slots = config.grader.timeout_s, config.grader.workers * config.grader.groups_per_worker
    supply = builtin_canaries(0, config.algorithm.rubric)
    todo = iter(map(supply, range(1 + GROUPS * options.times(3))))
    rates: list[float] = []
    latencies: list[float] = []

    async def work(pool: ActorPool) -> None:
        for repetition in range(1 + options.times(3)):
            results: list[GroupResult] = []
            start_s = time.perf_counter()
            await grade_groups(
                pool,
                [next(todo) for _ in range(GROUPS if repetition else 1)],  # the first one warms the engine up
                lambda g: gradings_of(g, default_order_seed(config, g.group_id), repeat=1, permute=False),
                concurrency=slots,
                timeout_s=timeout_s,
                setup="",
                on_result=results.append,
            )
            if repetition:
                rates.append(60 * len(results) / (time.perf_counter() - start_s))
                latencies.append(percentile([g.reply.run_s for r in results for g in r.gradings], 0.5))

    progress = Progress(0, config.telemetry.progress_every_s)
    with_graders(config, progress, work)
    progress.close()
    return [figure(f"groups, {slots} at once", "1/min", rates), figure("one grading, median", "s", latencies)]
