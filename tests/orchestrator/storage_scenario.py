"""A run of scripted parts on a disk of 1 MiB that fills up and is freed again; started by test_storage.py in a mount
namespace of its own: python storage_scenario.py FOLDER"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from scripted import Run, ScriptedLearner, run_config

from infra.storage import Storage
from orchestrator.checkpoint import Checkpoints
from orchestrator.ledger_store import LedgerStore

STEPS = 3


class HeavyLearner(ScriptedLearner):
    """Its state takes a good part of the disk."""

    async def save(self, path: Path) -> None:
        path.mkdir()
        (path / "state").write_bytes(b"s" * 200_000)


def fill(disk: Path) -> Path:
    """Take all that is left."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (65536, 4096, 512, 64, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return ballast


async def scenario(disk: Path) -> dict[str, Any]:
    run_dir = disk / "run"
    run_dir.mkdir()
    storage = Storage()
    store = LedgerStore(run_dir / "ledger.sqlite", run_dir / "rollouts", storage=storage)
    alarms: list[tuple[bool, str]] = []

    class Watched(Run):
        ballast: Path | None = None

        def on_step(self, scheduler: Any, record: Any, stats: Any) -> None:
            super().on_step(scheduler, record, stats)
            if scheduler.step == 1:
                self.ballast = fill(disk)

        def on_alarm(self, alarm: Any) -> None:
            alarms.append((alarm.on, alarm.text))

    config = run_config(steps=STEPS, checkpoint={"every_steps": 1}, scheduler={"abort_after_s": 60.0})
    run = Watched(run_dir, config, learner=HeavyLearner(), log=store, storage=storage, rollout_delay_s=0.01)
    running = asyncio.create_task(run.scheduler.run())
    while not run.scheduler.pauses.reasons().get("storage"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await asyncio.sleep(3.0)
    held = {
        "steps": list(run.steps),
        "batches": len(run.learner.batches),
        "done": running.done(),
        "torn": [p.name for p in run_dir.glob("*.jsonl") if p.read_bytes()[-1:] not in (b"", b"\n")],
        "whole": [c.step for c in [Checkpoints(run_dir, keep=1).latest()] if c],
    }
    assert run.ballast is not None
    run.ballast.unlink()
    await asyncio.wait_for(running, 60)
    store.close()
    run.audit.close()
    last = Checkpoints(run_dir, keep=1).latest()
    lines = run.lines()
    return {
        "held": held,
        "steps": run.steps,
        "alarms": alarms,
        "trained": sorted(g["group_id"] for g in lines if g["outcome"] == "trained"),
        "checkpoint": last.step if last else None,
        "faults": storage.faults_total,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(scenario(Path(sys.argv[1])))))
