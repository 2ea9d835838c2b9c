"""How fast groups are graded: groups a minute and latency at several concurrencies, in one run of the real parts.

    python -m tests.bench.grading [--config configs/quickstart.yaml] [--groups 16] [--at 1,4,8] [KEY=VALUE ...]

Every concurrency gets groups of its own, so that none profits from prompts that an engine has seen before. No test runs
this: it measures time.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from configs.check import load_run
from grader.canary import builtin_canaries
from infra.pool import ActorPool
from orchestrator.grading import default_order_seed, grade_groups, gradings_of, with_graders
from orchestrator.progress import Progress
from orchestrator.trust import GroupResult


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.yaml"))
    parser.add_argument("--groups", type=int, default=16, help="groups at each concurrency")
    parser.add_argument("--at", default="1,4,8", help="concurrencies, separated by commas")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    levels = [int(level) for level in given.at.split(",")]
    slots = [f"grader.groups_per_worker={max(levels)}", "grader.workers=1"]
    config = load_run(given.config, [*slots, *given.overrides]).config
    assert config.grader is not None
    timeout_s = config.grader.timeout_s
    supply = builtin_canaries(0, config.algorithm.rubric)
    total = 1 + given.groups * len(levels)
    groups = [supply(number) for number in range(total)]
    progress = Progress(0, config.telemetry.progress_every_s)
    measured: list[tuple[int, float, list[GroupResult]]] = []

    async def work(pool: ActorPool) -> None:
        todo = iter(groups)
        for level, count in [(1, 1), *((level, given.groups) for level in levels)]:  # one group warms the engine up
            results: list[GroupResult] = []
            start_s = time.monotonic()
            await grade_groups(
                pool,
                [next(todo) for _ in range(count)],
                lambda g: gradings_of(g, default_order_seed(config, g.group_id), repeat=1, permute=False),
                concurrency=level,
                timeout_s=timeout_s,
                setup="",
                on_result=results.append,
            )
            measured.append((level, time.monotonic() - start_s, results))
            progress.event(f"{count} groups, {level} at once: {measured[-1][1]:.1f} s")

    try:
        with_graders(config, progress, work)
    finally:
        progress.close()
        print_table(measured[1:], given.groups)


def print_table(measured: list[tuple[int, float, list[GroupResult]]], groups: int) -> None:
    """One row a concurrency."""
    title = f"{groups} groups at each concurrency, {platform.machine()}, load and cores of this machine as they are"
    table = Table(title=title, title_justify="left")
    for name in (
        "at once",
        "groups a minute",
        "p50 s",
        "p95 s",
        "answers",
        "tokens read",
        "tokens written",
        "fallbacks",
    ):
        table.add_column(name, justify="right")
    for level, wall_s, results in measured:
        replies = [g.reply for r in results for g in r.gradings]
        p50, p95 = np.percentile([reply.run_s for reply in replies], [50, 95])
        table.add_row(
            str(level),
            f"{60 * len(results) / wall_s:.1f}",
            f"{p50:.1f}",
            f"{p95:.1f}",
            f"{np.mean([reply.turns for reply in replies]):.1f}",
            f"{np.mean([reply.prompt_tokens for reply in replies]):,.0f}",
            f"{np.mean([reply.completion_tokens for reply in replies]):,.0f}",
            str(sum(reply.grade is None for reply in replies)),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
