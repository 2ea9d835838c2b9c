"""The archive of a run: written in a thread of its own, whole or absent, losses counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, ObjectLostError
from scripted import ScriptedSource, trajectory

from envs.task import Split, TaskKind
from grader.stored import read_archive
from infra.errors import StorageError
from orchestrator.archive import GroupArchive
from orchestrator.ledger import CompleteGroup, Member
from rollout.trajectory import Status, Transcript

TASK = ScriptedSource("code", TaskKind.CODE).task(Split.TRAIN, 3)


def group(group_id: str = "code-000003") -> CompleteGroup:
    """One pass, one failure, one masked."""
    members = []
    for slot, (passed, status) in enumerate(
        [(True, Status.SUBMITTED), (False, Status.TURN_LIMIT), (None, Status.INFRA_WALL)]
    ):
        name = f"{group_id}/{slot}.0"
        member = trajectory(name, task=TASK, passed=passed, status=status)
        members.append(Member(trajectory=member, payload="never fetched", transcript=f"ref:{name}"))
    return CompleteGroup(group_id=group_id, task=TASK, index=3, members=tuple(members), admitted_s=0.0, completed_s=1.0)


def fetch(references: Sequence[Any]) -> Sequence[Transcript]:
    return [
        Transcript(trajectory_id=str(r).removeprefix("ref:"), turns=(), patch="a patch", test_log="")
        for r in references
    ]


def test_a_graded_group_is_kept_without_its_masked_members(tmp_path: Path) -> None:
    """M1.3: what could not be evaluated is not part of the group."""
    with GroupArchive(tmp_path / "archive", fetch=fetch) as archive:
        archive.add(group())
    kept = read_archive(tmp_path / "archive" / "code-000003.json.gz")
    assert kept.task == TASK and kept.labels is None
    assert [t.trajectory_id for t in kept.trajectories] == ["code-000003/0.0", "code-000003/1.0"]
    assert [t.patch for t in kept.transcripts] == ["a patch", "a patch"]


def test_the_caller_never_waits_for_a_fetch(tmp_path: Path) -> None:
    go = threading.Event()

    def slow(references: Sequence[Any]) -> Sequence[Transcript]:
        assert go.wait(30.0)
        assert threading.current_thread() is not threading.main_thread()
        return fetch(references)

    archive = GroupArchive(tmp_path, fetch=slow)
    for number in range(5):
        archive.add(group(f"code-{number}"))
    go.set()
    archive.close()
    assert len(list(tmp_path.glob("*.json.gz"))) == 5


@pytest.mark.parametrize("error", [ObjectLostError("ref", None, ""), GetTimeoutError("late")])
def test_a_lost_transcript_costs_only_its_entry(tmp_path: Path, error: Exception) -> None:
    lost = [error]

    def once(references: Sequence[Any]) -> Sequence[Transcript]:
        if lost:
            raise lost.pop()
        return fetch(references)

    archive = GroupArchive(tmp_path, fetch=once)
    archive.add(group("code-1"))
    archive.add(group("code-2"))
    archive.close()
    assert archive.lost == 1 and archive.first_loss == f"code-1: {type(error).__name__}"
    assert [p.name for p in tmp_path.iterdir()] == ["code-2.json.gz"]


def test_a_full_disk_ends_the_run_with_the_next_group(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("in the way")
    archive = GroupArchive(tmp_path / "archive", fetch=fetch)
    archive.add(group("code-1"))
    with pytest.raises(StorageError, match="cannot be written"):
        archive.close()
    archive = GroupArchive(tmp_path / "archive", fetch=fetch)
    archive.add(group("code-1"))
    archive._pending[0].exception()  # wait for it
    with pytest.raises(StorageError, match="free space and resume"):
        archive.add(group("code-2"))


def test_another_failure_is_not_hidden_by_the_archive_s(tmp_path: Path) -> None:
    (tmp_path / "archive").write_text("in the way")

    def run() -> None:
        with GroupArchive(tmp_path / "archive", fetch=fetch) as archive:
            archive.add(group())
            raise KeyError("the reason")

    with pytest.raises(KeyError):
        run()


def test_nothing_keeps_a_written_group_s_references(tmp_path: Path) -> None:
    archive = GroupArchive(tmp_path, fetch=fetch)
    archive.add(group("code-1"))
    archive._pending[0].result()
    archive.add(group("code-2"))
    assert len(archive._pending) == 1
    archive.close()
