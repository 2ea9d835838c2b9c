"""Keeps every graded group of a run on disk, so that it can be shown, and graded again by any grader.

The driver's loop only hands groups over; fetching transcripts from the object store and writing happen in a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from envs.task import Task
from grader.stored import StoredGroup, archive_path, read_archive, write_archive
from infra.storage import Storage
from orchestrator.ledger import CompleteGroup
from rollout.trajectory import Trajectory, Transcript

FETCH_TIMEOUT_S = 60.0
"""For the transcripts of one group; they are small, and usually on this machine."""

Fetch = Callable[[Sequence[Any]], Sequence[Transcript]]


def fetch_from_ray(references: Sequence[Any]) -> Sequence[Transcript]:
    """The values of object references. Raises RayError if one is lost or does not come in time."""
    import ray

    values: list[Transcript] = ray.get(list(references), timeout=FETCH_TIMEOUT_S)
    return values


def read_archived(folder: Path, record: Mapping[str, Any]) -> StoredGroup | None:
    """The archive's entry for one line of groups.jsonl; None if there is none, or it is of an earlier sampling.

    Raises:
        StorageError: it is damaged.
    """
    path = archive_path(folder, str(record["group_id"]))
    if not path.is_file():
        return None
    group = read_archive(path)
    ids = {t["id"] for t in record["trajectories"] if t["valid"]}
    return group if {t.trajectory_id for t in group.trajectories} == ids else None


class GroupArchive:
    """The archive folder of one run. `add` and `close` are called from one thread, the driver's."""

    def __init__(self, folder: Path, *, fetch: Fetch = fetch_from_ray, storage: Storage | None = None) -> None:
        """`storage`: where the writer waits for a disk that takes nothing; None: it fails at once."""
        self.lost = 0
        """Groups that have no entry because a transcript was lost with its node."""
        self.first_loss = ""
        """What the first of them lost."""
        self._folder = folder
        self._fetch = fetch
        self._storage = storage
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="archive")
        self._pending: deque[Future[None]] = deque()

    def add(self, group: CompleteGroup) -> None:
        """Keep a group; returns at once. Only references to its transcripts are held until it is written.

        Raises:
            StorageError: an earlier group could not be written.
        """
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        references = [m.transcript for m in group.valid]
        trajectories = tuple(m.trajectory for m in group.valid)
        self._pending.append(self._writer.submit(self._keep, group.group_id, group.task, trajectories, references))

    def close(self) -> None:
        """Wait until everything is written.

        Raises:
            StorageError: a group could not be written.
        """
        self._writer.shutdown(wait=True)
        while self._pending:
            self._pending.popleft().result()

    def __enter__(self) -> GroupArchive:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.shutdown(wait=True)  # what ended the run is the one message, not a disk that is full as well

    def _keep(self, group_id: str, task: Task, trajectories: tuple[Trajectory, ...], references: Sequence[Any]) -> None:
        """In the writer's thread."""
        from ray.exceptions import RayError

        try:
            transcripts = tuple(self._fetch(references))
        except RayError as e:
            self.lost += 1
            self.first_loss = self.first_loss or f"{group_id}: {type(e).__name__}"
            return
        group = StoredGroup(group_id=group_id, task=task, trajectories=trajectories, transcripts=transcripts)
        if self._storage is None:
            write_archive(self._folder, group)
        else:
            self._storage.insist(self._folder, lambda: write_archive(self._folder, group))
