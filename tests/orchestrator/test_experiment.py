"""Experiments: what is started in which order, what a stop leaves, and figures by hand. The children are scripted."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluations import simple

from configs.errors import ConfigError
from configs.experiment_schema import ExperimentConfig
from configs.load import load
from configs.schema import AdvantageMode
from infra.errors import GagarError, StorageError
from orchestrator.evaluation import write_evaluation
from orchestrator.experiment import CellState, Experiment, alone, differing, load_experiment, remaining
from orchestrator.experiment_run import Say, child, run_experiment
from orchestrator.experiment_table import markdown, write_table

BASE = """\
name: base
steps: 4
sources:
  code: {type: minirepo, groups_per_step: 2, seed: 3}
  heldout: {type: minirepo, groups_per_step: 0, seed: 900}
engine: {model: policy}
learner: {model: policy}
grader: {backend: {type: vllm, engine: {model: policy}}}
"""
OUTCOME = "algorithm: {mode: outcome}\ngrader: null\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 9000}')
    (folder / "tokenizer.json").write_text("{}")
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "outcome.yaml").write_text(OUTCOME)
    (tmp_path / "experiment.yaml").write_text(
        f"name: trial\noutput: {tmp_path}/runs\nbase: base.yaml\nseeds: [0, 2]\nreference: outcome\n"
        "run: [outcome, redistribute]\ncell_minutes: 6\nevaluation: {source: heldout, tasks: 4, samples: 3}\n"
        "arms:\n  outcome: {files: [outcome.yaml]}\n  redistribute: {}\n  capped: {set: [algorithm.lambda_max=1.2]}\n"
        "against: {capped: redistribute}\n"
    )
    return tmp_path / "experiment.yaml"


def open_experiment(file: Path, *overrides: str) -> Experiment:
    return load_experiment(load(ExperimentConfig, file, overrides))


PASSES = {"start": 0, "outcome": 1, "redistribute": 2, "capped": 3}
"""Of three, of each task but one."""


class Children:
    """Stands for the processes: a training leaves a run's folder, an evaluation its file."""

    def __init__(self, experiment: Experiment, fail: Sequence[str] = (), cut: Sequence[str] = ()) -> None:
        self.experiment = experiment
        self.fail, self.cut = fail, cut
        self.asked: list[str] = []
        self.running = self.most = 0

    async def __call__(self, command: Sequence[str], log: Path, say: Say) -> int:
        words = list(command[3:])
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if words[0] == "train":
            name = Path(words[1]).stem
            self.asked.append(f"train {name}" + (" --resume" if "--resume" in words else ""))
            return self.train(name, Path(words[1]), log)
        label = words[words.index("--label") + 1]
        self.asked.append(f"eval {label}")
        passes = PASSES[label.rpartition("-s")[0] or label]
        found = simple(label, [passes, passes, 0, passes], t1=1)
        write_evaluation(Path(words[words.index("--output") + 1]) / f"{label}.json", found)
        return 0

    def train(self, name: str, config: Path, log: Path) -> int:
        if name in self.fail:
            log.write_text("Ray started\nthe engine is gone\n")
            return 1
        run_dir = self.experiment.folder / name
        steps = yaml.safe_load(config.read_text())["steps"]
        last = run_dir / "checkpoints" / f"step-{steps:06d}"
        last.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(config.read_text())
        if name in self.cut:
            return 1
        metrics = [step(i + 1, entropy=0.5 - 0.1 * i) for i in range(steps)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
        (last / "manifest.json").write_text("{}")
        return 0


def step(number: int, **learner: float) -> dict[str, Any]:
    return {
        "step": number,
        "time_s": 100.0 + 10.0 * number,
        "time/step_s": 10.0,
        "trajectories/pass_rate": 0.1 * number,
        "trajectories/response_tokens_mean": 50.0,
        "histograms": {"trajectories/response_tokens": {"edges": [0, 1, 2], "counts": [4, 6]}},
        **{f"learner/{name}": value for name, value in learner.items()},
    }


def run(experiment: Experiment, children: Children, only: Sequence[str] = (), *, everything: bool = False) -> list[str]:
    said: list[str] = []
    cells = experiment.chosen(only, everything=everything)
    return asyncio.run(run_experiment(experiment, cells, say=said.append, run=children))


def test_a_whole_experiment_seed_by_seed_and_its_table(file: Path) -> None:
    experiment = open_experiment(file)
    children = Children(experiment)
    assert run(experiment, children) == []
    assert children.asked == [
        "eval start",
        *("train outcome-s0", "eval outcome-s0", "train redistribute-s0", "eval redistribute-s0"),
        *("train outcome-s2", "eval outcome-s2", "train redistribute-s2", "eval redistribute-s2"),
    ]
    assert children.most == 1, "one at a time, where nothing else is said"
    result = json.loads((experiment.folder / "experiment.json").read_text())
    arm = result["arms"]["redistribute"]
    assert arm["seeds"] == [0, 2]
    assert arm["heldout"]["avg@3"]["value"] == pytest.approx(6 / 12)
    assert arm["heldout"]["T1 of graded passes"]["value"] == pytest.approx(1 / 2)
    assert arm["trained"]["entropy"]["mean"] == pytest.approx(0.35) and arm["trained"]["cap rate"] is None
    apart = result["differences"]["redistribute"]
    assert apart["against"] == "outcome" and apart["heldout"]["avg@3"]["value"] == pytest.approx(3 / 12)
    assert apart["heldout"]["T1 of graded passes"]["value"] == pytest.approx(-1 / 2)
    assert result["start"]["avg@3"]["value"] == 0.0
    assert len(result["cells"]) == 4, "the arm that nobody asked for is not missing"
    cost = result["cost"]["outcome"]
    assert cost["tokens"] == pytest.approx(4 * 10 * 50.0) and cost["pass_rate"] == pytest.approx(0.25)
    text = (experiment.folder / "table.md").read_text()
    assert text == markdown(result)
    assert "| redistribute | outcome | 2 | +25.0 [" in text.replace("**", "")
    assert "**-50.0 [-50.0, -50.0] points**" in text, "clear of zero"


def test_what_is_complete_is_left_alone_and_what_is_half_done_goes_on(file: Path) -> None:
    experiment = open_experiment(file)
    first = Children(experiment, cut=["redistribute-s0"], fail=["outcome-s2"])
    assert run(experiment, first) == ["redistribute-s0", "outcome-s2"]
    assert "eval redistribute-s2" in first.asked, "the others go on"
    states = {cell.name: experiment.state(cell) for cell in experiment.chosen()}
    assert states == {
        "outcome-s0": CellState.DONE,
        "redistribute-s0": CellState.HALF,
        "outcome-s2": CellState.NEW,
        "redistribute-s2": CellState.DONE,
    }
    second = Children(experiment)
    assert run(experiment, second) == []
    assert second.asked == [
        *("train redistribute-s0 --resume", "eval redistribute-s0", "train outcome-s2", "eval outcome-s2")
    ]
    left = remaining(experiment, experiment.chosen(everything=True))
    assert left.cells == 2 and left.hours is not None and "mean of the 4" in left.basis
    with (experiment.folder / "cells.jsonl").open("w") as out:
        for phase, seconds, code in (("train", 9000, 1), ("train", 60, None), ("train", 240, 0), ("eval", 60, 0)):
            out.write(json.dumps({"cell": "outcome-s2", "phase": phase, "seconds": seconds, "exit_code": code}) + "\n")
    left = remaining(experiment, experiment.chosen(everything=True))
    assert left.hours == pytest.approx(2 * 6 / 60), "two cells of six minutes: what failed does not count"


def test_a_cell_of_another_configuration_is_refused_by_key(file: Path) -> None:
    run(open_experiment(file), Children(open_experiment(file)), ["outcome:0"])
    with pytest.raises(
        StorageError, match=r"outcome-s0: was begun with another configuration \(learner\.optimizer\.lr"
    ):
        run(other := open_experiment(file, "set=[learner.optimizer.lr=0.5]"), Children(other))


def test_what_stands_in_one_table_was_begun_with_one_configuration(file: Path) -> None:
    run(open_experiment(file), Children(open_experiment(file)), ["outcome:0"])
    other = open_experiment(file, "set=[learner.optimizer.lr=0.5]")
    with pytest.raises(StorageError, match=r"outcome-s0: was begun with another configuration"):
        run(other, Children(other), ["capped:0"])  # outcome-s0 is not asked for, but would stand beside it
    fewer = open_experiment(file, "evaluation.samples=2")
    with pytest.raises(StorageError, match=r"evaluations: was begun with another configuration \(eval\.samples differ"):
        run(fewer, Children(fewer))
    with pytest.raises(
        StorageError, match=r"outcome-s0\.json: is of 4 tasks with 3 samples, the experiment of 4 with 2"
    ):
        write_table(fewer)  # else avg@3 would stand under avg@2


def test_a_cell_that_was_moved_away_does_not_leave_its_figures(file: Path) -> None:
    experiment = open_experiment(file)
    run(experiment, Children(experiment), ["outcome:0"])
    cell = experiment.folder / "outcome-s0"
    cell.rename(experiment.folder / "old")
    with pytest.raises(StorageError, match=r"outcome-s0\.json: its run is gone"):
        run(experiment, Children(experiment), ["outcome:0"])
    experiment.evaluation_file("outcome-s0").unlink()
    again = Children(experiment)
    assert run(experiment, again, ["outcome:0"]) == [] and again.asked == ["train outcome-s0", "eval outcome-s0"]


def test_a_damaged_file_of_a_complete_cell_is_told_before_anything_runs(file: Path) -> None:
    experiment = open_experiment(file)
    run(experiment, Children(experiment), ["outcome:0"])
    metrics = experiment.folder / "outcome-s0" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole[:-20])
    assert write_table(experiment)["cost"]["outcome"]["steps"] == 3.0, "a last line that was cut off is left out"
    metrics.write_text(whole.replace('"step": 2', '"step" 2'))
    later = Children(experiment)
    with pytest.raises(StorageError, match=r"metrics\.jsonl:2: not JSON"):
        run(experiment, later)
    assert later.asked == []


def test_two_processes_do_not_work_on_one_experiment(file: Path) -> None:
    experiment = open_experiment(file)
    with alone(experiment), pytest.raises(GagarError, match="another process runs this experiment"):
        run(experiment, Children(experiment))
    assert run(experiment, Children(experiment), ["outcome:0"]) == []


def test_a_table_without_the_reference_and_without_a_cells_files(file: Path) -> None:
    experiment = open_experiment(file)
    run(experiment, Children(experiment), ["redistribute", "capped:0"])
    (experiment.folder / "capped-s0" / "metrics.jsonl").unlink()
    result = write_table(experiment)
    assert result["differences"]["capped"]["seeds"] == [0]
    assert list(result["cost"]) == ["redistribute"] and result["cost"]["redistribute"]["tokens_saved"] is None
    text = markdown(result)
    assert "| capped | redistribute | 1 | +25.0 [+8.3, +33.3] points |" in text, "one seed: not bold"
    assert "saved against outcome %" in text


def test_arms_share_the_order_of_tasks_and_seeds_do_not(file: Path) -> None:
    cells = {cell.name: cell.config for cell in open_experiment(file).cells}
    seeds = {name: (c.seed, c.sources["code"].seed, c.sources["heldout"].seed) for name, c in cells.items()}
    assert seeds["outcome-s0"] == seeds["redistribute-s0"] == seeds["capped-s0"] == (0, 3, 900)
    assert seeds["outcome-s2"] == seeds["redistribute-s2"] == (2, 2003, 900)
    assert cells["capped-s2"].algorithm.lambda_max == 1.2 and cells["redistribute-s2"].algorithm.lambda_max == 1.5
    assert all(c.eval is None for c in cells.values()), "each is evaluated once, afterwards, by one judge"
    beside = open_experiment(file, "evaluation.every_steps=2").cells[0].config.eval
    assert beside is not None and (beside.every_steps, beside.before, beside.after, beside.tasks) == (
        2,
        False,
        False,
        4,
    )


def test_only_and_all_choose_cells(file: Path) -> None:
    experiment = open_experiment(file)
    assert [c.name for c in experiment.chosen(["capped:2", "outcome"])] == ["outcome-s0", "outcome-s2", "capped-s2"]
    assert len(experiment.chosen(everything=True)) == 6
    with pytest.raises(ConfigError, match="--only capped:1: no such cell"):
        experiment.chosen(["capped:1"])


def test_mistakes_are_found_before_anything_runs(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"arm capped: .*unknown key"):
        open_experiment(file, "arms.capped.set=[algorithm.lambda_maxi=1]")
    with pytest.raises(ConfigError, match="reference names 'none', which is no arm"):
        open_experiment(file, "reference=none")
    with pytest.raises(ConfigError, match="is trained on too"):
        open_experiment(file, "evaluation.source=code")


def test_a_start_that_cannot_be_evaluated_ends_it(file: Path) -> None:
    class Broken(Children):
        async def __call__(self, command: Sequence[str], log: Path, say: Say) -> int:
            return 3

    experiment = open_experiment(file)
    with pytest.raises(GagarError, match="the start policy could not be evaluated"):
        run(experiment, Broken(experiment))


def test_cells_at_once(file: Path) -> None:
    experiment = open_experiment(file, "parallel=3")
    children = Children(experiment)
    run(experiment, children)
    assert children.most == 3
    assert remaining(experiment, experiment.chosen(["capped"])).hours is not None


async def test_a_child_that_is_stopped_gets_a_sigterm_and_ends(tmp_path: Path) -> None:
    said: list[str] = []
    program = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit('saved'))\nprint('up')\ntime.sleep(60)"
    log = tmp_path / "log"
    task = asyncio.create_task(child([sys.executable, "-c", program], log, said.append))
    while not log.exists() or "up" not in log.read_text():  # noqa: ASYNC110  # a file has no event
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log.read_text() == "up\nsaved\n" and said == ["stopping; what runs ends at its last checkpoint"]
    assert await child([sys.executable, "-c", "raise SystemExit(7)"], log, said.append) == 7


def test_a_start_policy_that_is_not_there_names_what_makes_it(file: Path) -> None:
    (file.parent / "sft").mkdir()
    (file.parent / "sft" / "rough.yaml").write_text("output: ../checkpoints/rough\n")
    with pytest.raises(ConfigError, match=r"rough: no such folder; `gagar sft .*/sft/rough\.yaml` makes it"):
        open_experiment(file, "set=[engine.model=checkpoints/rough, learner.model=checkpoints/rough]")


def test_the_shipped_comparison_is_whole() -> None:
    """The published arms (M4.6), each a mode and nothing else; crossings differ from their counterpart in one key."""
    root = Path(__file__).parents[2] / "configs"
    loaded = load(ExperimentConfig, root / "ablation.yaml")
    config, experiment = loaded.config, load_experiment(loaded)
    assert config.seeds == (0, 1, 2)
    cells = {cell.name: cell.config for cell in experiment.cells}
    assert [cells[f"{arm}-s0"].algorithm.mode.value for arm in config.run] == list(config.run)
    assert set(config.run) == {mode.value for mode in AdvantageMode}
    assert len(experiment.chosen()) == 15 and cells["outcome-s0"].steps >= 20
    plain = {name: c.model_dump(mode="json", exclude={"name"}) for name, c in cells.items()}
    for arm in config.arms:
        other = config.against.get(arm, config.reference)
        keys = differing(plain[f"{other}-s0"], plain[f"{arm}-s0"])
        if arm not in config.run:
            assert len(keys) == 1, f"{arm}: {keys}"
        elif arm != config.reference:
            assert set(keys) == {"algorithm.mode", "grader"}
