"""A disk that takes nothing: the run holds still, says so, and goes on without having lost a line."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from scripted import Run, ScriptedSource, run_config

from envs.task import Split, TaskKind
from infra.errors import StorageError
from infra.sinks import JsonlFile
from infra.storage import Storage
from orchestrator.credit import GroupOutcome
from orchestrator.ledger import RollingGroup
from orchestrator.ledger_store import LedgerStore
from orchestrator.saving import settle

HERE = Path(__file__).parent


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return tried.returncode == 0


def test_a_real_disk_that_fills_up_holds_the_run_and_costs_nothing(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("no user namespaces here")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"mount -t tmpfs -o size=1m none {disk} && exec {sys.executable} {HERE / 'storage_scenario.py'} {disk}"
    environ = {**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{HERE}"}
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=120, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["held"]["steps"] == [1] and told["held"]["batches"] == 1 and not told["held"]["done"]
    assert told["held"]["torn"] == [], "no half line for a reader to stumble over"
    assert told["steps"] == [1, 2, 3] and told["checkpoint"] == 3 and told["faults"] >= 1
    assert len(told["trained"]) == len(set(told["trained"])) == 3 * 3
    on, off = told["alarms"][0], told["alarms"][-1]
    assert on[0] and "No space left on device" in on[1] and str(disk) in on[1] and "free space" in on[1]
    assert not off[0] and "goes on" in off[1]


@contextmanager
def limited() -> Iterator[Callable[[], None]]:
    """No file of this process may grow beyond 4 KiB (EFBIG), until what this gives is called; Python ignores the
    signal. No fixture: the limit must be gone when pytest writes how the test ended, into a file perhaps."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_wait_in_order_and_no_half_one_stays(tmp_path: Path) -> None:
    with limited() as small_files:
        storage = Storage()
        path = tmp_path / "x.jsonl"
        file = JsonlFile(path, sync=True, storage=storage)
        for n in range(50):
            file.append({"n": n, "text": "x" * 200})
        assert file.waiting == 50 - len(lines(path)) > 0, "what is there is whole lines"
        assert path.read_bytes().endswith(b"\n")
        (fault,) = storage.faults()
        assert fault.path == path and fault.error == os.strerror(errno.EFBIG)
        assert str(path) in storage.message() and "free space" in storage.message()
        storage.retry()
        assert file.waiting > 0
        small_files()
        storage.retry()
        assert storage.faults() == () and file.waiting == 0
        file.append({"n": 50})
        file.close()
        assert [line["n"] for line in lines(path)] == list(range(51))


def test_without_a_storage_a_line_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with limited() as small_files:
        file = JsonlFile(tmp_path / "x.jsonl", sync=False)
        for _ in range(4096 // len('{"text": ""}' + "x" * 200 + "\n")):
            file.append({"text": "x" * 200})
        with pytest.raises(StorageError, match=r"x\.jsonl: cannot be written .*free space"):
            file.append({"text": "x" * 200})
        whole = lines(tmp_path / "x.jsonl")
        small_files()
        file.append({"n": 1})
        assert lines(tmp_path / "x.jsonl") == [*whole, {"n": 1}], "the failed one is not written later"


def test_a_file_that_was_cut_back_is_not_filled_with_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage()
    path = tmp_path / "x.jsonl"
    file = JsonlFile(path, sync=False, storage=storage)
    file.append({"n": 1})
    file.append({"n": 2})
    os.truncate(path, 9)  # a learner starts again from its checkpoint
    write = os.write

    def full(fd: int, data: bytes) -> int:
        write(fd, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)
    file.append({"n": 3})
    assert path.read_bytes() == b'{"n": 1}\n'
    monkeypatch.setattr("os.write", write)
    storage.retry()
    assert lines(path) == [{"n": 1}, {"n": 3}]


def test_what_still_cannot_be_written_at_the_end_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with limited():
        file = JsonlFile(tmp_path / "x.jsonl", sync=False, storage=Storage())
        for _ in range(50):
            file.append({"text": "x" * 200})
        file.close()
        assert "lines could not be written and are lost" in caplog.text


# ---- the ledger ------------------------------------------------------------------------------------------------------


def group(index: int) -> RollingGroup:
    task = ScriptedSource("code", TaskKind.CODE).task(Split.TRAIN, index)
    return RollingGroup(group_id=f"code-{index:06d}", task=task, index=index, size=2, version=3, admitted_s=0.0)


class Flaky:
    """A connection that the disk fails now and then."""

    def __init__(self, db: sqlite3.Connection, code: int) -> None:
        self._db = db
        self._code = code
        self.full = threading.Event()

    def execute(self, statement: str, *values: Any) -> Any:
        if self.full.is_set() and statement in ("COMMIT", "PRAGMA wal_checkpoint(TRUNCATE)"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = self._code
            raise error
        return self._db.execute(statement, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def test_the_ledger_waits_for_the_disk_and_loses_no_row(tmp_path: Path) -> None:
    storage = Storage()
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts", storage=storage)
    flaky = Flaky(store._db, sqlite3.SQLITE_FULL)
    store._db = cast(Any, flaky)
    flaky.full.set()
    for index in range(20):
        store.admitted(group(index))
    store.ended("code-000003", GroupOutcome.TRAINED)
    deadline_s = time.monotonic() + 10
    while not storage.faults() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert storage.faults()[0].path.name == "ledger.sqlite" and "full" in storage.faults()[0].error
    store.admitted(group(20))
    flaky.full.clear()
    asyncio.run(asyncio.wait_for(store.flush(), 10))
    assert storage.faults() == ()
    store.close()
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT task_index, outcome FROM groups").fetchall()
    assert rows == [(i, "trained" if i == 3 else None) for i in range(21)]


def test_a_damaged_ledger_is_not_waited_for(tmp_path: Path) -> None:
    storage = Storage()
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts", storage=storage)
    flaky = Flaky(store._db, sqlite3.SQLITE_CORRUPT)
    store._db = cast(Any, flaky)
    flaky.full.set()
    store.admitted(group(0))
    with pytest.raises(StorageError, match="remove it to sample again"):
        asyncio.run(asyncio.wait_for(store.flush(), 10))
    assert storage.faults() == ()


def test_a_run_that_ends_does_not_wait_for_the_ledger(tmp_path: Path) -> None:
    storage = Storage()
    store = LedgerStore(tmp_path / "ledger.sqlite", tmp_path / "rollouts", storage=storage)
    flaky = Flaky(store._db, sqlite3.SQLITE_READONLY)
    store._db = cast(Any, flaky)
    flaky.full.set()
    store.admitted(group(0))
    storage.give_up()
    begin_s = time.monotonic()
    with pytest.raises(StorageError, match="free space and resume"):
        store.close()
    assert time.monotonic() - begin_s < 5.0


# ---- the run ---------------------------------------------------------------------------------------------------------


def test_a_disk_that_stays_full_ends_the_run_after_a_while(tmp_path: Path) -> None:
    storage = Storage()
    config = run_config(steps=2, scheduler={"abort_after_s": 1.5})
    run = Run(tmp_path, config, storage=storage, rollout_delay_s=0.01)

    async def go() -> None:
        storage.failed(tmp_path / "groups.jsonl", OSError(errno.EROFS, "Read-only file system"))
        await asyncio.wait_for(run.scheduler.run(), 20)

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(go())
    (error,) = caught.value.exceptions
    assert isinstance(error, StorageError)
    assert "groups.jsonl cannot be written (Read-only file system)" in str(error)
    assert "scheduler.abort_after_s = 1.5" in str(error) and "--resume" in str(error)
    assert run.steps == [] and run.rollout.calls == []
    assert run.alarms[0].on and run.alarms[0].name == "storage"


def test_the_end_of_a_run_waits_for_what_is_not_written(tmp_path: Path) -> None:
    with limited() as small_files:
        storage = Storage()
        file = JsonlFile(tmp_path / "x.jsonl", sync=False, storage=storage)
        for n in range(50):
            file.append({"n": n, "text": "x" * 200})

        async def go() -> None:
            asyncio.get_running_loop().call_later(0.3, small_files)
            await settle(storage, abort_after_s=20.0)

        asyncio.run(go())
        assert file.waiting == 0 and len(lines(tmp_path / "x.jsonl")) == 50


def test_time_that_was_down_is_a_metric() -> None:
    storage = Storage()
    storage.failed(Path("a"), OSError(errno.EIO, "Input/output error"))
    storage.failed(Path("b"), OSError(errno.EIO, "Input/output error"))
    time.sleep(0.05)
    storage.recovered(Path("a"))
    time.sleep(0.05)
    storage.recovered(Path("b"))
    time.sleep(0.05)
    scalars = storage.scalars()
    assert scalars["storage/faults_total"] == 2.0
    assert 0.05 <= scalars["storage/down_s"] < 0.15
