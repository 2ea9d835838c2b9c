"""Groups a minute and the latency of a grading with 1, 4 and 8 groups at once, in one run of the real graders."""

from __future__ import annotations

import time

from infra.errors import ConfigError
from infra.pool import ActorPool
from orchestrator.bench.figures import Figure, Options, figure, percentile
from orchestrator.trust import GroupResult

GROUPS = 16
"""Groups of one repetition; each has groups of its own, which no prefix cache has seen."""
AT_ONCE = (1, 4, 8)


def run(options: Options) -> list[Figure]:
    """Built-in canaries through the configuration's graders, with as many slots as the last level asks for.

    Raises:
        ConfigError: the configuration has no grader.
    """
    from grader.canary import builtin_canaries
    from orchestrator.grading import default_order_seed, grade_groups, gradings_of, with_graders
    from orchestrator.progress import Progress

    config = options.load()
    if config.grader is None:
        raise ConfigError(f"{options.config}: grader = null: give --config a configuration with a grader")
    grader = config.grader.model_copy(update={"workers": 1, "groups_per_worker": max(AT_ONCE)})
    config = config.model_copy(update={"grader": grader})
    supply = builtin_canaries(0, config.algorithm.rubric)
    times = options.times(2)
    todo = iter(map(supply, range(1 + GROUPS * len(AT_ONCE) * times)))
    rates: dict[int, list[float]] = {level: [] for level in AT_ONCE}
    latencies: dict[int, list[float]] = {level: [] for level in AT_ONCE}

    async def grade(pool: ActorPool, count: int, level: int) -> list[GroupResult]:
        results: list[GroupResult] = []
        await grade_groups(
            pool,
            [next(todo) for _ in range(count)],
            lambda g: gradings_of(g, default_order_seed(config, g.group_id), repeat=1, permute=False),
            concurrency=level,
            timeout_s=grader.timeout_s,
            setup="",
            on_result=results.append,
        )
        return results

    async def work(pool: ActorPool) -> None:
        await grade(pool, 1, 1)  # warms the engine up
        for _ in range(times):
            for level in AT_ONCE:
                start_s = time.perf_counter()
                results = await grade(pool, GROUPS, level)
                rates[level].append(60 * len(results) / (time.perf_counter() - start_s))
                latencies[level] += [g.reply.run_s for r in results for g in r.gradings]

    progress = Progress(0, config.telemetry.progress_every_s)
    with_graders(config, progress, work)
    progress.close()
    figures: list[Figure] = []
    for level in AT_ONCE:
        figures.append(figure(f"groups, {level} at once", "1/min", rates[level]))
        for share in (0.5, 0.95):
            name = f"one grading, {level} at once, p{round(100 * share)}"
            figures.append(figure(name, "s", [percentile(latencies[level], share)]))
    return figures
