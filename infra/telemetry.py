"""Metrics and spans of one run: `metrics.jsonl`, `spans.jsonl`, and W&B.

Spans are timed on `time.monotonic`; each session of a run opens its part of spans.jsonl with an anchor line that ties
that clock to the wall clock, so that spans of several sessions (a resumed run) can be put on one axis.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.schema import WandbConfig
from infra.errors import StorageError
from infra.sinks import JsonlFile, histogram
from infra.spans import Interval, Span
from infra.storage import Storage
from infra.wandb_sink import WandbSink, wandb_mode

Attr = str | int | float


class Telemetry:
    """What a run tells about itself. Used from one thread, the driver's."""

    def __init__(
        self, run_dir: Path, *, wandb: WandbConfig, config: Mapping[str, Any], storage: Storage | None = None
    ) -> None:
        """Open the run's files for appending; `config` is the resolved configuration, shown in W&B. `storage`: where
        the files wait for a disk that takes nothing; None: they raise.

        A resumed run cuts the files back to its checkpoint before it gets here; the W&B run goes on under the id kept
        in the folder.

        Raises:
            StorageError: the folder cannot be written.
        """
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise StorageError(f"{run_dir}: cannot be created ({e}); choose another `output`") from e
        self.run_dir = run_dir
        self.storage = storage
        self._metrics = JsonlFile(run_dir / "metrics.jsonl", sync=True, storage=storage)
        self._spans = JsonlFile(run_dir / "spans.jsonl", sync=False, storage=storage)
        self.anchor()
        self._closed: list[Span] = []
        self._open: dict[int, Span] = {}
        self._ids = itertools.count()
        mode = wandb_mode(wandb, environ=os.environ, home=Path.home())
        self._wandb = WandbSink(run_dir, wandb, mode=mode, run_config=config) if mode != "disabled" else None

    def anchor(self) -> None:
        """Tie the spans' clock to the wall clock: at the start, and after the file was cut back."""
        self._spans.append({"anchor": {"monotonic_s": time.monotonic(), "unix_s": time.time(), "pid": os.getpid()}})

    @contextmanager
    def span(self, name: str, **attrs: Attr) -> Iterator[None]:
        """Time the body. While it runs, `take` already sees the span; it is written when the body ends, however."""
        key = next(self._ids)
        start_s = time.monotonic()
        self._open[key] = Span(name=name, start_s=start_s, end_s=start_s, attrs=attrs)
        try:
            yield
        finally:
            del self._open[key]
            self.record_span(name, start_s, time.monotonic(), **attrs)

    def record_span(self, name: str, start_s: float, end_s: float, **attrs: Attr) -> None:
        """Record work that has ended; times on `time.monotonic`.

        Raises:
            StorageError: spans.jsonl cannot be written.
        """
        self._closed.append(Span(name=name, start_s=start_s, end_s=end_s, attrs=attrs))
        line = {"name": name, "start_s": round(start_s, 6), "end_s": round(end_s, 6), **attrs}
        self._spans.append(line)

    def take(self, window: Interval) -> list[Span]:
        """All spans that touch the window, running ones cut at its end. Those that ended inside it are then forgotten:
        windows follow each other, and the file has them."""
        low, high = window
        running = [
            Span(name=s.name, start_s=s.start_s, end_s=high, attrs=s.attrs)
            for s in self._open.values()
            if s.start_s < high
        ]
        taken = [s for s in self._closed if s.end_s > low and s.start_s < high]
        self._closed = [s for s in self._closed if s.end_s > high]
        return taken + running

    def log_step(
        self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """Write one line of metrics.jsonl: {"step", "time_s" (Unix), <scalars>, "histograms"}. It is on the disk before
        this returns. A value that is not finite is written as null.

        Raises:
            StorageError: metrics.jsonl cannot be written.
        """
        histograms = histograms or {}
        line: dict[str, Any] = {"step": step, "time_s": round(time.time(), 3)}
        line.update((name, float(v) if math.isfinite(v) else None) for name, v in scalars.items())
        binned = {name: histogram(values) for name, values in histograms.items()}
        line["histograms"] = {name: h for name, h in binned.items() if h is not None}
        self._metrics.append(line)
        if self._wandb is not None:
            self._wandb.log(step, scalars, histograms)

    def alert(self, title: str, text: str) -> None:
        """Raise an alert in W&B, where it runs. The files have none: metrics.jsonl says when an alarm was on."""
        if self._wandb is not None:
            self._wandb.alert(title, text)

    def close(self) -> None:
        """Close the files and let W&B finish, for a bounded time."""
        self._metrics.close()
        self._spans.close()
        if self._wandb is not None:
            self._wandb.close()
