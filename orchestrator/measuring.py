"""Held-out evaluations of a run that trains: before, after, and beside its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from configs.schema import RunConfig
from infra.pool import ActorPool
from infra.sinks import JsonlFile
from infra.storage import Storage
from orchestrator.evaluate import Evaluated, keep_evaluation, run_evaluation
from orchestrator.evaluation import EVALUATIONS
from orchestrator.progress import Progress

BESIDE_SHARE = 0.25
"""Of the rollout slots, for an evaluation beside the training."""


class Measuring:
    """The evaluations of one run. Each is a line of eval.jsonl, and kept in the folder `evaluations`."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        storage: Storage,
        progress: Progress,
        moved: Callable[[], None],
    ) -> None:
        self._config = config
        self._folder = run_dir / EVALUATIONS
        self._lines = JsonlFile(run_dir / "eval.jsonl", sync=True, storage=storage)
        self._storage = storage
        self._progress = progress
        self._moved = moved
        self._beside: asyncio.Task[None] | None = None
        self._fresh: dict[str, float] = {}

    async def measure(self, label: str, step: int, rollout: ActorPool, *, concurrency: int | None = None) -> None:
        """Evaluate what the engines have now."""
        settings = self._config.eval
        assert settings is not None
        found = await run_evaluation(
            self._config,
            settings,
            label,
            step,
            rollout,
            self._progress,
            keep=self._keep,
            concurrency=concurrency,
            moved=self._moved,
        )
        record = found.evaluation.record()
        self._lines.append(record)
        names = {
            "pass_rate": "avg_at_k",
            "pass_at_k": "pass_at_k",
            "turns_mean": "turns",
            "response_tokens_mean": "response_tokens",
        }
        values = {name: record[key] for key, name in names.items()}
        tiers = record["known_tiers"]
        if isinstance(tiers, dict) and (told := sum(tiers.values())):
            values["known_tier1_share"] = tiers["T1"] / told
        self._fresh.update(
            (f"eval/{settings.source}/{name}", value) for name, value in values.items() if isinstance(value, float)
        )

    def beside(self, rollout: ActorPool) -> Callable[[int], None]:
        """What is told of every step: starts an evaluation where one is due, and returns at once. One that is due while
        the last one still runs is left out."""
        settings = self._config.eval

        def after_step(step: int) -> None:
            every = settings.every_steps if settings is not None else None
            if every is None or step % every or step >= self._config.steps:
                return
            if self._beside is not None and not self._beside.done():
                self._progress.event(
                    f"no evaluation after step {step}: the last one still runs; raise eval.every_steps"
                )
                return
            slots = max(int(rollout.occupancy()[1] * BESIDE_SHARE), 1)
            self._beside = asyncio.create_task(self.measure(f"step-{step:06d}", step, rollout, concurrency=slots))

        return after_step

    async def settle(self) -> None:
        """Wait for the evaluation that still runs. Raises what went wrong in it."""
        if self._beside is not None:
            await self._beside

    def stop(self) -> None:
        """Give up the evaluation that still runs."""
        if self._beside is not None:
            self._beside.cancel()

    def scalars(self) -> dict[str, float]:
        """Metrics of the evaluations that ended since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh

    def _keep(self, found: Evaluated) -> None:
        self._storage.insist(self._folder, lambda: keep_evaluation(self._folder, found))
