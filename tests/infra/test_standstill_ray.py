"""A real Ray that hangs: what is written of its processes, what they listen on, and what is left of them."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.watchdog import EXIT_STALLED

pytestmark = pytest.mark.e2e
SCENARIO = Path(__file__).with_name("standstill_scenario.py")


@dataclass
class Hang:
    """The scenario, once it is over."""

    folder: Path
    code: int
    said: str
    listeners: list[dict[str, Any]]
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Hang:
    folder = tmp_path_factory.mktemp("run")
    ended = subprocess.run(
        [sys.executable, str(SCENARIO), str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(SCENARIO.parents[2])},
    )
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert lines, ended.stderr
    return Hang(folder, ended.returncode, ended.stderr, lines[:-1], lines[-1])


def stacks(hang: Hang) -> Path:
    return sorted((hang.folder / "stacks").iterdir())[-1]


def test_the_run_ends_with_the_code_of_a_stall(hang: Hang) -> None:
    assert hang.code == EXIT_STALLED, hang.said
    assert "the event loop is blocked" in hang.said


def test_a_stopped_actor_is_described(hang: Hang) -> None:
    text = (stacks(hang) / f"{os.uname().nodename}-{hang.facts['stopped']}.txt").read_text()
    assert "state T (stopped by a signal)" in text and "did not write its stacks" in text
    assert "ray::Worker" in text
    assert f"(pid {hang.facts['stopped']} on {os.uname().nodename}) did not write its stacks: T (stopped" in hang.said


def test_a_blocked_actor_shows_the_function_it_is_in(hang: Hang) -> None:
    texts = [path.read_text() for path in stacks(hang).glob(f"{os.uname().nodename}-*.txt")]
    assert len(texts) == 2
    assert sum("a_function_that_blocks" in text for text in texts) == 1


def test_the_report_names_the_pool_its_oldest_call_and_the_process(hang: Hang) -> None:
    assert "rollouts waits for a call that never ends since" in hang.said
    line = next(line for line in hang.said.splitlines() if "pool rollout: 2 live" in line)
    assert "2 of 2 slots busy" in line
    assert "its oldest call: block on rollout-" in line and ", pid " in line


def test_the_driver_shows_what_blocks_it(hang: Hang) -> None:
    text = (stacks(hang) / "driver.txt").read_text()
    assert "standstill_scenario.py" in text and "in main" in text


def test_everything_that_listens_is_on_the_loopback_address(hang: Hang) -> None:
    names = {one["process"] for one in hang.listeners}
    assert {"gcs_server", "raylet"} <= names and any(name.startswith("ray::Worker") for name in names)
    # An IPv4 address as IPv6 sockets show it counts as what it is.
    addresses = [
        (one["process"], ipaddress.ip_address(one["address"].removeprefix("::ffff:"))) for one in hang.listeners
    ]
    assert [(name, address) for name, address in addresses if not address.is_loopback] == []


def test_no_process_is_left(hang: Hang) -> None:
    deadline_s = time.monotonic() + 30.0
    while left := [pid for pid in hang.facts["children"] if psutil.pid_exists(pid)]:
        names = [psutil.Process(pid).name() for pid in left]
        agents = all(name.startswith(("ray::Dashboard", "ray::RuntimeEnv", "python")) for name in names)
        if agents:  # Ray's own agents notice up to a minute later that their raylet is gone
            break
        assert time.monotonic() < deadline_s, names
        time.sleep(0.5)
