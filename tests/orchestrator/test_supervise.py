"""A supervisor and drivers that die, hang, fail, or leave processes behind: real processes, in place of a driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

DRIVER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from orchestrator.supervise import beat
run, behaviour = Path(sys.argv[1]), sys.argv[2].split(",")
beat()
run.mkdir(exist_ok=True)
with (run / "starts").open("a") as file:
    file.write(("resumed" if "--resume" in sys.argv else "fresh") + "\\n")
number = len((run / "starts").read_text().splitlines()) - 1
what = behaviour[min(number, len(behaviour) - 1)]
if what == "early":
    os._exit(1)
checkpoint = f"step-{number}" if "progress" in what else None
(run / "status.json").write_text(json.dumps({"pid": os.getpid(), "checkpoint": checkpoint}))
if "orphan" in what:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (run / "orphan").write_text(str(child.pid))
if "killed" in what:
    os.kill(os.getpid(), signal.SIGKILL)
if "signalled" in what:
    os.kill(os.getpid(), 40)
if "hung" in what:
    os.kill(os.getpid(), signal.SIGSTOP)
if "waits" in what:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    (run / "waits").touch()
    time.sleep(600)
sys.exit(int(what.rpartition(" ")[2]))
"""

SUPERVISOR = """
import sys
from pathlib import Path
from orchestrator import supervise
supervise._LEAVE_S, supervise._PAUSE_S, supervise._BEAT_S = 1.0, float(sys.argv[4]), 0.1
command = [sys.executable, "-c", sys.argv[3], sys.argv[1], sys.argv[2]]
say = lambda text: print(text, flush=True)
sys.exit(supervise.supervise(command, Path(sys.argv[1]), restarts=2, silent_after_s=5.0, say=say))
"""


def start(run: Path, behaviour: str, pause_s: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SUPERVISOR, str(run), behaviour, DRIVER, str(pause_s)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "."})


def supervised(run: Path, behaviour: str) -> tuple[int, str, list[str]]:
    process = start(run, behaviour)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output, (run / "starts").read_text().split()


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("progress killed,finished 0", "the driver was ended by SIGKILL; it is started again from step-0"),
        ("progress hung,finished 0", "the driver gave no sign of life for 5 s and was ended"),
        ("progress failed 1,finished 0", "the driver ended with exit code 1"),
        ("progress stalled 3,finished 0", "the driver ended with exit code 3"),
        ("progress signalled,finished 0", "the driver was ended by signal 40"),
    ],
)
def test_a_driver_that_dies_hangs_or_fails_goes_on_from_its_checkpoint(
    tmp_path: Path, behaviour: str, said: str
) -> None:
    code, output, starts = supervised(tmp_path / "run", behaviour)
    assert (code, starts) == (0, ["fresh", "resumed"])
    assert said in output


def test_one_that_never_came_to_its_folder_is_started_as_it_was(tmp_path: Path) -> None:
    """Else it would go on with an earlier run of that name."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "status.json").write_text('{"pid": 1, "checkpoint": "step-9"}')
    code, _, starts = supervised(run, "early,finished 0")
    assert (code, starts) == (0, ["fresh", "fresh"])


@pytest.mark.parametrize("code", [0, 2, 130])
def test_what_is_final_is_not_started_again(tmp_path: Path, code: int) -> None:
    assert supervised(tmp_path / "run", f"ended {code}") == (code, "", ["fresh"])


def test_without_a_new_checkpoint_it_gives_up(tmp_path: Path) -> None:
    code, output, starts = supervised(tmp_path / "run", "failed 1")
    assert (code, starts) == (1, ["fresh", "resumed", "resumed"])
    assert "given up after 3 in a row" in output


def test_a_new_checkpoint_starts_the_count_anew(tmp_path: Path) -> None:
    code, _, starts = supervised(tmp_path / "run", ",".join(["progress failed 1"] * 5 + ["finished 0"]))
    assert (code, len(starts)) == (0, 6)


def test_processes_that_a_killed_driver_left_are_ended(tmp_path: Path) -> None:
    code, output, _ = supervised(tmp_path / "run", "orphan killed,finished 0")
    assert code == 0
    assert "1 of its processes were left and ended" in output
    assert not Path(f"/proc/{(tmp_path / 'run' / 'orphan').read_text()}").exists()


def test_sigterm_reaches_the_driver_and_ends_both(tmp_path: Path) -> None:
    process = start(tmp_path / "run", "waits")
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "run" / "waits").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
    assert (tmp_path / "run" / "starts").read_text().split() == ["fresh"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_two_drivers_ends_it(tmp_path: Path, number: int) -> None:
    process = start(tmp_path / "run", "progress killed,finished 0", pause_s=2.0)
    assert process.stdout is not None
    assert "it is started again" in process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (tmp_path / "run" / "starts").read_text().split() == ["fresh"]


def test_a_pause_of_both_is_no_hung_driver(tmp_path: Path) -> None:
    """Ctrl-Z and fg: the driver may wake up a moment after its supervisor."""
    process = start(tmp_path / "run", "waits")
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "run" / "waits").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    (driver,) = psutil.Process(process.pid).children()
    driver.suspend()
    time.sleep(0.5)
    process.send_signal(signal.SIGSTOP)
    time.sleep(6.0)
    process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    driver.resume()
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (1, "")
