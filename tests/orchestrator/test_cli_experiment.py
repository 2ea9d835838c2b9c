"""The commands that hold policies and runs against each other: what they refuse, and what they print."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from evaluations import simple
from run_folder import make_run
from scripted import run_config
from test_experiment import Children, file, open_experiment, run
from typer.testing import CliRunner, Result

from configs.errors import ConfigError
from infra.errors import StorageError
from orchestrator import cli
from orchestrator.evaluation import write_evaluation

__all__ = ["file"]


def gagar(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_an_experiment_says_what_is_left_and_for_how_long(file: Path) -> None:
    plan = gagar("experiment", file, "--dry-run")
    assert plan.exit_code == 0, plan.output
    assert (
        "outcome-s0" in plan.output
        and "4 to go: about 0.4 h (6 minutes a cell, as the configuration says" in plan.output
    )
    assert "capped" not in plan.output and "capped-s2" in gagar("experiment", file, "--dry-run", "--all").output
    early = gagar("experiment", file, "--table")
    assert isinstance(early.exception, ConfigError) and "no such experiment yet" in str(early.exception)
    run(open_experiment(file), Children(open_experiment(file)), ["outcome:0"])
    shown = gagar("experiment", file, "--table")
    assert shown.exit_code == 0 and "| outcome | 1 | 25.0 [" in shown.output
    other = gagar("experiment", file, "set=[steps=9]", "--table")
    assert isinstance(other.exception, StorageError) and "(steps differ)" in str(other.exception)
    assert "3 to go" in gagar("experiment", file, "--dry-run").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--samples", "2", "--pass-at", "3"], "--pass-at 3: needs as many samples of each task; eval.samples is 2"),
        (["--label", "a", "--label", "b"], "--label: 2 names for 1 policies"),
        (["--label", "../a"], "--label ../a: is no name of a file"),
        (["--checkpoint", "nowhere"], "--checkpoint nowhere: not a checkpoint"),
        (["eval=null"], "eval = null: nothing says what to evaluate on"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused_before_anything_starts(
    file: Path, arguments: list[str], said: str
) -> None:
    held = "eval={source: heldout}"
    refused = gagar("eval", file.parent / "base.yaml", *([] if arguments == ["eval=null"] else [held]), *arguments)
    assert isinstance(refused.exception, ConfigError) and said in str(refused.exception)


def test_an_audit_needs_a_judge_and_evaluations(tmp_path: Path) -> None:
    nobody = gagar("audit", "a", "b")
    assert isinstance(nobody.exception, ConfigError) and "nobody is asked to judge" in str(nobody.exception)
    nothing = gagar("audit", tmp_path / "a", tmp_path / "b", "--export", tmp_path / "sheet.html")
    assert isinstance(nothing.exception, ConfigError) and "no evaluation of held-out tasks" in str(nothing.exception)
    useless = gagar("audit", "a", "b", "seed=1", "--export", tmp_path / "sheet.html")
    assert isinstance(useless.exception, ConfigError) and "seed=1: there is no --grader" in str(useless.exception)


def test_a_report_of_one_run_and_of_several(tmp_path: Path) -> None:
    for name in ("a-s0", "a-s1"):
        make_run(tmp_path / name)
        config = run_config(name=name).model_dump(mode="json")
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(config))
        write_evaluation(tmp_path / name / "evaluations" / "after.json", simple(name, [1, 2]))
    one = gagar("report", tmp_path / "a-s0")
    assert one.exit_code == 0 and one.output.strip() == str(tmp_path / "a-s0" / "report.html")
    both = gagar("report", tmp_path / "a-s0", tmp_path / "a-s1", "--output", tmp_path / "both.html")
    assert both.exit_code == 0 and "1 arms, 2 runs" in (tmp_path / "both.html").read_text()
