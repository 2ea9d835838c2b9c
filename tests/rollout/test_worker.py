from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import RolloutConfig
from envs.task import ExactAnswer, Split, Task, TaskKind
from infra.errors import ConfigError
from rollout.chat import ChatFormat
from rollout.engine import ScriptedEngine
from rollout.trajectory import Status
from rollout.worker import RolloutWorker

QUESTION = Task(
    task_id="hand/train/0/2",
    source="hand",
    kind=TaskKind.SINGLE_TURN,
    split=Split.TRAIN,
    statement="6 * 7",
    files={},
    verifier=ExactAnswer(answer="42"),
)


def answering(ids: Sequence[int]) -> ScriptedEngine:
    return ScriptedEngine(lambda request_id, prompt: ids)


async def test_a_rollout_is_three_values(tokenizer_dir: str) -> None:
    answer = ChatFormat.load(tokenizer_dir).reply("42")
    worker = RolloutWorker(RolloutConfig(), tokenizer_dir, answering(answer))
    assert await worker.ping() is True
    trajectory, payload, transcript = await worker.rollout(QUESTION, "g/0.0", "g")
    assert (trajectory.trajectory_id, trajectory.group_id, trajectory.passed) == ("g/0.0", "g", True)
    assert payload is not None
    assert transcript.turns[0].action == "42"


async def test_finished_training_rollouts_are_kept_and_come_back(tokenizer_dir: str, tmp_path: Path) -> None:
    answer = ChatFormat.load(tokenizer_dir).reply("42")
    worker = RolloutWorker(RolloutConfig(), tokenizer_dir, answering(answer), tmp_path / "rollouts")
    made = await worker.rollout(QUESTION, "g/0.0", "g")
    await worker.rollout(replace(QUESTION, split=Split.HELDOUT), "eval/0.0", "eval")
    (path,) = (tmp_path / "rollouts").rglob("*.npz")
    trajectory, payload, transcript = await worker.restore(path)
    assert (trajectory, transcript) == (made[0], made[2]) and not trajectory.unwritten
    assert payload.sha256() == trajectory.payload_sha256


async def test_a_full_disk_costs_a_resume_its_rollouts_and_the_run_nothing(tokenizer_dir: str, tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where a folder should be")
    answer = ChatFormat.load(tokenizer_dir).reply("42")
    worker = RolloutWorker(RolloutConfig(), tokenizer_dir, answering(answer), tmp_path / "rollouts")
    trajectory, payload, _ = await worker.rollout(QUESTION, "g/0.0", "g")
    assert trajectory.passed is True and payload is not None and trajectory.unwritten


async def test_a_fault_of_ours_masks_one_trajectory(tokenizer_dir: str) -> None:
    def broken(request_id: str, prompt: Sequence[int]) -> Sequence[int]:
        raise KeyError("oops")

    worker = RolloutWorker(RolloutConfig(), tokenizer_dir, ScriptedEngine(broken))
    trajectory, payload, transcript = await worker.rollout(QUESTION, "g/1.0", "g")
    assert trajectory.status is Status.INFRA_WORKER, "no sandbox is to blame"
    assert trajectory.worker == f"{platform.node()}:{os.getpid()}"
    assert trajectory.error == "fault in the rollout worker: KeyError: 'oops'"
    assert payload is None
    assert transcript.trajectory_id == trajectory.trajectory_id == "g/1.0"


async def test_what_cannot_work_is_refused_at_the_start(tokenizer_dir: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        RolloutWorker(RolloutConfig(), str(tmp_path), answering([]))


@pytest.mark.e2e
def test_as_an_actor_the_driver_reads_only_the_metadata(ray_session: None, tokenizer_dir: str) -> None:
    import ray

    answer = ChatFormat.load(tokenizer_dir).reply("42")
    worker = ray.remote(max_concurrency=4)(RolloutWorker).remote(RolloutConfig(), tokenizer_dir, answering(answer))
    references = worker.rollout.options(num_returns=3).remote(QUESTION, "g/0.0", "g")
    trajectory = ray.get(references[0], timeout=60)
    assert trajectory.passed is True
    assert ray.get(references[1]).sha256() == trajectory.payload_sha256
    ray.kill(worker)
