"""Payloads of several contexts: their digest, and their way to the disk and back."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollout.spool import read_rollout, write_rollout
from rollout.trajectory import Payload, Status, Trajectory, Transcript


def payload() -> Payload:
    return Payload(
        token_ids=np.array([1, 2, 3, 4], np.int32),
        loss_mask=np.array([False, True, False, True]),
        logprobs=np.array([0.0, -0.5, 0.0, -1.5], np.float32),
        versions=np.array([-1, 7, -1, 8], np.int32),
    )


def test_the_digest_of_one_context_is_that_of_the_four_arrays() -> None:
    one = payload()
    by_hand = hashlib.sha256()
    for array in (one.token_ids, one.loss_mask, one.logprobs, one.versions):
        by_hand.update(array.tobytes())
    assert one.sha256() == by_hand.hexdigest()
    assert replace(one, contexts=(0, 2)).sha256() not in (one.sha256(), replace(one, contexts=(0, 3)).sha256())


def test_contexts_survive_the_disk(tmp_path: Path) -> None:
    for contexts in ((0,), (0, 2)):
        kept = replace(payload(), contexts=contexts)
        trajectory = Trajectory(
            trajectory_id="g/0.0",
            group_id="g",
            task_id="t",
            source="s",
            status=Status.SUBMITTED,
            reward=1.0,
            passed=True,
            turns=1,
            prompt_tokens=1,
            response_tokens=2,
            total_tokens=4,
            policy_versions=(7, 8),
            payload_sha256=kept.sha256(),
            engine_s=0.0,
            sandbox_s=0.0,
            verify_s=0.0,
            wall_s=0.0,
            contexts=len(contexts),
            drift=1,
            notes=("temperature",),
        )
        path = write_rollout(
            tmp_path, trajectory, kept, Transcript(trajectory_id="g/0.0", turns=(), patch="", test_log="")
        )
        back, restored, _ = read_rollout(path)
        assert back == trajectory
        assert restored.contexts == contexts
        assert restored.sha256() == kept.sha256()
