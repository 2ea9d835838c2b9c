"""How many decisions a second the mixer takes: which source is next, its task, and what came of it."""

from __future__ import annotations

import time

from configs.schema import MinirepoSource, SchedulerConfig, SourceBase
from orchestrator.bench.figures import Figure, Options, figure, timed
from orchestrator.mixer import Mixer

DECISIONS = 5_000


def run(options: Options) -> list[Figure]:
    """With 3 and with 12 sources; a decision has its observation, so that estimates and budgets are made anew."""
    figures = []
    for sources in (3, 12):
        rates = [DECISIONS / _cpu_s(sources) for _ in range(options.times(5))]
        figures.append(figure(f"decisions with {sources} sources", "1/CPU s", rates))
    return figures


def _cpu_s(sources: int) -> float:
    return timed(lambda: _decide(sources), clock=time.process_time)


def _decide(sources: int) -> None:
    config: dict[str, SourceBase] = {
        f"s{i}": MinirepoSource(
            type="minirepo", groups_per_step=8 + i, prior_acceptance=0.6 + 0.02 * i, prior_time_s=60.0 * (1 + i)
        )
        for i in range(sources)
    }
    mixer = Mixer.of(config, SchedulerConfig(), group_size=16)
    outstanding = dict.fromkeys(config, 0)
    for number in range(DECISIONS):
        source = mixer.choose(outstanding, 3, rolling={name: 16 * n for name, n in outstanding.items()}, slots=512)
        if source is None:  # a step takes its batch
            mixer.consumed()
            outstanding = dict.fromkeys(config, 0)
            continue
        mixer.take_index(source)
        outstanding[source] += 1
        mixer.observe(source, accepted=number % 3 > 0, time_s=100.0)
