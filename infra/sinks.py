"""Append-only JSONL files, the record of a run, and how values are put into them."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from infra.errors import StorageError
from infra.scrub import scrubbed
from infra.storage import Storage

logger = logging.getLogger("gagar.telemetry")

HISTOGRAM_BINS = 20


class JsonlFile:
    """An append-only file of JSON lines, written line by line so that a killed run loses at most a torn last line.

    Whoever opens it again goes on behind the last whole line. With a `Storage`, a disk that takes nothing loses no
    line: it is kept in memory, what was written of it is taken back, and `Storage.retry` writes it later. What may
    pile up is bounded by the run, which holds still meanwhile.
    """

    def __init__(self, path: Path, *, sync: bool, storage: Storage | None = None) -> None:
        """`sync`: each line is on the disk, not only with the operating system, before `append` returns. `storage`:
        where it reports that it cannot be written; None: `append` raises.

        Raises:
            StorageError: the file cannot be opened.
        """
        self.path = path
        self._sync = sync
        self._storage = storage
        self._waiting: list[bytes] = []
        self._fd: int | None = None
        try:
            _end_last_line(path)
            self._end = self._open()
        except OSError as e:
            raise StorageError(f"{path}: cannot be written ({e}); free space or choose another `output`") from e

    @property
    def waiting(self) -> int:
        """Lines that the disk has not taken yet."""
        return len(self._waiting)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, or keep it until the disk takes it.

        Raises:
            StorageError: the disk is full or the folder unwritable, and there is no `Storage` to wait with.
            ValueError: a number is not finite.
        """
        self._waiting.append(f"{json.dumps(scrubbed(line), allow_nan=False)}\n".encode())
        if len(self._waiting) == 1:  # else the disk takes nothing: a retry writes all, in order
            self._flush()

    def close(self) -> None:
        """Write what waits, with one last try, and close the file; what it still does not take is told and lost."""
        if self._waiting:
            self._flush()
        if self._waiting:
            logger.error("%s: %d lines could not be written and are lost", self.path, len(self._waiting))
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _flush(self) -> None:
        try:
            self._write()
        except OSError as e:
            self._take_back()
            if self._storage is None:
                self._waiting.clear()
                raise StorageError(f"{self.path}: cannot be written ({e}); free space and resume the run") from e
            self._storage.failed(self.path, e, self._flush)
        else:
            if self._storage is not None:
                self._storage.recovered(self.path)

    def _write(self) -> None:
        if self._fd is None:
            size = self._open()
            if size > self._end:  # what `_take_back` could not
                os.truncate(self.path, self._end)
        assert self._fd is not None
        data = b"".join(self._waiting)
        self._end = os.fstat(self._fd).st_size  # a learner that starts again cuts the logs back
        done = 0
        while done < len(data):
            done += os.write(self._fd, data[done:])
        if self._sync:
            os.fsync(self._fd)
        self._waiting.clear()

    def _take_back(self) -> None:
        """No half line stays for a reader to stumble over. The next try opens the file anew: after an I/O error or a
        remount the old handle may be of no use."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with suppress(OSError):
            os.ftruncate(fd, self._end)
        with suppress(OSError):
            os.close(fd)

    def _open(self) -> int:
        """Returns the file's size in bytes."""
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return os.fstat(self._fd).st_size


def _end_last_line(path: Path) -> None:
    """Remove a torn last line, else the next one would be written into it, and neither could be read."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = at = file.seek(0, os.SEEK_END)
        tail = b""
        while at > 0 and b"\n" not in tail:
            step = min(at, 65536)
            at -= step
            file.seek(at)
            tail = file.read(step) + tail
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        try:
            json.loads(last)
        except ValueError:
            file.truncate(end - len(last))
        else:
            file.seek(end)
            file.write(b"\n")


def histogram(values: Sequence[float]) -> dict[str, list[float] | list[int]] | None:
    """Equal-width histogram as {"edges": [B + 1], "counts": [B]}; non-finite values are left out, None if none is left.

    Equal values get one bin of width 0.
    """
    finite = sorted(float(v) for v in values if math.isfinite(v))
    if not finite:
        return None
    low, high = finite[0], finite[-1]
    if low == high:
        return {"edges": [low, high], "counts": [len(finite)]}
    width = (high - low) / HISTOGRAM_BINS
    counts = [0] * HISTOGRAM_BINS
    for v in finite:
        counts[min(int((v - low) / width), HISTOGRAM_BINS - 1)] += 1
    return {"edges": [low + width * i for i in range(HISTOGRAM_BINS)] + [high], "counts": counts}
