"""A real W&B, offline: its service killed or stopped in the middle of a run costs a warning and nothing else."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from configs.schema import WandbConfig
from infra.wandb_sink import WandbSink


def services(sink: WandbSink) -> list[int]:
    """W&B's service of this sink."""
    process = sink._process
    if process is None:
        return []
    return [p.pid for p in process._services if p.is_running() and p.name().startswith("wandb-core")]


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def until(condition: object, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.1)


def recorded(run_dir: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_dies_or_hangs_is_replaced_under_the_same_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sent: signal.Signals
) -> None:
    caplog.set_level(logging.WARNING, logger="gagar.telemetry")
    sink = WandbSink(tmp_path, WandbConfig(mode="offline"), mode="offline", run_config={}, answer_s=8.0)
    sink.log(1, {"step_one": 0.25}, {"lambda": [1.0, 1.5]})
    until(lambda: sink._process is not None and services(sink) and sink._work.empty())
    time.sleep(3.0)
    (service,) = services(sink)
    os.kill(service, sent)
    if sent == signal.SIGKILL:
        until(lambda: gone(service))  # what is sent to it before that is only in metrics.jsonl
    begin_s = time.monotonic()
    for step in (2, 3):
        sink.log(step, {f"after_{step}": 0.5}, {})
    assert time.monotonic() - begin_s < 0.1, "the run waits for nothing"
    until(lambda: len(list(tmp_path.glob("wandb/offline-run-*"))) == 2)
    sink.close()
    content = recorded(tmp_path)
    assert b"after_2" in content and b"after_3" in content
    ids = {p.name.rpartition("-")[2] for p in tmp_path.glob("wandb/offline-run-*")}
    assert ids == {(tmp_path / "wandb_run_id").read_text().strip()}
    assert [r.message.partition(" (")[0] for r in caplog.records] == ["Weights & Biases: lost"]
    until(lambda: gone(service), 10.0)


def test_closing_is_bounded_and_leaves_no_process(tmp_path: Path) -> None:
    sink = WandbSink(tmp_path, WandbConfig(mode="offline"), mode="offline", run_config={}, answer_s=60.0)
    sink.log(1, {"a": 0.25}, {})
    until(lambda: sink._process is not None and services(sink) and sink._work.empty())
    process = sink._process
    assert process is not None
    (service,) = services(sink)
    os.kill(service, signal.SIGSTOP)
    sink.log(2, {"a": 0.25}, {})
    begin_s = time.monotonic()
    sink.close(timeout_s=2.0)
    assert time.monotonic() - begin_s < 8.0
    until(lambda: gone(process._process.pid) and gone(service), 10.0)


def test_a_service_that_is_lost_again_and_again_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, logger="gagar.telemetry")
    monkeypatch.setattr("sys.executable", "/bin/false")
    sink = WandbSink(tmp_path, WandbConfig(mode="offline"), mode="offline", run_config={})
    sink.close(timeout_s=20.0)
    assert [r.message.partition(" (")[0] for r in caplog.records] == [
        "Weights & Biases: lost",
        "Weights & Biases: switched off",
    ]
