"""Where telemetry goes: append-only JSONL files, and Weights & Biases.

The files are the record; W&B is a view of it. A W&B failure is reported once and never stops a run.
"""

from __future__ import annotations

import json
import logging
import math
import netrc
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from configs.schema import WandbConfig
from infra.errors import StorageError
from infra.scrub import scrub, scrubbed
from infra.storage import Storage

logger = logging.getLogger("gagar.telemetry")

HISTOGRAM_BINS = 20
WANDB_QUEUE = 256
"""Steps that may wait for a slow W&B before they are left out of it (they stay in metrics.jsonl)."""
WANDB_CLOSE_S = 60.0
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Names under which `wandb login` leaves a key in the netrc file when no other server is configured."""


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


def wandb_mode(
    config: WandbConfig, *, environ: Mapping[str, str], home: Path
) -> Literal["online", "offline", "disabled"]:
    """The mode to run in. `auto` follows WANDB_MODE where set, else is online when a key is found without asking the
    network: in WANDB_API_KEY or in the netrc file under the server's name."""
    if config.mode != "auto":
        return config.mode
    wish = environ.get("WANDB_MODE", "").lower()
    if wish in ("online", "offline", "disabled"):
        return wish  # type: ignore[return-value]  # narrowed by the test above, which mypy does not follow for str
    return "online" if environ.get("WANDB_API_KEY") or _netrc_has_key(environ, home) else "offline"


def _netrc_has_key(environ: Mapping[str, str], home: Path) -> bool:
    base_url = environ.get("WANDB_BASE_URL")
    hosts = (urlsplit(base_url).netloc,) if base_url else WANDB_HOSTS
    names = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in names:
        try:
            entries = netrc.netrc(path)
        except (OSError, netrc.NetrcParseError):
            continue
        if any((entry := entries.authenticators(host)) and entry[2] for host in hosts):
            return True
    return False


class WandbSink:
    """Sends steps to W&B from a thread of its own, because importing and starting it takes seconds.

    Nothing the thread meets reaches the run: a failure is logged as a warning, once, and the sink falls silent.
    """

    def __init__(
        self, run_dir: Path, config: WandbConfig, *, mode: Literal["online", "offline"], run_config: Mapping[str, Any]
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._mode = mode
        self._run_config = scrubbed(run_config)
        self._run_id = _run_id(run_dir)
        self._work: queue.Queue[Callable[[Any], None] | None] = queue.Queue(maxsize=WANDB_QUEUE)
        """What the thread does with the W&B run, one after the other; None: finish it."""
        self._warned = set[str]()
        self._broken = False
        self._thread = threading.Thread(target=self._serve, name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Hand over one step; returns at once."""
        rows, bins = dict(scalars), {k: list(v) for k, v in histograms.items()}
        self._put(lambda run: self._send(run, step, rows, bins))

    def alert(self, title: str, text: str) -> None:
        """Hand over one alert, which W&B sends on as its user has set it up; returns at once."""
        self._put(lambda run: run.alert(title=scrub(title), text=scrub(text)))

    def _put(self, work: Callable[[Any], None]) -> None:
        if self._broken:
            return
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._warn("it does not keep up; steps are left out there (they are all in metrics.jsonl)")

    def close(self, timeout_s: float = WANDB_CLOSE_S) -> None:
        """Let W&B finish what it was given, for at most `timeout_s`."""
        if not self._broken:
            with suppress(queue.Full):
                self._work.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"it did not finish within {timeout_s:g} s; `wandb sync {self._run_dir}/wandb/*` sends the rest")

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("Weights & Biases: %s", what)

    def _serve(self) -> None:
        try:
            run = self._start()
            while (work := self._work.get()) is not None:
                work(run)
            run.finish()
        except Exception as e:  # the one place where W&B's failures end
            self._broken = True
            self._warn(f"switched off ({type(e).__name__}: {e}); metrics go on in metrics.jsonl")

    def _start(self) -> Any:
        import wandb

        wandb.setup(settings=wandb.Settings(silent=True))
        try:
            return self._init(wandb, self._mode)
        except Exception as e:  # online needs network and a valid key; offline needs neither
            if self._mode == "offline":
                raise
            self._warn(f"online start failed ({type(e).__name__}: {e}); going on offline")
            wandb.teardown()  # else the service holds the run id of the failed start
            return self._init(wandb, "offline")

    def _init(self, wandb: Any, mode: str) -> Any:
        run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            dir=str(self._run_dir),
            name=self._run_dir.name,
            id=self._run_id,
            # Offline runs cannot look at the server; syncing folders with one id appends them to one run.
            resume="allow" if mode == "online" else None,
            mode=mode,
            config=self._run_config,
            settings=wandb.Settings(silent=True, console="off", init_timeout=30.0),
        )
        # A resumed run repeats steps after its checkpoint; an explicit axis keeps W&B from refusing them.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _send(
        self, run: Any, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]
    ) -> None:
        import wandb

        rows: dict[str, Any] = {"step": step, **scalars}
        for name, values in histograms.items():
            finite = [v for v in values if math.isfinite(v)]
            if finite:
                rows[f"{name}_histogram"] = wandb.Histogram(finite)
        run.log(rows)


def _run_id(run_dir: Path) -> str:
    """The W&B id of this run: made once and kept in the run's folder, so that a resumed run goes on under it."""
    path = run_dir / "wandb_run_id"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id
