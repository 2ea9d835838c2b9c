"""How long a sandbox of a configuration takes to start, and a command in it to come back."""

from __future__ import annotations

import asyncio
import time

from configs.schema import JailSandbox, SandboxConfig
from envs.sandbox import make_provider
from orchestrator.bench.figures import Figure, Options, figure, percentile

COMMANDS = 20


def run(options: Options) -> list[Figure]:
    """Starts one after the other, as new ones and (jail) on servers that were used before; `true` in each."""
    config = options.load().rollout.sandbox
    times = options.times(20)
    kinds: list[tuple[str, SandboxConfig]] = [("", config)]
    if isinstance(config, JailSandbox):
        kinds = [
            ("new server, ", config.model_copy(update={"reuse_servers": False})),
            ("used server, ", config.model_copy(update={"reuse_servers": True})),
        ]
    figures = []
    for kind, settings in kinds:
        starts, commands, closes = asyncio.run(_measure(settings, times))
        figures += [
            figure(f"{kind}start", "ms", starts),
            figure(f"{kind}start, p95 of them", "ms", [percentile(starts, 0.95)]),
            figure(f"{kind}command, median in a sandbox", "ms", commands),
            figure(f"{kind}close", "ms", closes),
        ]
    return figures


async def _measure(config: SandboxConfig, times: int) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of each start, the median of the commands of each sandbox, and each close, in which a server that
    will be used again is emptied."""
    provider = make_provider(config)
    starts, commands, closes = [], [], []
    try:
        for repetition in range(times + 1):  # the first one loads what the others share
            start_s = time.perf_counter()
            sandbox = await provider.start()
            start_ms = 1000 * (time.perf_counter() - start_s)
            latencies = []
            for _ in range(COMMANDS):
                start_s = time.perf_counter()
                await sandbox.run("true", timeout_s=60.0)
                latencies.append(1000 * (time.perf_counter() - start_s))
            start_s = time.perf_counter()
            await sandbox.close()
            if repetition:
                starts.append(start_ms)
                commands.append(percentile(latencies, 0.5))
                closes.append(1000 * (time.perf_counter() - start_s))
    finally:
        await provider.close()
    return starts, commands, closes
