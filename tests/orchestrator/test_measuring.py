"""Evaluations of a run that trains: beside its steps, one at a time, with a share of the slots."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluations import ScriptedRollouts
from rich.console import Console
from scripted import run_config

from configs.schema import RunConfig
from envs.minirepo.family import MinirepoTasks
from infra.storage import Storage
from orchestrator.evaluation import read_evaluation
from orchestrator.measuring import Measuring
from orchestrator.progress import Progress
from orchestrator.runfiles import read_jsonl


def parts(run_dir: Path, every: int | None) -> tuple[Measuring, ScriptedRollouts, Console]:
    config: RunConfig = run_config(
        steps=8, eval={"source": "code", "tasks": 2, "samples": 3, "seed": 0, "every_steps": every}
    )
    console = Console(record=True, width=200)
    progress = Progress(8, 60.0, console=console)
    measuring = Measuring(config, run_dir, storage=Storage(), progress=progress, moved=lambda: None)
    return measuring, ScriptedRollouts(MinirepoTasks("code", config.sources["code"])), console  # type: ignore[arg-type]


async def test_steps_go_on_while_an_evaluation_runs_beside_them(tmp_path: Path) -> None:
    measuring, rollouts, console = parts(tmp_path, every=2)
    after_step = measuring.beside(rollouts)  # type: ignore[arg-type]
    for step in range(1, 9):
        after_step(step)  # returns at once: nothing has been sampled yet
    assert rollouts.running == 0 and measuring.scalars() == {}
    await measuring.settle()
    assert rollouts.most == 2, "a quarter of the eight slots"
    (line,) = read_jsonl(tmp_path / "eval.jsonl")
    assert line["label"] == "step-000002" and line["step"] == 2 and line["pass_rate"] == pytest.approx(0.5)
    said = console.export_text()
    assert "no evaluation after step 4" in said and "no evaluation after step 6" in said
    assert "after step 8" not in said, "the last step has an evaluation of its own"
    assert read_evaluation(tmp_path / "evaluations" / "step-000002.json").samples == 3
    assert (tmp_path / "evaluations" / "step-000002" / "eval-step-000002-00000.json.gz").is_file()
    scalars = measuring.scalars()
    assert scalars["eval/code/avg_at_k"] == pytest.approx(0.5) and scalars["eval/code/known_tier1_share"] == 1.0
    assert "eval/code/pass_at_k" not in scalars, "each task lost a sample, so nothing says pass@3"
    assert measuring.scalars() == {}, "each evaluation is told once"
    after_step(6)
    await measuring.settle()
    assert [line["label"] for line in read_jsonl(tmp_path / "eval.jsonl")] == ["step-000002", "step-000006"]


async def test_nothing_is_evaluated_beside_steps_unless_asked(tmp_path: Path) -> None:
    measuring, rollouts, _ = parts(tmp_path, every=None)
    after_step = measuring.beside(rollouts)  # type: ignore[arg-type]
    for step in range(1, 9):
        after_step(step)
    await measuring.settle()
    assert read_jsonl(tmp_path / "eval.jsonl") == [] and rollouts.most == 0


async def test_what_goes_wrong_beside_the_steps_is_raised_when_it_settles(tmp_path: Path) -> None:
    measuring, rollouts, _ = parts(tmp_path, every=1)
    rollouts.call = None  # type: ignore[method-assign,assignment]
    measuring.beside(rollouts)(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        await measuring.settle()
    measuring.stop()
