"""M6.4 in real time: rollouts that outlast weight updates, a learner slower than they are; read from groups.jsonl.

test_scheduling.py has the same under virtual time, where nothing is ever late; here what happens at once is up to the
machine, and the bound must hold whatever it does.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest
from scripted import Run, ScriptedLearner, ScriptedPool, run_config, trajectory

from configs.schema import RunConfig

STEPS = 25
SOURCES = {
    "code": {"type": "minirepo", "groups_per_step": 2, "prior_acceptance": 1.0},
    "sums": {"type": "arith", "groups_per_step": 1, "prior_acceptance": 1.0},
}


class Turns(ScriptedPool):
    """Rollouts of one to twelve turns; each turn's tokens carry the version that serves when it begins."""

    run: Run

    async def call(self, method: str, *args: Any, num_returns: int = 1, timeout_s: float | None = None) -> Any:
        task, trajectory_id, _ = args
        versions = set()
        self.busy += 1
        try:
            for _ in range(Random(trajectory_id).choice((1, 1, 2, 3, 12))):
                versions.add(self.run.learner.serving)  # type: ignore[attr-defined]
                await asyncio.sleep(0.004)
        finally:
            self.busy -= 1
        passed = Random(trajectory_id + "?").random() < 0.5
        made = trajectory(trajectory_id, task=task, passed=passed, versions=tuple(sorted(versions)))
        return made, [trajectory_id, None]


class SlowedLearner(ScriptedLearner):
    """A step takes longer than most groups; now and then much longer."""

    serving = 0

    async def train_step(self, items: Any) -> dict[str, float]:
        await asyncio.sleep(0.06 if len(self.batches) % 7 == 3 else 0.015)
        return await super().train_step(items)

    async def publish(self, engines: Any, version: int) -> float:
        await asyncio.sleep(0.002)  # requests in flight go on, under the old weights until here
        self.serving = version
        return await super().publish(engines, version)


def ages(tmp_path: Path, config: RunConfig) -> tuple[list[int], list[str]]:
    """Of every version of every trained trajectory, steps between it and the weights that were trained; outcomes."""
    run = Run(tmp_path, config, pool=Turns, learner=SlowedLearner(), grade_delay_s=0.003)
    run.rollout.run = run  # type: ignore[attr-defined]
    lines = run.go()
    run.ledger.check()
    trained = [g for g in lines if g["outcome"] == "trained"]
    assert len(trained) == 3 * STEPS
    return (
        [g["step"] - 1 - v for g in trained for t in g["trajectories"] for v in t["policy_versions"]],
        [g["outcome"] for g in lines],
    )


@pytest.mark.parametrize("stale", ["drop", "wait"])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_no_token_older_than_allowed_is_trained(tmp_path: Path, stale: str, max_staleness: int) -> None:
    scheduler = {"max_staleness": max_staleness, "stale": stale, "max_inflight_groups": 64}
    found, outcomes = ages(tmp_path, run_config(steps=STEPS, sources=SOURCES, scheduler=scheduler))
    assert min(found) >= 0 and max(found) <= max_staleness
    assert max(found) >= 1, "rollouts went on while the learner stepped"
    if stale == "wait":
        assert "dropped_stale" not in outcomes


def test_async_off_trains_current_tokens_only(tmp_path: Path) -> None:
    config = run_config(steps=STEPS, sources=SOURCES, scheduler={"async": False, "max_inflight_groups": 64})
    found, _ = ages(tmp_path, config)
    assert set(found) == {0}
