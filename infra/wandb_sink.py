"""Weights & Biases: a view of the run; the files are the record.

Everything is kept away from the run: W&B lives in a process of its own (wandb_process.py), a thread talks to it, and
each request has a deadline. What is killed, hangs or says no is ended with its service, said once, and started anew
under the same run id; what was not acknowledged is sent again.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import queue
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from configs.schema import WandbConfig
from infra.scrub import scrub, scrubbed

logger = logging.getLogger("gagar.telemetry")

WANDB_QUEUE = 256
"""Steps that may wait for a slow W&B before they are left out of it (they stay in metrics.jsonl)."""
WANDB_CLOSE_S = 60.0
WANDB_START_S = 120.0
WANDB_ANSWER_S = 30.0
"""Without an answer for this long its process counts as hung."""
WANDB_PING_S = 60.0
"""Between two looks whether it still answers, while there is nothing to send."""
WANDB_TRIES = 5
"""Starts in a row without a step that was taken in, before W&B is left alone."""
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Names under which `wandb login` leaves a key in the netrc file when no other server is configured."""


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


class _Lost(Exception):
    """The process died, hangs, or could not do what it was asked."""


class _Refused(Exception):
    """W&B does not start with these settings; no other try will."""


class _Process:
    """W&B's process, and the service that it starts in a session of its own."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("wandb_process.py"))
        # -P: the script's folder is no place to import from. A session of its own: Ctrl-C is not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._handle = psutil.Process(self._process.pid)
        self._services: list[psutil.Process] = []

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """The answer. Raises _Lost or _Refused."""
        deadline_s = time.monotonic() + timeout_s
        try:
            data = f"{json.dumps(request)}\n".encode()
            while data:
                self._ready([], [self._in], deadline_s)
                data = data[os.write(self._in, data) :]
            answer = b""
            while not answer.endswith(b"\n"):
                self._ready([self._out], [], deadline_s)
                piece = os.read(self._out, 65536)
                if not piece:
                    raise _Lost("its process ended")
                answer += piece
        except OSError as e:
            raise _Lost(f"its process ended ({e})") from e
        told: dict[str, Any] = json.loads(answer)
        if "error" in told:
            raise (_Refused if told["fatal"] else _Lost)(scrub(told["error"]))
        return told

    def _ready(self, reading: list[int], writing: list[int], deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0 or not any(select.select(reading, writing, [], left_s)):
            raise _Lost("it does not answer")

    def find_services(self) -> None:
        """Remember what it started: once it is dead nobody can tell."""
        with suppress(psutil.Error):
            self._services = self._handle.children(recursive=True)

    def end(self) -> None:
        """Kill what is left of it and of its service, which would never leave by itself if it hangs. Safe to call
        twice; a number that now belongs to another process is left alone."""
        if self._process.poll() is None:
            self.find_services()
        for process in (self._handle, *self._services):
            with suppress(psutil.Error):
                process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]  # both are pipes


class WandbSink:
    """Sends steps to W&B from a thread of its own. Nothing the thread meets reaches the run."""

    def __init__(
        self,
        run_dir: Path,
        config: WandbConfig,
        *,
        mode: Literal["online", "offline"],
        run_config: Mapping[str, Any],
        answer_s: float = WANDB_ANSWER_S,
        ping_s: float = WANDB_PING_S,
    ) -> None:
        self._run_dir = run_dir
        self._setup = {
            "kind": "start",
            "mode": mode,
            "project": config.project,
            "entity": config.entity,
            "dir": str(run_dir),
            "name": run_dir.name,
            "id": _run_id(run_dir),
            "config": scrubbed(run_config),
        }
        self._answer_s = answer_s
        self._ping_s = ping_s
        self._work: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=WANDB_QUEUE)
        self._warned = set[str]()
        self._over = threading.Event()
        """Nothing more is sent: closed, or left alone."""
        self._process: _Process | None = None
        self._thread = threading.Thread(target=self._serve, name="wandb", daemon=True)
        self._thread.start()

    def log(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        """Hand over one step; returns at once."""
        bins = {name: [float(v) for v in values] for name, values in histograms.items()}
        scalars = {name: float(v) for name, v in scalars.items()}
        self._put({"kind": "log", "step": step, "scalars": scalars, "histograms": bins})

    def alert(self, title: str, text: str) -> None:
        """Hand over one alert, which W&B sends on as its user has set it up; returns at once."""
        self._put({"kind": "alert", "title": scrub(title), "text": scrub(text)})

    def close(self, timeout_s: float = WANDB_CLOSE_S) -> None:
        """Let W&B finish what it was given, for at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        if not self._over.is_set():
            with suppress(queue.Full):
                self._work.put({"kind": "finish"}, timeout=timeout_s)
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._over.set()
            self._warn(f"it did not finish within {timeout_s:g} s; `wandb sync {self._run_dir}/wandb/*` sends the rest")
            if (process := self._process) is not None:
                process.end()
            self._thread.join(5.0)

    def _put(self, request: dict[str, Any]) -> None:
        if self._over.is_set():
            return
        try:
            self._work.put_nowait(request)
        except queue.Full:
            self._warn("it does not keep up; steps are left out there (they are all in metrics.jsonl)")

    def _warn(self, what: str, *, once: str | None = None) -> None:
        if (once or what) not in self._warned:
            self._warned.add(once or what)
            logger.warning("Weights & Biases: %s", what)

    # ---- in the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        request: dict[str, Any] | None = None
        failures = 0
        while not self._over.is_set():
            try:
                self._process = _Process()
                note = self._process.ask(self._setup, WANDB_START_S).get("note")
                self._process.find_services()
                if note:
                    self._warn(scrub(note))
                while request is None or request["kind"] != "finish":
                    request = request or self._next()
                    self._process.ask(request, WANDB_START_S if request["kind"] == "finish" else self._answer_s)
                    if request["kind"] != "finish":
                        request, failures = None, 0
                self._over.set()
            except _Refused as e:
                self._give_up(str(e))
            except (_Lost, OSError) as e:
                failures += 1
                if request is not None and request["kind"] in ("ping", "finish"):
                    self._over_if(request["kind"] == "finish")
                    request = None
                if failures >= WANDB_TRIES:
                    self._give_up(f"lost {failures} times in a row, the last time: {e}")
                elif not self._over.is_set():
                    self._warn(f"lost ({e}); it is started anew, and all is in metrics.jsonl", once="lost")
            finally:
                if self._process is not None:
                    self._process.end()

    def _next(self) -> dict[str, Any]:
        try:
            return self._work.get(timeout=self._ping_s)
        except queue.Empty:
            return {"kind": "ping"}

    def _over_if(self, finished: bool) -> None:
        if finished:  # what it was given it has taken in, one by one
            self._over.set()

    def _give_up(self, why: str) -> None:
        self._over.set()
        self._warn(f"switched off ({why}); metrics go on in metrics.jsonl")


def _run_id(run_dir: Path) -> str:
    """The W&B id of this run: made once and kept in the run's folder, so that a resumed run goes on under it."""
    path = run_dir / "wandb_run_id"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id
