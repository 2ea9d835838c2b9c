"""`gagar experiment`: arms x seeds of one configuration, ordinary runs that are evaluated on the same held-out tasks.

    runs/<experiment>/
      experiment.yaml                what was asked for
      start.yaml, configs/CELL.yaml  what the children are started with
      ARM-sSEED/                     a run's folder (CELL)
      evaluations/CELL.json          its held-out evaluation, with the groups of what passed in CELL/; `start` is the
                                     policy that all cells begin with
      logs/CELL.log                  what the children print
      cells.jsonl                    how long each child took, and how it ended
      experiment.json, table.md      the figures, written anew whenever a cell has ended

A cell that was interrupted goes on from its last checkpoint; one that is complete is left alone.
"""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from configs.check import load_run, resolved
from configs.experiment_schema import ArmConfig, ExperimentConfig
from configs.load import Loaded
from configs.schema import RunConfig
from infra.errors import ConfigError, GagarError, StorageError
from orchestrator.evaluation import EVALUATIONS
from orchestrator.manifest import MANIFEST
from orchestrator.runfiles import CONFIG, read_jsonl
from orchestrator.status import run_state

logger = logging.getLogger("gagar.experiment")

START = "start"
"""Label of the evaluation of the policy that all cells begin with."""
JUDGE = "start.yaml"
"""What policies are evaluated with."""
CELLS = "cells.jsonl"
LOCK = ".lock"
SEED_STRIDE = 1000
"""Between the seeds of a source in two neighbouring seeds of an experiment."""


class CellState(StrEnum):
    """How far a cell is."""

    NEW = "new"
    HALF = "half"
    """Its run was begun; it goes on from its last checkpoint."""
    RUNNING = "running"
    """By another process."""
    TRAINED = "trained"
    """All steps are done; its evaluation is missing."""
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm with one seed."""

    arm: str
    seed: int
    config: RunConfig

    @property
    def name(self) -> str:
        """Folder of its run, and label of its evaluation."""
        return f"{self.arm}-s{self.seed}"

    @property
    def run_dir(self) -> Path:
        """Folder of its run."""
        return Path(self.config.output) / self.config.name

    @property
    def checkpoint(self) -> Path:
        """Its last one, once it is there."""
        return self.run_dir / "checkpoints" / f"step-{self.config.steps:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment with every configuration that it needs, all of them checked."""

    config: ExperimentConfig
    folder: Path
    judge: RunConfig
    """What policies are evaluated with: the base, its grader included."""
    cells: Sequence[Cell]
    """Of all arms, seeds innermost."""

    def evaluation_file(self, label: str) -> Path:
        """Where the evaluation of a cell, or of the start, is kept."""
        return self.folder / EVALUATIONS / f"{label}.json"

    def state(self, cell: Cell) -> CellState:
        """How far a cell is, from its files."""
        if self.evaluation_file(cell.name).is_file():
            return CellState.DONE
        if (cell.checkpoint / MANIFEST).is_file() and run_state(cell.run_dir) != "running":
            return CellState.TRAINED
        if not (cell.run_dir / CONFIG).is_file():
            return CellState.NEW
        return CellState.RUNNING if run_state(cell.run_dir) == "running" else CellState.HALF

    def chosen(self, only: Sequence[str] = (), *, everything: bool = False) -> list[Cell]:
        """The cells that are meant, seed by seed, so that an experiment that is cut short has whole comparisons.

        Args:
            only: ARM or ARM:SEED each; empty for the configuration's `run`.
            everything: all arms.

        Raises:
            ConfigError: one of `only` names no cell.
        """
        if only:
            wanted = {cell.name for text in only for cell in self._named(text)}
        else:
            arms = self.config.arms if everything or not self.config.run else self.config.run
            wanted = {cell.name for cell in self.cells if cell.arm in arms}
        order = {seed: i for i, seed in enumerate(self.config.seeds)}
        return sorted((c for c in self.cells if c.name in wanted), key=lambda c: order[c.seed])

    def _named(self, text: str) -> list[Cell]:
        arm, colon, seed = text.partition(":")
        found = [c for c in self.cells if c.arm == arm and (not colon or str(c.seed) == seed)]
        if not found:
            arms, seeds = ", ".join(self.config.arms), ", ".join(map(str, self.config.seeds))
            raise ConfigError(f"--only {text}: no such cell; write ARM or ARM:SEED with arms {arms} and seeds {seeds}")
        return found


def load_experiment(loaded: Loaded[ExperimentConfig]) -> Experiment:
    """Check the configuration of every cell before any of them runs.

    Raises:
        ConfigError: names the arm and every problem of it.
    """
    config = loaded.config
    folder = Path(config.output) / config.name
    evaluation = json.dumps({**config.evaluation.model_dump(exclude={"every_steps"}), "before": False, "after": True})
    judge = load_run(Path(config.base), [*config.set, f"eval={evaluation}"]).config
    if judge.sources[config.evaluation.source].groups_per_step:
        raise ConfigError(
            f"{loaded.file}: evaluation.source = {config.evaluation.source}: is trained on too, with another seed in "
            "each seed of the experiment; add a source with groups_per_step: 0 and a seed of its own"
        )
    cells = [_cell(config, arm, seed, folder) for arm in config.arms for seed in config.seeds]
    return Experiment(config=config, folder=folder, judge=judge, cells=cells)


def _cell(config: ExperimentConfig, arm: str, seed: int, folder: Path) -> Cell:
    one: ArmConfig = config.arms[arm]
    files = [Path(file) for file in one.files]
    name = f"{arm}-s{seed}"
    beside = "null"  # each cell is evaluated once, afterwards, by one judge
    if config.evaluation.every_steps is not None:
        beside = json.dumps({**config.evaluation.model_dump(), "before": False, "after": False})
    named = [f"seed={seed}", f"name={name}", f"output={json.dumps(str(folder))}"]
    changes = [*config.set, *one.set, f"eval={beside}", *named]
    try:
        sources = load_run(Path(config.base), changes, files).config.sources
        changes += [
            f"sources.{key}.seed={source.seed + SEED_STRIDE * seed}"
            for key, source in sources.items()
            if source.groups_per_step
        ]
        return Cell(arm=arm, seed=seed, config=load_run(Path(config.base), changes, files).config)
    except ConfigError as e:
        raise ConfigError(f"arm {arm}: {e}") from None


def refuse_other(experiment: Experiment) -> None:
    """What was begun with another configuration cannot be gone on with, and its figures belong elsewhere: not the cells
    that are asked for alone, since all of them stand in one table, and not the evaluations.

    Raises:
        StorageError: names the keys that differ; or an evaluation is of a run that is gone, and nothing says which.
    """
    for cell in experiment.cells:
        path, evaluation = cell.run_dir / CONFIG, experiment.evaluation_file(cell.name)
        if evaluation.is_file() and not path.is_file():
            raise StorageError(
                f"{evaluation}: its run is gone ({cell.run_dir}); put it back, or move this file away too"
            )
        _refuse(cell.run_dir, path, cell.config)
    evaluations = experiment.folder / EVALUATIONS
    if any(evaluations.glob("*.json")):
        _refuse(evaluations, experiment.folder / JUDGE, experiment.judge)


def _refuse(folder: Path, path: Path, config: RunConfig) -> None:
    """Refuse a folder that was made with a file which says something else."""
    if not path.is_file():
        return
    try:
        before = RunConfig.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, ValidationError) as e:
        raise StorageError(f"{path}: cannot be read ({e}); move {folder} away to make it anew") from None
    now = RunConfig.model_validate(resolved(config))
    if keys := sorted(differing(before.model_dump(mode="json"), now.model_dump(mode="json"))):
        raise StorageError(
            f"{folder}: was begun with another configuration ({', '.join(keys[:5])} differ); give the experiment "
            "another name, or move this folder away"
        )


@contextmanager
def alone(experiment: Experiment) -> Iterator[None]:
    """Only one process at a time works on an experiment: two would write one table, and evaluate one cell twice.

    Raises:
        GagarError: another one does.
        StorageError: the folder cannot be written.
    """
    try:
        experiment.folder.mkdir(parents=True, exist_ok=True)
        file = (experiment.folder / LOCK).open("wb")
    except OSError as e:
        raise StorageError(f"{experiment.folder}: cannot be written ({e}); choose another `output`") from e
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GagarError(
                f"{experiment.folder}: another process runs this experiment; wait for it, or stop it (SIGTERM)"
            ) from None
        except OSError as e:
            logger.warning("%s: cannot be locked (%s); start nothing else on this experiment", experiment.folder, e)
        yield


def differing(first: Mapping[str, Any], second: Mapping[str, Any], above: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    keys: list[str] = []
    for key in {*first, *second}:
        a, b = first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            keys += differing(a, b, f"{above}{key}.")
        elif a != b:
            keys.append(f"{above}{key}")
    return keys


def write_configs(experiment: Experiment, cells: Sequence[Cell]) -> None:
    """The files that children are started with.

    Raises:
        StorageError: they cannot be written.
    """
    folder = experiment.folder
    try:
        for part in ("configs", "logs", EVALUATIONS):
            (folder / part).mkdir(parents=True, exist_ok=True)
        _write(folder / "experiment.yaml", experiment.config.model_dump(mode="json"))
        _write(folder / JUDGE, resolved(experiment.judge))
        for cell in cells:
            _write(config_file(experiment, cell), resolved(cell.config))
    except OSError as e:
        raise StorageError(f"{folder}: cannot be written ({e}); choose another `output` or free space") from e


def config_file(experiment: Experiment, cell: Cell) -> Path:
    """What the child of a cell is started with."""
    return experiment.folder / "configs" / f"{cell.name}.yaml"


def _write(path: Path, data: Mapping[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    part.replace(path)


# ---- how long it takes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """What is left to do, and for how long."""

    cells: int
    hours: float | None
    """None where nothing says how long a cell takes."""
    basis: str
    """Where the hours come from, in words."""


def remaining(experiment: Experiment, cells: Sequence[Cell]) -> Remaining:
    """An estimate from the cells that have ended here, or from the configuration's `cell_minutes`."""
    left = [cell for cell in cells if experiment.state(cell) is not CellState.DONE]
    seconds: dict[str, float] = {}
    for row in read_jsonl(experiment.folder / CELLS):
        if not row["exit_code"]:  # what failed says nothing of the others; what was stopped was gone on with
            seconds[row["cell"]] = seconds.get(row["cell"], 0.0) + row["seconds"]
    done = [seconds[c.name] for c in experiment.cells if c.name in seconds and experiment.state(c) is CellState.DONE]
    if done:
        minutes: float | None = sum(done) / len(done) / 60.0
        basis = f"{minutes:.1f} minutes a cell, the mean of the {len(done)} that have ended here"
    else:
        minutes = experiment.config.cell_minutes
        basis = "no cell has ended here, and cell_minutes is not given"
        if minutes is not None:
            basis = f"{minutes:g} minutes a cell, as the configuration says (cell_minutes)"
    parallel = min(experiment.config.parallel, max(len(left), 1))
    hours = None if minutes is None else len(left) * minutes / 60.0 / parallel
    return Remaining(cells=len(left), hours=hours, basis=basis)
