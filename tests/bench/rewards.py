"""Whether rewards are what they would have been without faults."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.schema import JailSandbox
from envs.jail import JailProvider
from envs.task import HiddenTests
from envs.verifier import verify_patch
from grader.stored import read_archive


def group_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Of groups.jsonl."""
    path = run_dir / "groups.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def compared(faulty: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rewards of the trajectories that both runs have, by id: an attempt that was lost has another."""
    wanted = {t["id"]: t for g in reference for t in g["trajectories"] if t["valid"]}
    same = clock = 0
    different = []
    for t in (t for g in faulty for t in g["trajectories"] if t["valid"] and t["id"] in wanted):
        other = wanted[t["id"]]
        if (t["turns"], t["response_tokens"]) != (other["turns"], other["response_tokens"]):
            clock += 1
        elif t["outcome_reward"] != other["outcome_reward"]:
            different.append(f"{t['id']}: reward {t['outcome_reward']}, without faults {other['outcome_reward']}")
        else:
            same += 1
    return {"same_as_without_faults": same, "sampled_otherwise": clock, "different": different}


async def verified_again(run_dir: Path) -> dict[str, Any]:
    """Every archived trajectory's patch, verified in a fresh sandbox: the reward must be the one of groups.jsonl."""
    faults: list[str] = []
    checked = retried = masked = 0
    rewards = {t["id"]: t for g in group_lines(run_dir) for t in g["trajectories"]}
    for trajectory in rewards.values():
        if not trajectory["valid"]:
            masked += 1
            if trajectory["reward"] is not None or trajectory["advantage"] is not None:
                faults.append(f"{trajectory['id']}: masked ({trajectory['status']}), and has a reward or an advantage")
    provider = JailProvider(JailSandbox())
    gate = asyncio.Semaphore(max(os.cpu_count() or 2, 2))

    async def one(task: Any, trajectory_id: str, patch: str) -> None:
        nonlocal checked, retried
        async with gate:
            verdict = await verify_patch(task, patch, provider)
        checked += 1
        retried += not trajectory_id.endswith(".0")
        given = rewards[trajectory_id]["outcome_reward"]
        if verdict.reward != given:
            faults.append(f"{trajectory_id}: reward {given}, verified again {verdict.reward}")

    groups = [read_archive(file) for file in sorted((run_dir / "archive").glob("*.json.gz"))]
    try:
        await asyncio.gather(
            *(
                one(group.task, transcript.trajectory_id, transcript.patch)
                for group in groups
                if isinstance(group.task.verifier, HiddenTests)
                for transcript in group.transcripts
                if transcript.trajectory_id in rewards
            )
        )
    finally:
        await provider.close()
    return {"verified_again": checked, "of_retries": retried, "masked": masked, "faults": faults}
