"""ledger.sqlite and the kept rollouts: written ahead, read back, forgotten when a checkpoint covers them."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scripted import ScriptedSource, trajectory, transcript

from envs.task import Split, TaskKind
from grader.exchange import GradeReply, GradeRequest, lost_reply
from infra.errors import StorageError
from orchestrator.credit import GroupOutcome
from orchestrator.ledger import RollingGroup
from orchestrator.ledger_store import KeptGroup, LedgerStore, indices
from rollout.spool import group_folder, kept_slots, read_rollout, write_rollout
from rollout.trajectory import Payload, Trajectory, Transcript

SOURCE = ScriptedSource("code", TaskKind.CODE)


def group(index: int) -> RollingGroup:
    task = SOURCE.task(Split.TRAIN, index)
    return RollingGroup(group_id=f"code-{index:06d}", task=task, index=index, size=2, version=3, admitted_s=0.0)


def rollout(trajectory_id: str, tokens: int = 50) -> tuple[Trajectory, Payload, Transcript]:
    payload = Payload(
        token_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.arange(tokens) % 2 == 0,
        logprobs=np.linspace(-1, 0, tokens, dtype=np.float32),
        versions=np.full(tokens, 3, dtype=np.int32),
    )
    made = trajectory(trajectory_id, task=SOURCE.task(Split.TRAIN, 0), versions=(3,))
    made = replace(made, payload_sha256=payload.sha256())
    return made, payload, replace(transcript(trajectory_id, "T1"), test_log="lone \udc80 surrogate")


def answer(group_id: str) -> GradeReply:
    t = trajectory(f"{group_id}/0.0", task=SOURCE.task(Split.TRAIN, 0), versions=(2, 3))
    request = GradeRequest(
        group_id=group_id, task=SOURCE.task(Split.TRAIN, 0), base_state="s", trajectories=(t,), order_seed=1
    )
    return lost_reply(request, "nobody answered", run_s=1.5)


def reopen(tmp_path: Path, mark: int) -> list[KeptGroup]:
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts")
    try:
        return list(store.load(mark))
    finally:
        store.close()


def test_a_rollout_comes_back_as_it_was(tmp_path: Path) -> None:
    made = rollout("code-000001/0.2")
    path = write_rollout(tmp_path, *made)
    back, payload, text = read_rollout(path)
    assert back == made[0] and text == made[2]
    assert payload.sha256() == made[1].sha256() and payload.logprobs.dtype == np.float32
    assert kept_slots(tmp_path, "code-000001") == {0: path}


def test_the_last_attempt_of_a_slot_counts(tmp_path: Path) -> None:
    for name in ("g/0.0", "g/0.10", "g/0.9", "g/1.0"):
        write_rollout(tmp_path, *rollout(name))
    (group_folder(tmp_path, "g") / ".0.11.npz.part").write_bytes(b"torn")
    assert {slot: p.name for slot, p in kept_slots(tmp_path, "g").items()} == {0: "0.10.npz", 1: "1.0.npz"}


def test_an_answer_comes_back_as_it_was_whatever_the_model_wrote(tmp_path: Path) -> None:
    """A server that cuts its text in the middle of a character must not end the run."""
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts")
    given = replace(answer("code-000001"), verdict='{"reasons": "half a \ud83d', detail="\udc80")
    store.admitted(group(1))
    store.graded("code-000001", given)
    store.close()
    assert [kept.reply for kept in reopen(tmp_path, 0)] == [given]


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
def test_a_damaged_rollout_is_told_from_a_whole_one(tmp_path: Path, damage: str) -> None:
    path = write_rollout(tmp_path, *rollout("g/0.0"))
    if damage == "other":
        made, _, text = rollout("g/0.0")
        path = write_rollout(tmp_path, made, rollout("g/0.0", tokens=51)[1], text)
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else 300])
    with pytest.raises(StorageError, match=r"g/0\.0\.npz"):
        read_rollout(path)


def test_what_was_admitted_and_graded_survives_without_a_close(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts")
    for index in range(3):
        store.admitted(group(index))
    store.graded("code-000001", answer("code-000001"))
    write_rollout(tmp_path / "rollouts", *rollout("code-000001/1.0"))
    asyncio.run(store.flush())
    left = reopen(tmp_path, 0)  # the first one still has it open, as a killed process never closed it
    assert [(k.group_id, k.source, k.index, k.size, k.version) for k in left] == [
        (f"code-{i:06d}", "code", i, 2, 3) for i in range(3)
    ]
    assert left[1].reply == answer("code-000001") and left[0].reply is None
    assert list(left[1].rollouts) == [1]
    assert indices(left) == {"code": {0, 1, 2}}


def test_ends_before_the_mark_are_forgotten_and_later_ones_undone(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts"
    store = LedgerStore(tmp_path / "ledger.sqlite", rollouts)
    for index in range(3):
        store.admitted(group(index))
        write_rollout(rollouts, *rollout(f"code-{index:06d}/0.0"))
    store.ended("code-000002", GroupOutcome.TRAINED)
    mark = store.mark()
    store.ended("code-000000", GroupOutcome.TRAINED)
    write_rollout(rollouts, *rollout("nobody-knows/0.0"))
    store.close()
    left = reopen(tmp_path, mark)
    assert [k.index for k in left] == [0, 1]
    assert {p.name for p in rollouts.iterdir()} == {"code-000000", "code-000001"}


def test_a_complete_checkpoint_frees_rows_and_files(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts"
    store = LedgerStore(tmp_path / "ledger.sqlite", rollouts)
    for index in range(2):
        store.admitted(group(index))
        write_rollout(rollouts, *rollout(f"code-{index:06d}/0.0"))
    store.ended("code-000000", GroupOutcome.SKIPPED_ALL_FAIL)
    store.forget(store.mark())
    store.close()
    assert [p.name for p in rollouts.iterdir()] == ["code-000001"]
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT group_id FROM groups").fetchall()
    assert rows == [("code-000001",)]


def test_marks_go_on_after_a_resume(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts")
    store.admitted(group(0))
    store.ended("code-000000", GroupOutcome.TRAINED)
    mark = store.mark()
    store.close()
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts")
    assert store.load(mark) == []
    store.admitted(group(1))
    store.ended("code-000001", GroupOutcome.TRAINED)
    assert store.mark() == mark + 1
    store.close()


def test_writing_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts")
    for index in range(2000):
        store.admitted(group(index))
    asyncio.run(store.flush())
    assert len(reopen(tmp_path, 0)) == 2000
    store.close()


def test_a_damaged_ledger_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(StorageError, match="remove it to sample again"):
        LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts")
