from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from run_folder import make_run

from infra.errors import StorageError
from orchestrator.progress import PoolLoad, ProgressSnapshot, SourceLoad
from orchestrator.status import judge, print_status, write_status

SNAPSHOT = ProgressSnapshot(
    step=3,
    total_steps=12,
    activity="waiting",
    activity_s=2.0,
    pools={"rollout": PoolLoad(busy=30, slots=48)},
    sources={"minirepo": SourceLoad(quota=4, rolling=5, grading=3, ready=1, trained=8, skipped=2, reward=0.5)},
    living=9,
    max_living=12,
    oldest_rollout_s=None,
    oldest_grading_s=None,
    cap_rate=None,
)


def shown(run_dir: Path) -> tuple[int, str]:
    out = io.StringIO()
    code = print_status(run_dir, console=Console(file=out, width=140))
    return code, out.getvalue()


def test_a_running_run_shows_where_it_stands(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_status(tmp_path, SNAPSHOT, state="running", idle_s=65.0, checkpoint="checkpoints/step-000003")
    code, text = shown(tmp_path)
    assert code == 0
    for part in (
        "running (process",
        "3 of 12, waiting",
        "1:05 ago",
        "checkpoints/step-000003",
        "rollout 30/48 busy",
        "5 rolling, 3 grading, 1 of 4 ready, 8 trained, 2 skipped, reward 0.50",
        "metrics of step 3",
        "grading/tier1_share 0.5",
        "learner/loss 0.1",
        "the last rollouts bound 50 % of the step",
    ):
        assert part in text


def test_a_run_whose_process_is_gone_is_dead(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_status(tmp_path, SNAPSHOT, state="running", idle_s=0.0)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    status = json.loads((tmp_path / "status.json").read_text())
    (tmp_path / "status.json").write_text(json.dumps({**status, "pid": int(gone.stdout)}))
    code, text = shown(tmp_path)
    assert code == 1
    assert "dead: process" in text
    assert "--resume" in text


def test_another_process_under_the_same_number_is_not_the_run(tmp_path: Path) -> None:
    write_status(tmp_path, SNAPSHOT, state="running", idle_s=0.0)
    status = json.loads((tmp_path / "status.json").read_text())
    assert judge(status, time.time()) == "running"
    assert judge({**status, "process_start": "1"}, time.time()) == "dead"


def test_on_another_machine_silence_counts_as_death(tmp_path: Path) -> None:
    write_status(tmp_path, SNAPSHOT, state="running", idle_s=0.0)
    status = {**json.loads((tmp_path / "status.json").read_text()), "host": "elsewhere.invalid"}
    assert judge(status, status["written_s"] + 59.0) == "running"
    assert judge(status, status["written_s"] + 61.0) == "dead"


def test_ends_are_told_apart(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_status(tmp_path, SNAPSHOT, state="finished", idle_s=0.0)
    assert shown(tmp_path)[0] == 0
    write_status(tmp_path, SNAPSHOT, state="failed", idle_s=0.0, error="engine: lost [x]")
    code, text = shown(tmp_path)
    assert code == 1
    assert "engine: lost [x]" in text
    assert not list(tmp_path.glob(".status*"))


def test_a_run_that_has_not_written_a_status_yet(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    code, text = shown(tmp_path)
    assert code == 1
    assert "starting" in text


def test_a_missing_run_is_one_clear_error_that_names_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "demo")
    with pytest.raises(StorageError, match=r"dem: not the folder of a run \(runs there: demo\)"):
        print_status(tmp_path / "dem")
    with pytest.raises(StorageError, match="no run stands beside it"):
        print_status(tmp_path / "nowhere" / "x")


def test_a_damaged_status_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(StorageError, match=r"status\.json: cannot be read"):
        print_status(tmp_path)
