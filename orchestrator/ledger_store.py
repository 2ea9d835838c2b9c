"""`ledger.sqlite`: what a resumed run must know of every group that no checkpoint covers yet.

One row a group: what it was admitted as, the grader's answer, and how it ended. The rollouts themselves are files that
the workers write (rollout/spool.py); whether a slot is finished is whether its file is there. Rows are written by one
thread, in order, as many in a transaction as have come in meanwhile: the driver's loop never waits for the disk, and a
killed process loses what came in the last milliseconds.

Every end of a group has a number. A checkpoint keeps the last one, its *mark*: what ended later is lost with the
weights, so a resume brings it back. What ended before is forgotten once no checkpoint on disk has a smaller mark: the
newest one may turn out to be damaged, and a resume from an older one brings back what ended since then.

A disk that takes nothing makes the writer try again until it does; the run holds still meanwhile (saving.py).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from grader.exchange import GradeReply
from infra.errors import StorageError
from infra.storage import Storage
from orchestrator.credit import GroupOutcome
from orchestrator.ledger import RollingGroup
from rollout.spool import group_folder, kept_slots
from rollout.trajectory import Trajectory

_REPLY = TypeAdapter(GradeReply)
_TABLE = """
CREATE TABLE IF NOT EXISTS groups (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- order of admission over all sessions of the run
    group_id TEXT NOT NULL UNIQUE,
    source TEXT NOT NULL,
    task_index INTEGER NOT NULL,
    size INTEGER NOT NULL,
    version INTEGER NOT NULL,                  -- policy version at admission
    reply TEXT,                                -- the grader's answer, JSON
    outcome TEXT,
    ended INTEGER                              -- number of its end; NULL while it lives
)"""
_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
}
"""Errors of the disk, which end when it takes something again."""
_ADMIT = "INSERT OR REPLACE INTO groups (group_id, source, task_index, size, version) VALUES (?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroup:
    """A group that an earlier session of the run left behind."""

    group_id: str
    source: str
    index: int
    size: int
    version: int
    reply: GradeReply | None
    """What the grader answered, if it was asked."""
    rollouts: dict[int, Path]
    """Slot -> file of the finished rollout."""

    @property
    def whole(self) -> bool:
        """Whether it was graded with exactly these rollouts: then slots without one were lost for good (M1.3), and the
        grade still stands."""
        ids = {f"{self.group_id}/{path.stem}" for path in self.rollouts.values()}
        return self.reply is not None and set(self.reply.policy_versions) == ids


def covers(reply: GradeReply, trajectories: Sequence[Trajectory]) -> bool:
    """Whether a kept answer is about exactly these trajectories: one that was sampled again since voids it (M2.6)."""
    return dict(reply.policy_versions) == {
        t.trajectory_id: t.policy_versions for t in trajectories if not t.status.masked
    }


def indices(groups: Sequence[KeptGroup]) -> dict[str, set[int]]:
    """Source -> the tasks of these groups, in its stream."""
    out: dict[str, set[int]] = {}
    for group in groups:
        out.setdefault(group.source, set()).add(group.index)
    return out


class _Damaged(Exception):
    """No waiting helps."""


class LedgerStore:
    """The log of one run's ledger. Called from one thread, the driver's."""

    def __init__(self, path: Path, rollouts: Path, *, storage: Storage | None = None) -> None:
        """Open or make it; `rollouts` is the folder that workers keep finished rollouts in. `storage`: where the writer
        waits for a disk that takes nothing; None: it fails at once.

        Raises:
            StorageError: it cannot be opened.
        """
        self._path = path
        self._rollouts = rollouts
        self._storage = storage
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._todo: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._last: Future[None] | None = None
        try:
            # The first connection is the writer thread's own from now on.
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(_TABLE)
            self._ends = int(self._db.execute("SELECT COALESCE(MAX(ended), 0) FROM groups").fetchone()[0])
        except sqlite3.Error as e:
            raise StorageError(f"{path}: cannot be opened ({e}); remove it to sample again what it held") from e

    # ---- the log ----------------------------------------------------------------------------------------------------

    def admitted(self, group: RollingGroup) -> None:
        """A new group is about to be sampled."""
        self._write(_ADMIT, group.group_id, group.task.source, group.index, group.size, group.version)

    def graded(self, group_id: str, reply: GradeReply) -> None:
        """A grader has answered."""
        # A model's text may hold lone surrogates; JSON's escapes carry them, UTF-8 would not.
        text = json.dumps(_REPLY.dump_python(reply, mode="json"))
        self._write("UPDATE groups SET reply = ? WHERE group_id = ?", text, group_id)

    def ended(self, group_id: str, outcome: GroupOutcome) -> None:
        """A group has left."""
        self._ends += 1
        self._write("UPDATE groups SET outcome = ?, ended = ? WHERE group_id = ?", outcome.value, self._ends, group_id)

    def mark(self) -> int:
        """Number of the last end, for a checkpoint of this moment."""
        return self._ends

    async def flush(self) -> None:
        """Everything so far is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        await asyncio.wrap_future(self._writer.submit(self._sync))

    def forget(self, mark: int) -> None:
        """No checkpoint on disk has a smaller mark: what ended before it needs no row and no files any more."""
        self._submit(self._drop, mark)

    def close(self) -> None:
        """Write what is left. Raises StorageError."""
        try:
            self._writer.submit(self._sync).result()
        finally:
            self._writer.shutdown(wait=True)
            self._db.close()

    def _write(self, statement: str, *values: Any) -> None:
        self._todo.append((statement, values))
        if len(self._todo) == 1:  # else a drain is on its way that takes this one too
            self._submit(self._drain)

    def _submit(self, work: Any, *args: Any) -> None:
        if self._last is not None and self._last.done():
            self._last.result()  # raises what an earlier one met
        self._last = self._writer.submit(work, *args)

    # ---- in the writer's thread -------------------------------------------------------------------------------------

    def _drain(self) -> None:
        while self._todo:
            batch = list(self._todo)
            self._insist(lambda rows=batch: self._transaction(rows))  # type: ignore[misc]  # bound now
            for _ in batch:  # only now: a failed transaction is tried again with all of them
                self._todo.popleft()

    def _sync(self) -> None:
        self._drain()
        self._insist(lambda: self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)"))

    def _drop(self, mark: int) -> None:
        self._drain()
        gone = self._db.execute("SELECT group_id FROM groups WHERE ended <= ?", (mark,)).fetchall()
        for (group_id,) in gone:
            shutil.rmtree(group_folder(self._rollouts, group_id), ignore_errors=True)
        self._insist(lambda: self._db.execute("DELETE FROM groups WHERE ended <= ?", (mark,)))

    def _transaction(self, statements: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        self._db.execute("BEGIN")
        try:
            for statement in statements:
                self._db.execute(*statement)
            self._db.execute("COMMIT")
        except sqlite3.Error:
            if self._db.in_transaction:  # a full disk has ended some by itself
                self._db.execute("ROLLBACK")
            raise

    def _insist(self, work: Callable[[], object]) -> None:
        """work(), until the disk takes it. Raises StorageError: it is damaged, or the run gave up."""

        def attempt() -> None:
            try:
                work()
            except sqlite3.Error as e:
                if getattr(e, "sqlite_errorcode", 0) & 0xFF not in _PASSING:
                    raise _Damaged(
                        f"{self._path}: cannot be written ({e}); remove it to sample again what it held"
                    ) from e
                raise StorageError(f"{self._path}: cannot be written ({e}); free space and resume the run") from e

        try:
            if self._storage is None:
                attempt()
            else:
                self._storage.insist(self._path, attempt)
        except _Damaged as e:
            raise StorageError(str(e)) from e.__cause__

    # ---- a resume ---------------------------------------------------------------------------------------------------

    def load(self, mark: int, *, oldest: int | None = None) -> Sequence[KeptGroup]:
        """The groups that live after a resume from the checkpoint with this mark, in order of admission: those that
        had not ended, and those whose end is lost with the weights. All others are forgotten, but for those that ended
        after `oldest`, the smallest mark of a checkpoint on disk (None: this one's).

        Raises:
            StorageError: the file is damaged.
        """
        try:
            self._db.execute("DELETE FROM groups WHERE ended <= ?", (mark if oldest is None else min(mark, oldest),))
            self._db.execute("UPDATE groups SET ended = NULL, outcome = NULL WHERE ended > ?", (mark,))
            columns = "group_id, source, task_index, size, version, reply"
            query = f"SELECT {columns} FROM groups WHERE ended IS NULL ORDER BY number"
            rows = self._db.execute(query).fetchall()
            known = [group_id for (group_id,) in self._db.execute("SELECT group_id FROM groups")]
            groups = [
                KeptGroup(
                    group_id=group_id,
                    source=source,
                    index=index,
                    size=size,
                    version=version,
                    reply=_REPLY.validate_python(json.loads(reply)) if reply is not None else None,
                    rollouts=kept_slots(self._rollouts, group_id),
                )
                for group_id, source, index, size, version, reply in rows
            ]
        except (sqlite3.Error, ValueError) as e:
            raise StorageError(f"{self._path}: damaged ({e}); remove it to sample again what it held") from e
        self._ends = mark
        needed = {group_folder(self._rollouts, group_id).name for group_id in known}
        for folder in self._rollouts.glob("*"):
            if folder.name not in needed:
                shutil.rmtree(folder, ignore_errors=True)
        return groups
