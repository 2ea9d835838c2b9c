"""What runs, but wastes what it asks for: by the line that the user sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_folders import write_model
from typer.testing import CliRunner

from configs.advice import find_advice
from configs.check import load_run
from orchestrator import cli

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def advice(file: Path, *overrides: str) -> list[str]:
    loaded = load_run(file, overrides)
    return loaded.lines(find_advice(loaded.config))


@pytest.mark.parametrize(
    ("overrides", "raise_to"),
    [
        ((), 20),  # ceil(2 x 16 / 6) + 8 + 6
        (("rollout.slots_per_worker=32",), 25),  # ceil(2 x 32 / 6) + 8 + 6
        (("grader.workers=2",), 28),
        (("sources.arith.groups_per_step=3",), 22),
        (("algorithm.mode=outcome", "grader=null"), 12),
        (("sources.arith.groups_per_step=0", "rollout.workers=64"), 26),  # 3 steps x (4 / .6 + 1 / .5)
        (("scheduler.oversampling={mean: 0.5}",), 16),  # 1.5 x (4 / .6 + 1 / .5 + 1 / .5)
    ],
)
def test_room_for_what_pools_and_batch_hold(overrides: tuple[str, ...], raise_to: int) -> None:
    file = CONFIGS / "quickstart.yaml"
    (line,) = advice(file, *overrides, f"scheduler.max_inflight_groups={raise_to - 1}")
    assert f"scheduler.max_inflight_groups = {raise_to - 1}: may leave pools idle: " in line and str(file) in line
    assert f"; raise it to {raise_to}, or" in line
    assert advice(file, *overrides, f"scheduler.max_inflight_groups={raise_to}") == []


def test_what_is_strictly_on_policy_holds_no_more_than_one_step() -> None:
    file = CONFIGS / "quickstart.yaml"
    assert advice(file, "scheduler={max_inflight_groups: 11, async: false}") == []
    assert len(advice(file, "scheduler={max_inflight_groups: 10, async: false}")) == 1  # 4 / .6 + 1 / .5 + 1 / .5


def test_shipped_configurations_need_no_advice(tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", positions=32768, heads=32)
    assert advice(CONFIGS / "quickstart.yaml") == []
    assert advice(CONFIGS / "learn.yaml") == []
    assert advice(CONFIGS / "cluster.yaml", f"engine.model={policy}", f"learner.model={policy}") == []


@pytest.mark.parametrize("command", [["config", "check"], ["train", "--dry-run"]])
def test_commands_warn_and_go_on(command: list[str]) -> None:
    file = str(CONFIGS / "quickstart.yaml")
    result = CliRunner().invoke(cli.app, [*command, file, "scheduler.max_inflight_groups=12"])
    assert result.exit_code == 0 and result.stderr.startswith("warning: ") and result.stderr.count("\n") == 1
    assert "scheduler.max_inflight_groups = 12" in result.stderr and "raise it to 20" in result.stderr
    quiet = CliRunner().invoke(cli.app, [*command, file])
    assert quiet.exit_code == 0 and quiet.stderr == ""
