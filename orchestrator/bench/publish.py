"""How long new weights take to every engine of a configuration, against a copy of as many bytes in memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from orchestrator.bench.figures import Figure, Options, figure, ratios

if TYPE_CHECKING:
    from learner.rank import RankCore


def run(options: Options) -> list[Figure]:
    """Starts the engines and the learner of --config, and publishes while nothing else runs there."""
    from orchestrator.build import ray_session, run_loop

    config = options.load()
    times = options.times(10)

    async def go() -> list[Figure]:
        from learner.group import LearnerGroup
        from rollout.engine_pool import EnginePool

        engines = EnginePool(config.engine, name="policy", seed=config.seed)
        learner = LearnerGroup(config.learner, config.loss, config.rollout.sampling.temperature)
        try:
            engines.start()
            learner.start()
            await learner.ready()
            await engines.ready()
            await learner.publish(engines, 1)  # sets the transfer up
            published, copied = [], []
            size_mb = 0.0
            for version in range(2, 2 + times):
                start_s = time.perf_counter()
                await learner.publish(engines, version)
                published.append(1000 * (time.perf_counter() - start_s))
                ranks = await learner.on_ranks(_copy)
                copied.append(1000 * max(seconds for seconds, _ in ranks))
                size_mb = ranks[0][1] / 1e6
        finally:
            await engines.shutdown()
            learner.shutdown()
        publish = figure(f"publish {size_mb:.1f} MB to {config.engine.replicas} engine(s)", "ms", published)
        copy = figure("memory copy of them", "ms", copied)
        return [publish, copy, ratios("publish over copy", publish, copy)]

    with ray_session(config):
        figures: list[Figure] = run_loop(go())
    return figures


def _copy(core: RankCore) -> tuple[float, int]:
    """Runs on a rank: seconds and bytes of copying every parameter into CPU memory. Gathering them is not counted."""
    seconds, size = 0.0, 0
    for _, parameter in core.named_full_parameters():
        start_s = time.perf_counter()
        copy: Any = parameter.detach().to("cpu", copy=True)
        seconds += time.perf_counter() - start_s
        size += copy.numel() * copy.element_size()
    return seconds, size
