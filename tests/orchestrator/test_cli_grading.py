"""The commands about grades: help, exit codes and messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from graded_run import record_of, write_run
from stored_groups import stored_group
from typer.testing import CliRunner

from orchestrator import cli

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "numpy", "wandb", "rich.table", "jinja2")


def gagar(*arguments: str, check: str = "pass") -> subprocess.CompletedProcess[str]:
    code = f"import sys; from orchestrator import cli\ntry: cli.main()\nfinally: {check}"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", [["grade"], ["show", "group"]])
def test_help_shows_an_example_and_loads_nothing_heavy(command: list[str]) -> None:
    done = gagar(*command, "--help", check=f"print('heavy:', sorted(set({HEAVY!r}) & set(sys.modules)))")
    assert done.returncode == 0, done.stderr
    assert f"Example: gagar {' '.join(command)} " in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_what_cannot_be_graded_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    done = gagar("grade", str(tmp_path / "no"), "--grader", str(CONFIG))
    assert done.returncode == 2
    assert done.stderr == f"gagar: {tmp_path / 'no'}: no such folder; give a run, a folder of stored groups, or " + (
        "minirepo:heldout:N[:SEED]\n"
    )
    done = gagar("grade", "minirepo:heldout:1", "--grader", str(CONFIG), "grader=null", "algorithm.mode=outcome")
    assert done.returncode == 2
    assert "grader = null: there is nobody to grade" in done.stderr


def test_a_damaged_group_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "group.json").write_text('{"group_id": "a", "statement": "x"}')
    done = gagar("grade", str(tmp_path), "--grader", str(CONFIG))
    assert done.returncode == 1
    assert done.stderr.startswith(f"gagar: storage: {tmp_path / 'group.json'}: trajectories is missing; add it")


def test_a_message_about_a_file_from_elsewhere_leaves_the_terminal_alone(tmp_path: Path) -> None:
    group = {
        "group_id": "a",
        "statement": "x",
        "trajectories": [{"id": "\x1b[31ma\u202e", "passed": True}],
        "labels": {"\x1b]0;title\x07\x1b[2J": {"scores": [9] * 5}},
    }
    (tmp_path / "group.json").write_text(json.dumps(group))
    done = gagar("grade", str(tmp_path), "--grader", str(CONFIG))
    assert done.returncode == 1
    assert "labels.\\x1b]0;title\\x07\\x1b[2J.scores.0 = 9" in done.stderr
    group["labels"] = {"b": {"scores": [5] * 5}}
    (tmp_path / "group.json").write_text(json.dumps(group))
    done = gagar("grade", str(tmp_path), "--grader", str(CONFIG))
    assert "known are \\x1b[31ma\\u202e" in done.stderr
    assert done.stderr.removesuffix("\n").isprintable()


def test_show_group_prints_a_group_and_writes_its_page(tmp_path: Path) -> None:
    group = stored_group()
    write_run(tmp_path, [(group, record_of(group))])
    shown = CliRunner().invoke(cli.app, ["show", "group", str(tmp_path), "g1"])
    assert shown.exit_code == 0 and "total([1, 2]) returns -3" in shown.output
    page = tmp_path / "g1.html"
    done = CliRunner().invoke(cli.app, ["show", "group", str(tmp_path), "g1", "--html", str(page)])
    assert done.exit_code == 0 and page.is_file()
    lost = gagar("show", "group", str(tmp_path), "g2")
    assert lost.returncode == 1 and "no group 'g2' has ended there; try g1" in lost.stderr
