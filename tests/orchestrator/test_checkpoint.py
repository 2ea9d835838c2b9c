"""Checkpoints of the scheduler: what a resume finds is of one moment."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from scripted import ScriptedLearner

from orchestrator.checkpoint import Checkpoints, cut_logs


def test_a_group_that_ends_while_weights_are_written_leaves_the_log_on_resume(tmp_path: Path) -> None:
    log = tmp_path / "groups.jsonl"
    log.write_text("before\n")

    class SlowLearner(ScriptedLearner):
        async def save(self, path: Path) -> None:
            await super().save(path)
            with log.open("a") as file:  # its task is among those that the state says to sample again
                file.write("during\n")

    checkpoints = Checkpoints(tmp_path, keep=1)
    asyncio.run(checkpoints.save(1, cast(Any, SlowLearner()), {"mixer": {}}))
    checkpoint = checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.state["logs"] == {"groups.jsonl": 7}
    cut_logs(tmp_path, checkpoint.state["logs"])
    assert log.read_text() == "before\n"


def test_a_log_shorter_than_at_the_checkpoint_is_not_filled_up(tmp_path: Path) -> None:
    (tmp_path / "spans.jsonl").write_text("{}\n")
    cut_logs(tmp_path, {"spans.jsonl": 100})
    assert (tmp_path / "spans.jsonl").read_bytes() == b"{}\n"
