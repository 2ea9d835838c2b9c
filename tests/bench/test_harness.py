"""The harnesses find what is wrong: damage to a folder of a run, a process that stays, a quantity that grows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from orchestrator.ledger_store import LedgerStore
from orchestrator.manifest import write_manifest
from tests.bench import driven
from tests.bench.faults import chosen
from tests.bench.record import Expected, look
from tests.bench.rewards import compared
from tests.bench.soak import theil_sen

EXPECTED = Expected(quotas={"arith": 1}, max_staleness=2, every_steps=1)


def group(index: int, step: int) -> dict[str, Any]:
    """A line of groups.jsonl: two of three pass, so the mean is 2/3."""
    return {
        "group_id": f"arith-{index:06d}",
        "source": "arith",
        "step": step,
        "mode": "outcome",
        "outcome": "trained",
        "lambda_max": None,
        "grader": None,
        "trajectories": [
            {"id": f"arith-{index:06d}/{i}.0", "valid": True, "passed": r == 1.0, "reward": r, "factor": None,
             "advantage": a, "policy_versions": [step - 1]}
            for i, (r, a) in enumerate([(1.0, 1 / 3), (1.0, 1 / 3), (0.0, -2 / 3)])
        ],
    }  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two steps, a checkpoint at each, and an open ledger."""
    run = tmp_path / "run"
    for step in (1, 2):
        write_step(run, step)
    LedgerStore(run / "ledger.sqlite", run / "rollouts").close()
    return run


def write_step(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step-{step:06d}"
    (folder / "policy").mkdir(parents=True)
    (folder / "learner" / "state").mkdir(parents=True)
    write(run / "metrics.jsonl", [{"step": s} for s in range(1, step + 1)])
    write(run / "groups.jsonl", [group(s - 1, s) for s in range(1, step + 1)])
    save_file({"w": np.ones(4096, dtype=np.float32)}, folder / "policy" / "model.safetensors")
    np.savez(folder / "learner" / "state" / "model.npz", w=np.ones(4096))
    (folder / "learner" / "state" / "model.npz").rename(folder / "learner" / "state" / "model.pt")
    (folder / "learner" / "learner.json").write_text("{}")
    logs = {name: (run / name).stat().st_size for name in ("metrics.jsonl", "groups.jsonl")}
    (folder / "state.json").write_text(json.dumps({"step": step, "logs": logs}))
    write_manifest(folder)


def edited(name: str, edit: Callable[[list[dict[str, Any]]], Any]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        edit(rows)
        write(run / name, rows)

    return damage


def cut(path: str, size: int) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = (run / path).read_bytes()
        (run / path).write_bytes(data[:size])

    return damage


def flip(path: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = bytearray((run / path).read_bytes())
        data[len(data) // 2] ^= 0xFF
        (run / path).write_bytes(data)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "step twice": (edited("metrics.jsonl", lambda rows: rows.append({"step": 2})), "steps are"),
    "gap": (edited("metrics.jsonl", lambda rows: rows.pop(0)), "steps are"),
    "far beyond": (edited("metrics.jsonl", lambda rows: rows.extend([{"step": 3}, {"step": 4}])), "4 steps with"),
    "group twice": (edited("groups.jsonl", lambda rows: rows.append(group(1, 2))), "more than one line"),
    "quota": (edited("groups.jsonl", lambda rows: rows.append(group(2, 2))), "step 2 trained on"),
    "advantage": (
        edited("groups.jsonl", lambda rows: rows[0]["trajectories"][0].update(advantage=0.3333)),
        "should be",
    ),
    "stale": (edited("groups.jsonl", lambda rows: rows[1]["trajectories"][0].update(policy_versions=[-2])), "3 steps"),
    "lost group": (edited("groups.jsonl", lambda rows: rows[0].update(group_id="arith-000005")), "are nowhere"),
    "torn line": (lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n'), "not JSON"),
    "log too short": (cut("groups.jsonl", 100), "the checkpoint of step 2 covers"),
    "weights cut": (cut("checkpoints/step-000002/policy/model.safetensors", 1000), "not whole"),
    "learner damaged": (flip("checkpoints/step-000002/learner/state/model.pt"), "model.pt"),
    "half removed": (lambda run: shutil.rmtree(run / "checkpoints/step-000001/learner"), "step-000001: not whole"),
    "ledger": (cut("ledger.sqlite", 2000), "ledger.sqlite"),
}


def test_a_sound_folder_has_no_faults(run_dir: Path) -> None:
    found = look(run_dir, EXPECTED)
    assert (found.faults, found.steps, found.trained, found.promise.step) == ([], 2, 2, 2)


def test_the_last_line_may_be_torn_by_a_kill_only(run_dir: Path) -> None:
    with (run_dir / "groups.jsonl").open("a") as file:
        file.write('{"group_')
    assert look(run_dir, EXPECTED).faults == []
    assert any("has no end" in fault for fault in look(run_dir, EXPECTED, at_rest=True).faults)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(run_dir: Path, name: str) -> None:
    damage, words = DAMAGE[name]
    damage(run_dir)
    assert any(words in fault for fault in look(run_dir, EXPECTED).faults)


def test_what_a_checkpoint_covers_must_stay(run_dir: Path) -> None:
    before = look(run_dir, EXPECTED).promise
    write_step(run_dir, 3)
    assert look(run_dir, EXPECTED, before).faults == []
    edited("metrics.jsonl", lambda rows: rows[1].update(loss=1.0))(run_dir)
    assert any("were written again" in fault for fault in look(run_dir, EXPECTED, before).faults)
    shutil.rmtree(run_dir / "checkpoints")
    assert any("it was 2" in fault for fault in look(run_dir, EXPECTED, before).faults)


HARNESS = """
import json, signal, sys
from pathlib import Path
from tests.bench import driven
driven.adopt_orphans()
run = driven.Driven([sys.executable, "-c", sys.argv[1]], console=Path(sys.argv[2]))
assert driven.wait_for(lambda: len(driven.descendants()) == 2, 60.0)
run.signal(signal.SIGKILL)
gone = run.gone(float(sys.argv[3]))
print(json.dumps([gone.took_s, len(gone.left), len(driven.descendants()), run.leftovers()]))
run.clean()
"""


@pytest.mark.parametrize("stays", [True, False])
def test_a_process_that_outlives_its_driver_is_found_and_ended(tmp_path: Path, stays: bool) -> None:
    """One that has left the driver's session and whose parent is dead, too."""
    sleep_s = 90.0 if stays else 5.0
    child = f"import os, time; os.setsid(); time.sleep({sleep_s})"
    driver = (
        "import pathlib, subprocess, sys, tempfile, time; tempfile.mkdtemp(prefix='gagar-jail-');"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(90)"
    )
    out = subprocess.run(
        [sys.executable, "-c", HARNESS, driver, str(tmp_path / "console.txt"), "2" if stays else "40"],
        cwd=driven.ROOT, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    took_s, left, after, leftovers = json.loads(out.stdout)
    assert (left, after) == (int(stays), 0)
    assert took_s >= 2.0 if stays else took_s < 40.0
    assert leftovers == {"ray_sessions": 0, "ray_bytes": 0, "shm": 0, "gagar-jail": 1}


WIRES = """
import subprocess, sys, time
from tests.bench.cluster import Network, NetworkMissing
try:
    network = Network()
except NetworkMissing as error:
    print("none:", error)
    sys.exit()
ASK = "import socket; socket.create_connection(('10.213.0.2', 8123), 2)"
SERVE = "import socket; s = socket.create_server(('10.213.0.2', 8123)); print('up', flush=True)\\nwhile 1: s.accept()"
here, there = network.wire(), network.wire()
server = subprocess.Popen([*here.prefix, sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
server.stdout.readline()
def asked(*prefix):
    done = subprocess.run([*prefix, sys.executable, "-c", ASK], capture_output=True, text=True)
    return done.returncode == 0
print(asked(), asked(*there.prefix))
here.cut()
print(asked(), asked(*there.prefix))
here.mend()
here.slow("1mbit")
print(asked(), asked(*there.prefix))
server.kill()
"""


def test_a_node_can_be_cut_off_and_plugged_in_again() -> None:
    out = subprocess.run(
        [sys.executable, "-c", WIRES], cwd=driven.ROOT, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    if out.startswith("none:"):
        pytest.skip(out)
    assert out.split() == ["True", "True", "False", "False", "True", "True"]


def test_roles_of_command_lines() -> None:
    assert driven.role("/v/bin/python -m orchestrator.cli train c.yaml telemetry.wandb.mode=offline") == "driver"
    assert driven.role("ray::RolloutWorker.rollout") == "rollout worker"
    assert driven.role("/v/bin/wandb-core --port-filename /tmp/x") == "wandb"
    assert driven.role("python3 -m unittest -q") == "other"
    workers = "--python_worker_command=python setup_worker.py default_worker.py"
    assert driven.role(f"/v/ray/core/src/ray/raylet/raylet --node_id=ab {workers}") == "raylet"
    assert driven.role("/v/bin/python /v/bin/ray start --block --head") == "ray node"


def test_rewards_are_compared_by_trajectory() -> None:
    def line(reward: float, tokens: int = 9, name: str = "a/0.0", valid: bool = True) -> dict[str, Any]:
        t = {"id": name, "valid": valid, "turns": 2, "response_tokens": tokens, "outcome_reward": reward}
        return {"trajectories": [t]}

    found = compared(
        [
            line(1.0),
            line(0.0, name="b/0.0"),
            line(1.0, 8, "c/0.0"),
            line(0.0, name="d/1.1"),
            line(0.0, 9, "e/0.0", False),
        ],
        [line(1.0), line(1.0, name="b/0.0"), line(1.0, 9, "c/0.0"), line(1.0, name="d/1.0"), line(1.0, 9, "e/0.0")],
    )
    assert (found["same_as_without_faults"], found["sampled_otherwise"]) == (1, 1)
    assert found["different"] == ["b/0.0: reward 0.0, without faults 1.0"]


@pytest.mark.parametrize(
    ("only", "cells"),
    [
        ([], 57),
        (["learner:killed"], 4),
        (["wandb", "node:hung:learning"], 4),
        (["link", "node:cut"], 6),
        (["nothing"], 0),
    ],
)
def test_cells_are_selected(only: list[str], cells: int) -> None:
    found = chosen(only)
    assert len(found) == cells


def test_theil_sen_by_hand() -> None:
    # Pairs of (0, 0), (1 h, 2), (2 h, 3), (3 h, 100): slopes 2, 1.5, 33.3, 1, 49, 97; median (2 + 33.3) / 2.
    slope, low, high = theil_sen([0, 3600, 7200, 10800], [0.0, 2.0, 3.0, 100.0])
    assert slope == pytest.approx((2 + 100 / 3) / 2)
    assert low <= slope <= high
    flat = theil_sen([15.0 * i for i in range(40)], [float(i % 2) for i in range(40)])
    assert flat[0] == 0.0 and flat[1] <= 0.0 <= flat[2]
    rising = theil_sen([15.0 * i for i in range(40)], [i * 0.5 + i % 3 for i in range(40)])
    assert rising[0] == pytest.approx(120.0, rel=0.05) and rising[1] > 0.0
